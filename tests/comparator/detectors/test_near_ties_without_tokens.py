"""Expert choices in models without tokens, such as a diffusion model over latents, whose rows have no row pairs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tapscope import Dumper
from tapscope.comparator import compare


class Router(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(experts, width) / width**0.5), 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.softmax((x @ self.weight.T).float(), -1)
        shares, chosen = torch.topk(scores, 4, -1)
        chosen = (chosen + self.shift) % scores.shape[-1]
        return scores.to(x.dtype), (shares / shares.sum(-1, keepdim=True)).to(x.dtype), chosen


class Experts(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, width) / width**0.5)

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for k in range(chosen.shape[-1]):
            up = torch.einsum("...w,...wv->...v", x, self.up[chosen[..., k]])
            found = found + shares[..., k : k + 1] * nn.functional.silu(up)
        return found


class Mlp(nn.Module):
    def __init__(self, width: int = 64, experts: int = 16) -> None:
        super().__init__()
        self.gate, self.experts = Router(width, experts), Experts(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        _, shares, chosen = self.gate(x)
        found: Tensor = self.experts(x, chosen, shares)
        return found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(64), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.mlp(self.norm(x))
        return found


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, latents: Tensor) -> Tensor:
        for layer in self.layers:
            latents = layer(latents)
        return latents


def capture(
    path: Path, dtype: torch.dtype, shape: tuple[int, ...], patch: Callable[[Denoiser], None] | None = None
) -> Path:
    torch.manual_seed(0)
    model, latents = Denoiser(), torch.randn(shape)
    if patch is not None:
        patch(model)
    with Dumper(model.to(dtype), path, keep="full") as dumper:
        for _ in range(2):
            with dumper.step():
                model(latents.to(dtype))
    return path


@pytest.mark.parametrize("shape", [(4, 128, 64), (512, 64)])
def test_near_ties_without_tokens_are_found_by_row_number(tmp_path: Path, shape: tuple[int, ...]) -> None:
    report = compare(capture(tmp_path / "a", torch.float32, shape), capture(tmp_path / "b", torch.bfloat16, shape))
    assert report.exit_code == 0, report.first_divergence
    notes = {f.site: f.notes for f in report.findings}
    assert any("near tie" in note for note in notes["layers.0.mlp.gate:out[2]"])
    assert any("left out that went to other experts" in note for note in notes["layers.0.mlp.experts:out"])


def test_near_ties_without_tokens_do_not_explain_a_wrong_choice(tmp_path: Path) -> None:
    def harm(model: Denoiser) -> None:
        model.layers[1].mlp.gate.shift = 1  # type: ignore[union-attr,assignment]

    shape = (2, 64, 64)
    report = compare(
        capture(tmp_path / "a", torch.float32, shape), capture(tmp_path / "b", torch.bfloat16, shape, harm)
    )
    assert report.first_divergence is not None
    assert report.first_divergence.module == "layers.1.mlp.gate"


def test_near_ties_without_tokens_leave_the_other_rows_to_their_floor(tmp_path: Path) -> None:
    def harm(model: Denoiser) -> None:
        model.layers[0].mlp.experts.up.data[3] *= 1.5  # type: ignore[union-attr,operator]

    shape = (128, 64)
    report = compare(
        capture(tmp_path / "a", torch.float32, shape), capture(tmp_path / "b", torch.bfloat16, shape, harm)
    )
    assert report.first_divergence is not None
    assert report.first_divergence.module == "layers.0.mlp.experts"
