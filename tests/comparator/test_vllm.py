"""vLLM's module tree against transformers on the same weights: fused linears, norms that return two, SiluAndMul."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare_runs import diff
from factories import RunFactory
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from vllm_like import VllmLlama

from tapscope.comparator import Report
from tapscope.core.observe import RowSpan
from tapscope.dumper import Dumper

CONFIG = LlamaConfig(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=97,
    max_position_embeddings=64,
    attn_implementation="eager",
    tie_word_embeddings=False,
)
IDS = torch.arange(2, 26)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    weights = {name: torch.randn_like(w) * (0.15 if w.ndim > 1 else 0.1) for name, w in model.state_dict().items()}
    weights = {name: w + 1 if name.endswith("norm.weight") else w for name, w in weights.items()}
    model.load_state_dict(weights)
    path = tmp_path_factory.mktemp("vllm") / "hf"
    with torch.no_grad(), Dumper(model, path, keep="full", params=True) as dumper, dumper.step():
        model(input_ids=IDS[None], use_cache=False)
    return path, weights


def serve(model: VllmLlama, path: Path, **options: Any) -> Path:
    rows = [RowSpan("0", 0, len(IDS), 0, 0)]
    dumper = Dumper(model, path, **{"keep": "full", "params": True, **options})
    with torch.no_grad(), dumper, dumper.step(grid=(len(IDS),), rows=rows, token_ids=IDS):
        model.compute_logits(model(IDS, torch.arange(len(IDS))))
    return path


def diff_with_vllm(
    reference: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    bug: Callable[[VllmLlama], None] | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Report:
    model = VllmLlama(CONFIG).load(reference[1]).to(dtype)
    if bug is not None:
        bug(model)
    return diff(reference[0], serve(model, tmp_path / "served", **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vllm_healthy_model_agrees(
    reference: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, dtype: torch.dtype
) -> None:
    report = diff_with_vllm(reference, tmp_path, dtype=dtype)
    assert [(f.site, f.verdict, f.notes) for f in report.findings if f.verdict.is_bad] == []
    assert report.coverage.partial == ()
    assert report.exit_code == 0
    met = {f.target.site: f.baseline.site for f in report.findings if f.baseline and f.target}
    for i in range(CONFIG.num_hidden_layers):
        mlp = f"model.layers.{i}.mlp"
        assert met[f"{mlp}.act_fn:out"] == f"{mlp}.down_proj:in[input]"
        assert met[f"{mlp}.down_proj:in[input_]"] == f"{mlp}.down_proj:in[input]"


class Relu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.relu(gate) * up


def relu(model: VllmLlama) -> None:
    act: Any = model.model.layers[1].mlp.act_fn
    act.forward = Relu().forward


def scaled(path: str) -> Callable[[VllmLlama], None]:
    def bug(model: VllmLlama) -> None:
        with torch.no_grad():
            model.get_submodule(path).weight.mul_(1.5)

    return bug


@pytest.mark.parametrize("params", [True, False])
@pytest.mark.parametrize(
    ("bug", "named"),
    [
        (relu, "model.layers.1.mlp.act_fn"),
        (scaled("model.layers.1.mlp.down_proj"), "model.layers.1.mlp.down_proj"),
        (scaled("model.layers.2.post_attention_layernorm"), "model.layers.2.post_attention_layernorm"),
        (scaled("model.layers.0.self_attn.o_proj"), "model.layers.0.self_attn.o_proj"),
    ],
)
def test_vllm_bug_is_named(
    reference: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    bug: Callable[[VllmLlama], None],
    named: str,
    params: bool,
) -> None:
    report = diff_with_vllm(reference, tmp_path, bug, params=params)
    assert report.first_divergence is not None
    assert report.first_divergence.module == named
    assert report.exit_code == 1


@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize("turned", [False, True])
def test_vllm_fused_layers_are_recognised_by_width_or_framework(tmp_path: Path, inputs: bool, turned: bool) -> None:
    rng = np.random.default_rng(0)
    gate, up = (rng.standard_normal((5, 8)).astype(np.float32) for _ in range(2))
    active = gate / (1 + np.exp(-gate))
    product = active * up
    mlp = "model.layers.0.mlp"
    separate = {f"{mlp}.gate_proj:out": gate, f"{mlp}.up_proj:out": up}
    separate |= {
        f"{mlp}.act_fn:in[input]": gate,
        f"{mlp}.act_fn:out": active,
        f"{mlp}.down_proj:in[input]": active * up,
    }
    both = np.concatenate([gate, up], 1)
    served = {f"{mlp}.gate_up_proj:out[0]": both} | ({f"{mlp}.act_fn:in[args.0]": both} if inputs else {})
    served |= {f"{mlp}.act_fn:out": product}
    paths = []
    for name, sites, framework in (("hf", separate, "transformers"), ("sglang", served, "sglang")):
        with RunFactory(tmp_path / name, framework=framework) as run:
            run.step()
            for site, value in sites.items():
                run.put(site, value)
        paths.append(tmp_path / name)
    report = diff(paths[turned], paths[not turned])
    assert report.exit_code == 0
    assert [f.verdict for f in report.findings if f.matched_by == "product"] == ["same"]
