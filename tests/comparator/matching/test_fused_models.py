"""Two real models of transformers with one set of weights: Phi-3, whose linears are fused, and Llama, whose are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_runs import diff
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from tapscope.comparator import Report
from tapscope.dumper import Dumper

SETTINGS: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def models() -> tuple[Any, Any]:
    torch.manual_seed(0)
    llama, phi = LlamaForCausalLM(LlamaConfig(**SETTINGS)), Phi3ForCausalLM(Phi3Config(**SETTINGS))
    weights = {name: torch.randn_like(w) * (0.15 if w.ndim > 1 else 0.1) for name, w in llama.state_dict().items()}
    weights = {name: w + 1 if name.endswith("norm.weight") else w for name, w in weights.items()}
    fused = dict(weights)
    for i in range(SETTINGS["num_hidden_layers"]):
        for whole, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            names = [f"model.layers.{i}.{whole.partition('.')[0]}.{part}_proj.weight" for part in parts]
            fused[f"model.layers.{i}.{whole}.weight"] = torch.cat([fused.pop(name) for name in names])
    llama.load_state_dict(weights)
    phi.load_state_dict(fused)
    return llama.eval(), phi.eval()


def capture(model: Any, path: Path) -> Path:
    ids = torch.arange(2, 26).view(2, 12)
    with Dumper(model, path, keep="full", grads=True, params=True, force=True) as dumper, dumper.step(phase="train"):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()
    return path


def swap_gate_and_up(model: Any) -> None:
    weight = model.model.layers[1].mlp.gate_up_proj.weight
    with torch.no_grad():
        weight.copy_(torch.cat(weight.chunk(2)[::-1]))


def shift_one_value_head(model: Any) -> None:
    weight = model.model.layers[0].self_attn.qkv_proj.weight  # 48 rows of q, 16 of k, 16 of v
    with torch.no_grad():
        weight[64:72] += 0.05 * torch.randn_like(weight[64:72])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Report]:
    root = tmp_path_factory.mktemp("phi")
    llama, _ = models()
    capture(llama, root / "llama")

    def diff_with_phi(bug: Callable[[Any], None] | None = None, *, turned: bool = False) -> Report:
        _, phi = models()
        if bug is not None:
            bug(phi)
        capture(phi, root / "phi")
        paths = ("phi", "llama") if turned else ("llama", "phi")
        return diff(root / paths[0], root / paths[1])

    return diff_with_phi


@pytest.mark.parametrize("turned", [False, True])
def test_fused_models_forward_and_backward_agree_part_by_part(runs: Callable[..., Report], turned: bool) -> None:
    report = runs(turned=turned)
    assert report.exit_code == 0
    fused = [f for f in report.findings if f.matched_by.startswith("fused ") and "input" not in f.matched_by]
    # out, param[weight] and their gradients of five parts in two layers
    assert len(fused) == 4 * 5 * 2
    assert not any(f.verdict.is_bad for f in report.findings)
    assert all(f.basis in ("values", "hash") for f in fused)


@pytest.mark.parametrize(
    ("bug", "named"),
    [
        (swap_gate_and_up, "model.layers.1.mlp.gate_proj"),
        (shift_one_value_head, "model.layers.0.self_attn.v_proj"),
    ],
)
def test_fused_models_bug_in_one_part_names_that_part(runs: Callable[..., Report], bug: Any, named: str) -> None:
    report = runs(bug)
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.module == named
    turned = runs(bug, turned=True)
    assert turned.first_divergence is not None
    assert turned.first_divergence.module in named.replace("gate_proj", "gate_up_proj").replace("v_proj", "qkv_proj")
