"""Tensors of layout [batch, channels, height, width], whose channels are along the second axis, not the columns."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from comparator_toy import Toy, prompts, weights
from compare_runs import diff
from factories import RunFactory
from torch import Tensor, nn

from tapscope import Dumper
from tapscope.comparator import Report, compare
from tapscope.comparator.explain.recomputed_activations import NOTE
from tapscope.comparator.report.answer import answer
from tapscope.sources import open_run


class Vision(nn.Module):
    """Convolutions, batch norms, a group norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first_norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv, self.norm, self.act = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.group_norm, self.head = nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first_norm(self.stem(x)))
        out: Tensor = self.head(self.group_norm(x + self.act(self.norm(self.conv(x)))))
        return out


class Signal(nn.Module):
    """Convolutions over a signal, [batch, channels, positions]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act, self.conv = nn.Conv1d(3, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(self.act(self.stem(x)))
        return out


class Narrow(nn.Sequential):
    """Images with rows of 16, 8, 4 and 2 pixels, of which a ReLU clears most or all values."""

    def __init__(self) -> None:
        super().__init__()
        for i, (width_in, width) in enumerate(((3, 16), (16, 32), (32, 64), (64, 64))):
            self.add_module(f"conv{i}", nn.Conv2d(width_in, width, 3, 1 if i == 0 else 2, 1, bias=False))
            norm = nn.BatchNorm2d(width)
            nn.init.normal_(norm.weight, 1.0, 0.1)
            nn.init.normal_(norm.bias, -0.2, 0.1)
            self.add_module(f"norm{i}", norm)
            self.add_module(f"relu{i}", nn.ReLU())


class Clearing(nn.Sequential):
    """ReLUs that clear most values of most channels."""

    def __init__(self) -> None:
        super().__init__()
        for i, width_in in enumerate((3, 16, 16)):
            self.add_module(f"conv{i}", nn.Conv2d(width_in, 16, 3, 1, 1, bias=False))
            norm = nn.BatchNorm2d(16)
            nn.init.normal_(norm.weight, 2.0, 1.0)
            nn.init.normal_(norm.bias, -2.5, 1.5)
            self.add_module(f"norm{i}", norm)
            self.add_module(f"relu{i}", nn.ReLU6() if i == 2 else nn.ReLU())


class Deep(nn.Sequential):
    """Enough batch norms for rounding to reach a fifth of the values in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(27):
            self.add_module(f"conv{i}", nn.Conv2d(32 if i else 3, 32, 3, 1, 1, bias=False))
            self.add_module(f"norm{i}", nn.BatchNorm2d(32))
            self.add_module(f"relu{i}", nn.ReLU())


def calibrated(model: nn.Module, x: Tensor) -> nn.Module:
    """Return the model after it has set the statistics of its batch norms from one batch."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(x)
    return model


def capture(model: nn.Module, x: Tensor, out: Path, dtype: torch.dtype, harm: Callable[[nn.Module], object]) -> None:
    model = copy.deepcopy(model).eval().to(dtype)
    harm(model)
    with Dumper(model, out, keep="full"), torch.no_grad():
        model(x.to(dtype))


def report(kind: type[nn.Module], tmp_path: Path, harm: Callable[[nn.Module], object], seed: int = 3) -> Report:
    """Compare a float32 run with a bfloat16 run of the model that ``harm`` modified."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind()
        size = {Vision: (12, 12), Signal: (64,), Narrow: (16, 16)}.get(kind, (8, 8))
        x = torch.randn(4, 3, *size)
        if kind in (Clearing, Deep):
            calibrated(model, torch.randn(16, 3, *size))
    capture(model, x, tmp_path / "b", torch.float32, lambda model: None)
    capture(model, x, tmp_path / "t", torch.bfloat16, harm)
    return diff(tmp_path / "b", tmp_path / "t")


def scaled(module: str, factor: float) -> Callable[[nn.Module], object]:
    return lambda model: model.get_submodule(module).weight.data[5].mul_(factor)


@pytest.mark.parametrize(
    ("kind", "module"), [(Vision, "stem"), (Vision, "conv"), (Vision, "group_norm"), (Signal, "conv")]
)
def test_images_scaled_channel_is_named_in_16_bits(tmp_path: Path, kind: type[nn.Module], module: str) -> None:
    found = report(kind, tmp_path, scaled(module, 1.149))
    assert [d.module for d in found.divergences] == [module]
    assert found.divergences[0].finding.test == "channel"
    assert 0.09 < found.divergences[0].finding.error < 0.16, (
        "its bias is not scaled, and small channels count as typical"
    )


@pytest.mark.parametrize("kind", [Vision, Signal])
def test_images_rounding_to_16_bits_scales_no_channel(tmp_path: Path, kind: type[nn.Module]) -> None:
    found = report(kind, tmp_path, lambda model: None)
    assert (found.exit_code, found.divergences) == (0, ())


@pytest.mark.parametrize("seed", [0, 2, 3, 5])
def test_images_rounding_of_rows_that_a_relu_clears_is_small(tmp_path: Path, seed: int) -> None:
    """The rounding of a value near the kink is small relative to the rows that are not cleared."""
    found = report(Narrow, tmp_path, lambda model: None, seed)
    assert (found.exit_code, found.divergences) == (0, ())


