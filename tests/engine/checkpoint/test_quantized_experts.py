"""Experts stay quantized in memory and produce the same bits as dequantized experts."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import reference_logits
from moe_checkpoints import make_moe
from quantized_checkpoints import INT4, PROMPT, logits_of, make, make_mxfp4, set_config
from safetensors.torch import load_file, save_file
from soak_cases import mostly_soak

from tapscope.core.errors import CheckpointError
from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM
from tapscope.engine.execution.quantized_layers import quantized_bytes
from tapscope.engine.layers import fused
from tapscope.engine.layers.clamped_experts import ClampedExperts
from tapscope.engine.layers.experts import Experts
from tapscope.kernels import triton
from tapscope.sources import open_run

torch.set_num_threads(1)
BUILD = partial(make_moe, family="qwen3_moe", seed=3, num_hidden_layers=2, num_experts=4, mlp_only_layers=[])
Make = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module", params=["fp8", "int8", "int4", "awq"])
def experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """Return (format, quantized checkpoint, equivalent dequantized checkpoint)."""
    return request.param, *make(tmp_path_factory.mktemp(request.param), request.param, BUILD)


@pytest.mark.parametrize(
    "kind", mostly_soak(["int8", "int4", "gptq", "awq", "mxfp4"], default=["int8", "awq", "mxfp4"])
)
def test_kernels_multiply_the_rows_of_all_experts(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the GPU path in Triton's interpreter: one launch per stack of matrices for all rows of a step."""
    if triton.why_not(torch.device("cpu")) is not None:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1 and a CPU")
    path, _ = make_mxfp4(tmp_path) if kind == "mxfp4" else make(tmp_path, kind, BUILD)
    expected, launches = logits_of(path), []
    monkeypatch.setattr(fused, "may_run_on", lambda device: True)
    for module in (Experts, ClampedExperts):
        monkeypatch.setattr(module, "grouped_product", counted(module.grouped_product, launches))
    found = logits_of(path)
    assert len(launches) >= 4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def counted(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """Wrap ``function`` to append the third argument of each call to ``calls``."""

    def call(self: Any, codes: Any, scale: Any, name: str, *args: Any) -> Any:
        calls.append(name)
        return function(self, codes, scale, name, *args)

    return call


def test_quantized_experts_have_the_bits_of_dequantized_ones_in_less_memory(experts: tuple[str, Path, Path]) -> None:
    kind, quantized, dequantized = experts
    kept, dense = (logits_of(quantized, quantized_layers=how) for how in ("weight_only", "dequantize"))
    assert torch.equal(kept, dense)
    torch.testing.assert_close(kept, reference_logits(dequantized, PROMPT), rtol=1e-4, atol=1e-4)
    with LLM(quantized, dtype="bfloat16") as llm:
        modules = [module for module in llm.model.modules() if isinstance(module, Experts)]
        assert {module.gate_up_proj.element_size() for module in modules} == {1}
        stored, in_bf16 = quantized_bytes(llm.model)
    plain = load_file(dequantized / "model.safetensors")
    assert in_bf16 == sum(2 * weight.numel() for name, weight in plain.items() if "_proj" in name)
    limit = {"int8": 0.57} | dict.fromkeys(INT4, 0.32)  # an int8 scale takes 4 bytes per 32 features of down_proj
    assert stored <= limit.get(kind, 0.52) * in_bf16


@pytest.mark.parametrize("ep", [1, 2])
def test_quantized_experts_are_split_over_ranks(experts: tuple[str, Path, Path], ep: int) -> None:
    """A rank holds whole experts, or 16 features that begin inside a block of 24 or a group of 32."""
    _, quantized, dequantized = experts
    found = logits_of(quantized, tp=2, ep=ep, quantized_layers="weight_only")
    torch.testing.assert_close(found, reference_logits(dequantized, PROMPT), rtol=1e-4, atol=1e-4)


def test_online_fp8_keeps_experts_in_fp8(tmp_path: Path) -> None:
    path = BUILD(tmp_path / "model")
    with LLM(path, quantization="fp8", dtype="bfloat16") as llm:
        experts = llm.model.model.layers[0].mlp.experts
        assert experts.gate_up_proj.dtype == torch.float8_e4m3fn
        scales = experts.scales["gate_up_proj"]
        weight = load_file(path / "model.safetensors")["model.layers.0.mlp.experts.1.up_proj.weight"]
        dequantized = experts.gate_up_proj[1, 32:].float() * scales[1, 32:]
        torch.testing.assert_close(scales[1, 32:, 0], weight.abs().amax(1) / 448)
        assert float((dequantized - weight).norm() / weight.norm()) < 0.04


def test_stacked_fp8_experts_stay_quantized(tmp_path: Path) -> None:
    """Experts are stacked in one tensor per layer, with block scales for each matrix."""
    quantized, _ = make(tmp_path, "fp8", BUILD)
    one_by_one = logits_of(quantized)
    tensors, stacks = load_file(quantized / "model.safetensors"), {}
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        for suffix in ("", "_scale_inv"):
            parts = [
                [tensors.pop(f"{path}.{e}.{n}_proj.weight{suffix}") for e in range(4)] for n in ("gate", "up", "down")
            ]
            stacks[f"{path}.down_proj{suffix}"] = torch.stack(parts[2])
            if not suffix:  # 32 rows of gate are not a multiple of 24, so the scales cannot be stacked
                stacks[f"{path}.gate_up_proj"] = torch.cat([torch.stack(parts[0]), torch.stack(parts[1])], 1)
        codes = stacks[f"{path}.gate_up_proj"]
        stacks[f"{path}.gate_up_proj_scale_inv"] = torch.full((4, -(-codes.shape[1] // 24), -(-64 // 24)), 0.01)
    save_file(tensors | stacks, quantized / "model.safetensors", {"format": "pt"})
    kept, dense = (logits_of(quantized, quantized_layers=how) for how in ("weight_only", "dequantize"))
    assert torch.equal(kept, dense)
    assert not torch.equal(kept, one_by_one)


def _asks_for_inputs(path: Path) -> Path:
    inputs = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    return set_config(path, config_groups={"group_0": {"targets": ["Linear"], "input_activations": inputs}})


def test_inputs_of_experts_are_quantized_as_the_config_asks_and_are_sites(tmp_path: Path) -> None:
    quantized, dequantized = make(tmp_path, "int8", BUILD)
    exact = reference_logits(dequantized, PROMPT)
    observer = partial(make_observer, out=str(tmp_path / "run"), config=DumperConfig())
    found = logits_of(_asks_for_inputs(quantized), observer=observer)
    assert 1e-3 < float((found - exact).norm() / exact.norm()) < 0.1
    records = {record.key.site: record for record in open_run(tmp_path / "run").records}
    pairs, path = 2 * len(PROMPT), "model.layers.1.mlp.experts"
    shapes: dict[str, Any] = {"gate_up_input_quantizer": (64, "int8"), "down_input_quantizer": (32, "int8")}
    for name, (width, dtype) in shapes.items():
        codes, scales = (records[f"{path}.{name}:out[{i}]"] for i in range(2))
        assert (codes.dtype, list(codes.shape)) == (dtype, [pairs, width])
        assert (scales.dtype, list(scales.shape)) == ("float32", [pairs, 1])


def test_static_scales_of_experts_are_the_largest_and_are_updated(tmp_path: Path) -> None:
    quantized, _ = make(tmp_path, "modelopt", BUILD)
    tensors = load_file(quantized / "model.safetensors")
    weights = [name for name in tensors if f"{name}_scale" in tensors]
    for expert, name in enumerate(weights):
        tensors[name.replace(".weight", ".input_scale")] = torch.tensor(0.01 * (1 + expert % 7))
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    with LLM(quantized, dtype="float32") as llm:
        quantizer = llm.model.model.layers[0].mlp.experts.down_input_quantizer
        names = [name for name in weights if "layers.0.mlp.experts" in name and "down_proj" in name]
        largest = max(float(tensors[name.replace(".weight", ".input_scale")]) for name in names)
        assert float(quantizer.input_scale) == pytest.approx(largest)
        tensors |= {name: 2 * tensor for name, tensor in tensors.items() if name.endswith("input_scale")}
        save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
        llm.engine.update_weights(quantized)
        assert float(quantizer.input_scale) == pytest.approx(2 * largest)


def test_mxfp4_experts_of_another_architecture_are_refused(tmp_path: Path) -> None:
    path = BUILD(tmp_path / "model")
    values = json.loads((path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="'mxfp4' with model_type 'qwen3_moe' is not supported; supported: gpt_o"):
        LLM(path)
