"""Local faults of real models are detected and named by default, in float32 and in bfloat16 against float32."""

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_runs import diff
from soak_cases import mostly_soak
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tapscope import Dumper
from tapscope.comparator import Report

IDS = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(1))
LAYER = "model.layers.1"


def capture(model: nn.Module, path: Path) -> Path:
    with torch.no_grad(), Dumper(model, path, keep="full", force=True):
        model(input_ids=IDS)
    return path


def spread_weights(model: nn.Module) -> nn.Module:
    """Set weights with rows of different size, norm weights other than 1, and nonzero biases."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5).mul_(
                    torch.empty(len(parameter), 1).log_normal_(0, 0.3)
                )
            else:
                parameter.normal_(0 if name.endswith("bias") else 1, 0.2)
    return model.eval()


def llama() -> nn.Module:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
    return spread_weights(LlamaForCausalLM(LlamaConfig(**sizes, **heads)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    model = llama()
    return model, capture(model, tmp_path_factory.mktemp("base") / "run")


def diff_model(baseline: Path, target: nn.Module, path: Path) -> Report:
    return diff(baseline, capture(target, path))


def after(module: nn.Module, change: Callable[[torch.Tensor], None]) -> None:
    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        change(out.view(-1, out.shape[-1]))
        return out

    module.register_forward_hook(hook)


def one_token_random(model: nn.Module) -> str:
    noise = torch.randn(256, generator=torch.Generator().manual_seed(5))
    after(model.get_submodule(f"{LAYER}.mlp.up_proj"), lambda x: x[40].copy_(noise))
    return f"{LAYER}.mlp.up_proj"


def one_block_zeroed(model: nn.Module) -> str:
    after(model.get_submodule(f"{LAYER}.mlp.down_proj"), lambda x: x[70, 32:40].zero_())
    return f"{LAYER}.mlp.down_proj"


def one_head_scaled(model: nn.Module) -> str:
    model.get_submodule(f"{LAYER}.self_attn.q_proj").weight.data[32:64] *= 1.04
    return f"{LAYER}.self_attn.q_proj"


def one_channel_scaled(model: nn.Module) -> str:
    model.get_submodule(f"{LAYER}.mlp.gate_proj").weight.data[77] *= 1.04
    return f"{LAYER}.mlp.gate_proj"


def one_key_of_the_wrong_position(model: nn.Module) -> str:
    after(model.get_submodule(f"{LAYER}.self_attn.k_proj"), lambda x: x[20].copy_(x[19].clone()))
    return f"{LAYER}.self_attn.k_proj"


FAULTS = (one_token_random, one_block_zeroed, one_head_scaled, one_channel_scaled, one_key_of_the_wrong_position)


@pytest.mark.parametrize(
    ("fault", "dtype"),
    mostly_soak(
        product(FAULTS, (torch.float32, torch.bfloat16)),
        default=[(FAULTS[0], torch.float32), *product(FAULTS, (torch.bfloat16,))],
    ),
)
def test_local_fault_is_named(base: tuple[nn.Module, Path], tmp_path: Path, fault: Any, dtype: torch.dtype) -> None:
    model = copy.deepcopy(base[0])
    path = fault(model)
    report = diff_model(base[1], model.to(dtype), tmp_path / "t")
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.module == path
    assert report.first_divergence.alternatives == ()
    rows = {one_token_random: (0, 40), one_block_zeroed: (1, 22), one_key_of_the_wrong_position: (0, 20)}
    if fault in rows:
        first = report.first_divergence.tokens[0]
        assert (first.place.request, first.place.position) == (str(rows[fault][0]), rows[fault][1])
        assert first.ratio > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_local_fault_is_not_reported_for_rounding(
    base: tuple[nn.Module, Path], tmp_path: Path, attention: str, dtype: torch.dtype
) -> None:
    model = copy.deepcopy(base[0])
    model.set_attn_implementation(attention)  # type: ignore[operator]
    report = diff_model(base[1], model.to(dtype), tmp_path / "t")
    assert [f"{f.site} {f.test} {f.ratio:.2f}" for f in report.findings if f.verdict.is_bad] == []
    assert report.exit_code == 0


def test_local_fault_gelu_variant_is_named_at_the_activation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    good = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=256, n_positions=64, **ids)).eval()
    bad = copy.deepcopy(good)
    bad.transformer.h[1].mlp.act = nn.GELU()
    report = diff_model(capture(good, tmp_path / "b"), bad, tmp_path / "t")
    assert [d.module for d in report.divergences] == ["transformer.h.1.mlp.act"]


def test_local_fault_of_the_rope_table_is_one_culprit(base: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model = copy.deepcopy(base[0])
    model.get_submodule("model.rotary_emb").inv_freq *= 1.02
    report = diff_model(base[1], model, tmp_path / "t")
    assert [d.module for d in report.divergences] == ["model.rotary_emb"]


def train(model: nn.Module, path: Path) -> Path:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Dumper(model, path, keep="full", grads=True, force=True) as dumper:
        for _ in range(2):
            with dumper.step(phase="train"):
                model(input_ids=IDS, labels=IDS).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return path


def test_local_fault_wrong_gradient_is_named_not_the_next_forward(base: tuple[nn.Module, Path], tmp_path: Path) -> None:
    good = copy.deepcopy(base[0])
    bad = copy.deepcopy(good)
    mlp = bad.get_submodule(f"{LAYER}.mlp")
    forward = mlp.forward
    mlp.forward = lambda x: forward(x + (x - x.detach()))  # type: ignore[method-assign]
    report = diff(train(good, tmp_path / "b"), train(bad, tmp_path / "t"))
    assert [d.module for d in report.divergences] == [f"{LAYER}.mlp"]
    assert report.divergences[0].step == 0
    assert report.divergences[0].site.endswith(".grad")
    assert any(f.role == "downstream" and not f.site.endswith(".grad") for f in report.findings)


@pytest.mark.parametrize(("rows", "width"), [(16, 96), (48, 8192)], ids=["short", "wide"])
@pytest.mark.parametrize("share", [1.0, 0.7], ids=["usual", "small"])
def test_local_fault_scaled_channel_is_found_in_few_rows(rows: int, width: int, share: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, width, bias=False))
    net[0].weight.data[11] *= share
    x = torch.randn(rows, 64)
    paths = tmp_path / "b", tmp_path / "t"
    for path, factor, dtype in zip(paths, (1.0, 1.04), (torch.float32, torch.bfloat16), strict=True):
        other = copy.deepcopy(net).to(dtype)
        other[0].weight.data[11] *= factor
        with torch.no_grad(), Dumper(other, path, keep="full"):
            other(x.to(dtype))
    report = diff(paths[0], paths[1])
    assert [(f.site, f.test) for f in report.findings if f.verdict.is_bad] == [
        ("0:out", "channel"),
        (":out", "channel"),
    ]