@pytest.mark.parametrize("layer", range(1, 4))
@pytest.mark.parametrize(
    ("harm", "module"),
    [
        (lambda model, i: model.get_submodule(f"conv{i}").weight.data.mul_(1.05), "conv"),
        (lambda model, i: model.get_submodule(f"norm{i}").bias.data.add_(0.05), "norm"),
        (lambda model, i: setattr(model, f"relu{i}", nn.LeakyReLU(0.05)), "relu"),
    ],
)
def test_images_bug_near_rows_that_a_relu_clears_is_named(
    tmp_path: Path, layer: int, harm: Callable[[nn.Module, int], object], module: str
) -> None:
    found = report(Narrow, tmp_path, lambda model: harm(model, layer))
    assert [d.module for d in found.divergences][:1] == [f"{module}{layer}"]


def cleared_rows(module: nn.Module, args: object, out: Tensor) -> Tensor:
    return out.index_fill(2, torch.tensor([3]), 0.0)


def test_images_error_of_what_a_relu_leaves_is_inherited(tmp_path: Path) -> None:
    """In some channels, the ReLU's output is smaller than the rounding of its input."""
    found = report(Clearing, tmp_path, lambda model: None, 3)
    assert (found.exit_code, found.divergences) == (0, ())
    (relu,) = (finding for finding in found.findings if finding.site == "relu2:out")
    assert NOTE in relu.notes


@pytest.mark.parametrize(
    ("harm", "module"),
    [
        (lambda model: model.relu2.register_forward_hook(cleared_rows), "relu2"),
        (lambda model: setattr(model, "relu2", nn.LeakyReLU(0.05)), "relu2"),
        (lambda model: setattr(model, "relu2", nn.ReLU()), "relu2"),
        (lambda model: model.norm2.bias.data.add_(0.3), "norm2"),
    ],
)
def test_images_bug_where_a_relu_leaves_little_is_named(
    tmp_path: Path, harm: Callable[[nn.Module], object], module: str
) -> None:
    found = report(Clearing, tmp_path, harm, 3)
    assert [d.module for d in found.divergences][:1] == [module]


@pytest.mark.parametrize("seed", [0, 1])
def test_images_batch_norms_amplify_rounding(tmp_path: Path, seed: int) -> None:
    """Each batch norm subtracts means, which rounding errors do not share."""
    found = report(Deep, tmp_path, lambda model: None, seed)
    assert (found.exit_code, found.divergences) == (0, ())


@pytest.mark.parametrize("layer", [3, 12, 20])
def test_images_bug_among_many_batch_norms_is_named(tmp_path: Path, layer: int) -> None:
    found = report(Deep, tmp_path, lambda model: model.get_submodule(f"conv{layer}").weight.data.mul_(1.3), 0)
    assert [d.module for d in found.divergences][:1] == [f"conv{layer}"]


def test_images_place_is_an_index_for_show_slice(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    steps = [generator.standard_normal((1, 8, 10, 12)).astype(np.float32) for _ in range(3)]
    for name in "bt":
        with RunFactory(tmp_path / name) as run:
            for i, value in enumerate(steps):
                run.step()
                changed = value.copy()
                changed[0, 5, 2, 7] += 3.0 * (name == "t" and i == 1)
                run.put("conv:out", changed)
    found = compare(tmp_path / "b", tmp_path / "t")
    assert found.first_divergence is not None
    assert found.first_divergence.place is not None
    assert found.first_divergence.place.element == (0, 5, 2, 7)
    assert "step 1, only one element; worst at [0,5,2,7]" in "\n".join(answer(found))
    with open_run(tmp_path / "t") as run:
        (record,) = run.select(["conv:out"], steps=[1])
        assert run.array(record)[0, 5, 2, 7] == steps[1][0, 5, 2, 7] + np.float32(3.0)


def test_images_steps_equal_by_hash_count_as_compared(tmp_path: Path) -> None:
    for name in "bt":
        with RunFactory(tmp_path / name) as run:
            for i in range(4):
                run.step()
                run.put("conv:out", np.full((1, 2, 3, 4), i, np.float32) * (1.0 + 1e-7 * (name == "t" and i == 2)))
    assert "1 site, steps 0-3" in "\n".join(answer(compare(tmp_path / "b", tmp_path / "t")))


def test_images_next_command_names_the_rank_of_the_place(tmp_path: Path) -> None:
    def harmed(value: np.ndarray) -> np.ndarray:
        value[:, 40:48] *= -1.0
        return value

    texts, tables = prompts((9, 6)), weights()
    Toy(tables, tp=2).write(tmp_path / "b", texts).close()
    Toy(tables, tp=2, hooks={"model.layers.1.self_attn.q_proj:out": harmed}).write(tmp_path / "t", texts).close()
    _, where, _, command = answer(compare(tmp_path / "b", tmp_path / "t"))
    assert command.endswith("q_proj:out --step 0 --rank 1")
    found = re.search(r"position (\d+), column 40 \(on rank 1: --slice (\d+),(\d+)\)", where)
    assert found is not None
    position, row, column = map(int, found.groups())
    assert (column, row) == (40 - 32, position), "what `tapscope show --rank 1 --slice` takes"
