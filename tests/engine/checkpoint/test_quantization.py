"""Quantized checkpoints match transformers on the dequantized weights; weights are quantized while loading."""

import json
import logging
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama
from engine_helpers import reference_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import CASES, INT4, PROMPT, logits_of, make, set_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from tapscope.core.errors import CheckpointError, ConfigError
from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM
from tapscope.engine.checkpoint.quantization import ActivationScheme, block_of, dequantize, quantize_to_fp8
from tapscope.engine.distributed.heartbeat import Activity
from tapscope.engine.execution.quantized_layers import quantized_bytes
from tapscope.engine.layers.quantized import InputQuantizer, ScaleLayout, ScalePart, quantized_linear
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.kernels.quantization import dequantize_reference, quantize_reference, scaled_linear_reference
from tapscope.sources import open_run

torch.set_num_threads(1)


@pytest.mark.parametrize("kind", CASES)
def test_quantized_checkpoint_matches_its_dequantized_weights(tmp_path: Path, kind: str) -> None:
    quantized, dequantized = make(tmp_path, kind)
    torch.testing.assert_close(logits_of(quantized), reference_logits(dequantized, PROMPT), rtol=1e-4, atol=1e-4)


def test_kv_scales_warn_if_unused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(make(tmp_path, "modelopt")[0]):
        assert "2 scales of an FP8 KV cache" in caplog.text
        assert "k_scale, are ignored because its config does not request FP8" in caplog.text


def test_dequantize_supports_shards_that_split_blocks(tmp_path: Path) -> None:
    quantized, dequantized = make(tmp_path, "fp8")
    torch.testing.assert_close(logits_of(quantized, tp=2), reference_logits(dequantized, PROMPT), rtol=1e-4, atol=1e-4)


@settings(max_examples=50)
@given(st.data())
def test_dequantize_of_a_slice_equals_slice_of_the_whole(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    block = data.draw(st.sampled_from([(1, columns), (rows, columns), (7, 5), (16, 16)]))
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.5
    assert block_of((rows, columns), tuple(scales.shape), block) is not None
    stored = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    dequantized = dequantize(stored, scales, block, (0, 0))
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    assert torch.equal(dequantize(stored[top:, left:], scales, block, (top, left)), dequantized[top:, left:])
    assert torch.equal(dequantized[-1, -1], stored[-1, -1].float() * scales[-1, -1])


def _spoiled(quantized: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    weights = load_file(quantized / "model.safetensors")
    change(weights)
    save_file(weights, quantized / "model.safetensors", metadata={"format": "pt"})
    return quantized


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("fp8", lambda w: w.pop(f"{UP}_scale_inv"), r"up_proj.weight .* is quantized but has no scales"),
        (
            "fp8",
            lambda w: w.update({f"{UP}_scale_inv": torch.ones(3, 3)}),
            r"the shape \[3, 3\] of .*_scale_inv does not match",
        ),
        (
            "int8",
            lambda w: w.update({UP.replace("weight", "weight_zero_point"): torch.ones(4, 1, dtype=torch.int8)}),
            "only symmetric",
        ),
        ("fp8", lambda w: w[f"{UP}_scale_inv"].fill_(math.nan), "up_proj.weight_scale_inv in .* NaN or infinite"),
        ("modelopt", lambda w: w[f"{UP}_scale"].fill_(math.inf), "up_proj.weight_scale in .* NaN or infinite"),
        ("int8", lambda w: w.update({f"{UP}_scale": torch.ones(96, 1).int()}), "has dtype int32; the scales of a"),
        ("int8", lambda w: w.update({UP: w[UP].float()}), "has dtype F32 and scales, .*; expected one of F8_E4M3"),
    ],
)
def test_dequantize_errors_name_the_tensor(tmp_path: Path, kind: str, change: Any, message: str) -> None:
    quantized, _ = make(tmp_path, kind)
    with pytest.raises(CheckpointError, match=message):
        LLM(_spoiled(quantized, change))


def _packed(inputs: Any = None, **weights: Any) -> dict[str, Any]:
    """Return a compressed-tensors quantization_config for 4-bit weights."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; supported: fp8"),
        ({"quant_method": "gptq", "bits": 8}, "bits 8 is not supported; supported: 4"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0; it must be -1 or an integer above 0"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up.*": {"bits": 8}}}, r"dynamic '\+:\.\*up\.\*' is not"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24' is not supported"),
        (
            _packed(num_bits=8),
            "num_bits of the weights of g, format 'pack-quantized', 8 is not supported",
        ),
        (_packed(type="float"), "type of the weights of g, format 'pack-quantized', 'float' is not supported"),
        (_packed(group_size="32"), "group_size of the weights of g is '32'"),
        (_packed(inputs={"num_bits": 8}), "input_activations of g are not supported with 4-bit weights"),
        (_packed() | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config with config_groups"),
        (_packed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, 'sparsity_config with format "sparse-24'),
        (
            {"quant_method": "mxfp4"},
            "'mxfp4' with model_type 'llama' is not supported; supported: gpt_oss",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        (["fp8"], "must be a JSON object"),
    ],
)
def test_quantization_rejects_unknown_formats(tmp_path: Path, config: Any, message: str) -> None:
    path = make_llama(tmp_path / "model", num_hidden_layers=1)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=message):
        LLM(path)


def test_checkpoint_read_rejects_int8_without_quantization_config(tmp_path: Path) -> None:
    quantized, dequantized = make(tmp_path, "int8")
    (quantized / "config.json").write_text((dequantized / "config.json").read_text())
    with pytest.raises(CheckpointError, match="weight_scale"):
        LLM(quantized)


def test_online_fp8_rounds_linear_layers_except_excluded_modules(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", num_hidden_layers=2)
    options = {"quantization": "fp8", "exclude_modules": ("*.down_proj",)}
    weights = load_file(path / "model.safetensors")
    excluded = {"embed", "lm_head", "down_proj"}
    for name, weight in weights.items():
        if weight.ndim == 2 and not any(word in name for word in excluded):
            codes, scales = quantize_to_fp8(weight)
            weights[name] = (codes.float() * scales).to(weight.dtype)
    expected = make_llama(tmp_path / "expected", num_hidden_layers=2)
    save_file(weights, expected / "model.safetensors", metadata={"format": "pt"})
    one = logits_of(path, **options)
    torch.testing.assert_close(one, reference_logits(expected, PROMPT), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(one, reference_logits(path, PROMPT), atol=1e-3)
    torch.testing.assert_close(logits_of(path, tp=2, **options), one, rtol=1e-4, atol=1e-4)


def test_online_fp8_weights_are_updated_in_place(tmp_path: Path) -> None:
    old, new = (make_llama(tmp_path / name, seed=seed, num_hidden_layers=2) for seed, name in enumerate(("old", "new")))
    options: dict[str, Any] = {"quantization": "fp8", "exclude_modules": ("*.down_proj",)}
    weights = load_file(new / "model.safetensors")
    part = tmp_path / "part"
    part.mkdir()
    save_file({UP: weights[UP]}, part / "model.safetensors", metadata={"format": "pt"})
    quantized, _ = make(tmp_path, "fp8")
    with LLM(new, **options) as llm:
        expected = [parameter.clone() for parameter in llm.model.parameters()]
    with LLM(old, **options) as llm:
        layer = llm.model.model.layers[0].mlp.gate_up_proj
        before = layer.weight.float()
        llm.engine.update_weights(part, partial=True)
        changed = (layer.weight.float() != before).any(1)
        assert not changed[: len(changed) // 2].any()  # gate_proj comes first, then up_proj
        assert changed[len(changed) // 2 :].all()
        with pytest.raises(CheckpointError, match=r"is already quantized \(fp8\)"):
            llm.engine.update_weights(quantized, partial=True)
        assert llm.engine.runner.heartbeat.read().activity is Activity.WORKING  # LOADING tolerates longer hangs
        llm.engine.update_weights(new)
        found = list(llm.model.parameters())
        assert all(torch.equal(one.float(), other.float()) for one, other in zip(found, expected, strict=True))


def test_online_fp8_rejects_conflicting_settings(tmp_path: Path) -> None:
    quantized, dequantized = make(tmp_path, "fp8")
    with pytest.raises(ConfigError, match=r"is already quantized \(fp8\)"):
        LLM(quantized, quantization="fp8")
    with pytest.raises(ConfigError, match="no linear layer matches 'lm_head'"):
        LLM(dequantized, quantization="fp8", exclude_modules=("lm_head",))
    with pytest.raises(ConfigError, match="needs quantization"):
        LLM(dequantized, exclude_modules=("*",))
    for none in ("", 5, [5]):
        with pytest.raises(ConfigError, match="exclude_modules"):
            LLM(dequantized, quantization="fp8", exclude_modules=none)


@pytest.mark.parametrize("globs", [["*.down_proj", "*.mlp.*"], "*.down_proj,*.mlp.*"])
def test_exclude_modules_accepts_a_list_or_a_string(tmp_path: Path, globs: Any) -> None:
    config = EngineConfig.build(tmp_path, {"quantization": "fp8", "exclude_modules": globs})
    assert config.exclude_modules == ("*.down_proj", "*.mlp.*")
    assert EngineConfig.build(tmp_path, {"quantization_param_path": tmp_path}).quantization_param_path == str(tmp_path)


def test_dummy_weights_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", num_hidden_layers=2)
    (path / "model.safetensors").unlink()
    one = logits_of(path, load_format="dummy")
    assert one.std() > 0
    torch.testing.assert_close(logits_of(path, load_format="dummy", tp=2), one, rtol=1e-4, atol=1e-4)


def test_load_weights_detects_a_file_modified_during_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tapscope.engine.checkpoint.checkpoint import Checkpoint

    path = make_llama(tmp_path / "model", num_hidden_layers=1)
    read = Checkpoint.read

    def read_and_touch(self: Checkpoint, *args: Any, **more: Any) -> Tensor:
        (path / "model.safetensors").touch()
        return read(self, *args, **more)

    monkeypatch.setattr(Checkpoint, "read", read_and_touch)
    with pytest.raises(CheckpointError, match="was modified during loading"):
        LLM(path)


def test_startup_timer_times_and_logs_stages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_llama(tmp_path / "model", num_hidden_layers=1)
    with caplog.at_level("INFO", logger="tapscope.engine"), LLM(path) as llm:
        startup_timer = llm.engine.state()["startup_s"]
    assert list(startup_timer) == ["model", "weights", "cache"]
    assert all(seconds > 0 for seconds in startup_timer.values())
    assert "weights took" in caplog.text


def _with_inputs(path: Path, kind: str) -> Path:
    """Change config.json in ``path`` to request quantized inputs; return ``path``."""
    values = json.loads((path / "config.json").read_text())
    inputs = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    more: dict[str, Any] = {
        "fp8": {"activation_scheme": "dynamic"},
        "ue8m0": {"activation_scheme": "dynamic"},
        "int8": {"config_groups": {"group_0": {"targets": ["Linear"], "input_activations": inputs}}},
    }[kind]
    values["quantization_config"] |= more
    (path / "config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("kind", CASES)
def test_weight_only_layers_are_bit_equal_to_dequantized_ones_in_half_the_memory(tmp_path: Path, kind: str) -> None:
    quantized, _ = make(tmp_path, kind)
    kept, dense = (logits_of(quantized, quantized_layers=how) for how in ("weight_only", "dequantize"))
    assert torch.equal(kept, dense)
    with LLM(quantized, dtype="bfloat16") as llm:
        layer = llm.model.model.layers[0].mlp.down_proj
        assert layer.weight.dtype == torch.uint8 if kind in INT4 else layer.weight.element_size() == 1
        stored, in_bf16 = quantized_bytes(llm.model)
    plain = load_file(tmp_path / "meant" / "model.safetensors")
    assert in_bf16 == sum(2 * weight.numel() for name, weight in plain.items() if "_proj" in name)
    limit = {"int8": 0.54} | dict.fromkeys(INT4, 0.32)  # an int8 scale takes 4 bytes per row of 64 features
    assert stored <= limit.get(kind, 0.52) * in_bf16


@pytest.mark.parametrize("kind", ["fp8", "ue8m0", "int8"])
def test_inputs_are_quantized_as_the_config_asks(tmp_path: Path, kind: str) -> None:
    quantized, dequantized = make(tmp_path, kind)
    exact = reference_logits(dequantized, PROMPT)
    found = logits_of(_with_inputs(quantized, kind))
    error = float((found - exact).norm() / exact.norm())
    assert 1e-3 < error < 0.1
    torch.testing.assert_close(logits_of(quantized, quantized_layers="weight_only"), exact, rtol=1e-4, atol=1e-4)
    two = logits_of(quantized, tp=2)  # each rank scales a token by its own features
    assert float((two - exact).norm() / exact.norm()) < 0.1


def test_int8_product_is_exact_in_integers() -> None:
    noise = torch.Generator().manual_seed(0)
    input, weight = (torch.randn(size, 300, generator=noise) for size in (5, 7))
    (x, x_scale), (w, w_scale) = (quantize_reference(t, torch.int8, None) for t in (input, weight))
    rows = torch.arange(7, dtype=torch.int32)
    found = scaled_linear_reference(x, x_scale, w, w_scale, rows, torch.float32, group=None)
    assert torch.equal(found, (x.long() @ w.long().T).float() * (x_scale * w_scale.T))


@pytest.mark.parametrize("block", [(1, 100), (8, 16)])
def test_input_groups_are_those_of_the_config_for_any_layout_of_the_weight(block: tuple[int, int]) -> None:
    noise = torch.Generator().manual_seed(0)
    input, weight = (torch.randn(size, 100, generator=noise) for size in (5, 8))
    layout = ScaleLayout.of([ScalePart((8, 100), (0, 0), block)])
    assert layout is not None
    codes, scale = weight.to(torch.float8_e4m3fn), torch.rand(layout.shape, generator=noise) + 0.5
    quantizer = InputQuantizer(ActivationScheme(torch.float8_e4m3fn, 64), "t h")  # groups of 64 and 36 features
    found = quantized_linear(input, codes, scale, layout, None, quantizer)
    x, by = quantizer(input)
    dense = dequantize_reference(codes, scale, layout.rows, layout.group, torch.float32)
    exact = (x.float() * by.repeat_interleave(64, 1)[:, :100]) @ dense.T
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


def test_quantized_input_and_its_scale_are_sites(tmp_path: Path) -> None:
    quantized = _with_inputs(make(tmp_path, "int8")[0], "int8")
    observer = partial(make_observer, out=str(tmp_path / "run"), config=DumperConfig())
    with LLM(quantized, observer=observer) as llm:
        llm.generate([PROMPT], max_new_tokens=1)
    records = {record.key.site: record for record in open_run(tmp_path / "run").records}
    codes, scales = (records[f"model.layers.1.mlp.down_proj.input_quantizer:out[{i}]"] for i in range(2))
    assert (codes.dtype, list(codes.shape)) == ("int8", [len(PROMPT), 96])
    assert (scales.dtype, list(scales.shape)) == ("float32", [len(PROMPT), 1])


@pytest.mark.parametrize("scale_fmt", [None, "float", "ue8m0"])
def test_scale_fmt_says_whether_the_scales_of_inputs_are_powers_of_two(tmp_path: Path, scale_fmt: str | None) -> None:
    quantized = set_config(make(tmp_path, "ue8m0")[0], activation_scheme="dynamic", scale_fmt=scale_fmt)
    seen: list[Tensor] = []
    with LLM(quantized) as llm:
        quantizer = llm.model.model.layers[1].mlp.down_proj.input_quantizer
        quantizer.register_forward_hook(lambda _module, _args, output: seen.append(output[1].clone()))
        llm.generate([PROMPT], max_new_tokens=1)
    assert seen[0].shape == (len(PROMPT), 4)
    assert bool((seen[0].frexp().mantissa == 0.5).all()) == (scale_fmt == "ue8m0")


def test_quantized_layers_refuse_weights_of_another_format(tmp_path: Path) -> None:
    quantized, dequantized = make(tmp_path, "int8")
    with LLM(quantized) as llm:
        before = llm.generate([PROMPT], max_new_tokens=4)[0].token_ids
        with pytest.raises(CheckpointError, match="has dtype F32, the model holds it in I8: start the engine with"):
            llm.engine.update_weights(dequantized)
        llm.engine.update_weights(quantized)
        assert llm.generate([PROMPT], max_new_tokens=4)[0].token_ids == before


def test_update_of_weights_replaces_static_input_scales(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantized, _ = make(tmp_path, "modelopt")

    def write(name: str, scale: float | None) -> Path:
        """Write a copy in which up_proj has ``scale`` and the other layers 0.5; None: no layer has a scale."""
        folder = tmp_path / name
        shutil.copytree(quantized, folder)
        weights = load_file(folder / "model.safetensors")
        for tensor in [t for t in weights if scale is not None and f"{t}_scale" in weights]:
            value = scale if tensor == UP else 0.5
            weights[tensor.replace(".weight", ".input_scale")] = torch.tensor(value)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    old, new, without, zero = write("old", 2.0), write("new", 0.25), write("without", None), write("zero", 0.0)
    with LLM(new, dtype="float32") as llm:
        expected = llm.generate([PROMPT], max_new_tokens=6)[0].token_ids
    with caplog.at_level(logging.WARNING), LLM(without, dtype="float32") as llm:
        assert llm.model.model.layers[0].mlp.gate_up_proj.input_quantizer is None
    assert "linear layers do not quantize their input, as config.json asks" in caplog.text
    with LLM(old, dtype="float32") as llm:
        quantizer = llm.model.model.layers[0].mlp.gate_up_proj.input_quantizer
        for folder, match in ((without, "has no input_scale"), (zero, "must be a finite number above 0")):
            with pytest.raises(CheckpointError, match=match):
                llm.engine.update_weights(folder)
        assert float(quantizer.input_scale) == 2.0
        llm.engine.update_weights(new)
        assert float(quantizer.input_scale) == 0.5  # the larger of the scales of gate_proj and up_proj
        assert llm.generate([PROMPT], max_new_tokens=6)[0].token_ids == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "fp8", "activation_scheme": "magic"}, "activation_scheme 'magic' is not supported"),
        ({"quant_method": "fp8", "scale_fmt": "e5"}, "scale_fmt 'e5' is not supported; supported: ue8m0, float"),
        ({"quant_method": "compressed-tensors", "config_groups": 5}, "config_groups is 5"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"input_activations": {"num_bits": 4}}}},
            "4-bit int, strategy 'tensor', dynamic False is not supported",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": 5, "input_activations": {}}}},
            "targets of g are 5",
        ),
    ],
)
def test_quantization_rejects_invalid_input_schemes(tmp_path: Path, config: Any, message: str) -> None:
    path = make_llama(tmp_path / "model", num_hidden_layers=1)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=message):
        LLM(path)
