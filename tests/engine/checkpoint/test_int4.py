"""4-bit integer weights: packing, shards, fused layers, and rejected formats."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import reference_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import (
    CASES,
    INT4,
    PROMPT,
    compressed,
    gptq_reordered,
    int4_codes,
    logits_of,
    make,
    packed_config,
    set_config,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from tapscope.core.errors import CheckpointError
from tapscope.engine import LLM
from tapscope.tensor_files import int4

torch.set_num_threads(1)
UP = "model.layers.0.mlp.up_proj"


def _changed(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    return path


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 1 << 30))
def test_int4_packing_is_inverted_by_unpacking(rows: int, columns: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 16, (8 * rows, 8 * columns)).astype(np.uint8)
    for form in (int4.COMPRESSED, int4.GPTQ, int4.GPTQ_V2, int4.AWQ):
        words = form.pack_codes(codes)
        assert words.shape == form.stored_shape(codes.shape)
        assert np.array_equal(form.unpack_codes(words), codes)
        assert np.array_equal(form.unpack_zeros(form.pack_zeros(codes), len(codes)), codes)


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_packing_is_that_of_compressed_tensors(symmetric: bool) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    tensors, dequantized = compressed("weight", weight, symmetric=symmetric)
    scheme = QuantizationScheme(**packed_config(symmetric)["config_groups"]["group_0"])
    assert torch.equal(PackedQuantizationCompressor.decompress(tensors, scheme)["weight"], dequantized.bfloat16())
    codes, scales, zeros, _ = int4_codes(weight, symmetric=symmetric, dtype=torch.bfloat16)
    state = {"weight": dequantized, "weight_scale": scales.float(), "weight_zero_point": (zeros - 8).to(torch.int8)}
    packed = PackedQuantizationCompressor.compress(state, scheme)["weight_packed"]
    assert np.array_equal(int4.COMPRESSED.unpack_codes(packed.numpy()), codes.numpy())


@pytest.mark.parametrize("kind", INT4)
def test_int4_shards_begin_within_groups(tmp_path: Path, kind: str) -> None:
    """With 96 features in three groups of 32, each of two ranks holds one and a half groups."""
    quantized, dequantized = make(tmp_path, kind)
    torch.testing.assert_close(logits_of(quantized, tp=2), reference_logits(dequantized, PROMPT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "keep"), [("awq", "k_proj"), ("int4", "layers.1.mlp")])
def test_int4_fused_layer_with_an_excluded_part_is_dense(tmp_path: Path, kind: str, keep: str) -> None:
    quantized, dequantized = make(tmp_path, kind, keep=keep)
    excluded = {"awq": {"modules_to_not_convert": ["k_proj"]}, "int4": {"ignore": ["lm_head", "re:.*layers.1.mlp.*"]}}
    set_config(quantized, **excluded[kind])
    with LLM(quantized, dtype="float32") as llm:
        first, second = llm.model.model.layers
        qkv, gate_up = first.self_attn.qkv_proj.weight, second.mlp.gate_up_proj.weight
        assert (qkv.dtype == torch.float32, gate_up.dtype == torch.float32) == (kind == "awq", kind == "int4")
        assert first.mlp.gate_up_proj.weight.dtype == torch.uint8
    torch.testing.assert_close(logits_of(quantized), reference_logits(dequantized, PROMPT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tp", [1, 2])
def test_gptq_with_reordered_features_is_dequantized(
    tmp_path: Path, tp: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = CASES["gptq"][1] | {"desc_act": True, "checkpoint_format": "gptq_v2"}
    monkeypatch.setitem(CASES, "reordered", (gptq_reordered, config))
    quantized, dequantized = make(tmp_path, "reordered")
    found = logits_of(quantized, tp=tp)
    assert tp > 1 or "14 weights are dequantized, because their groups are not consecutive" in caplog.text
    torch.testing.assert_close(found, reference_logits(dequantized, PROMPT), rtol=1e-4, atol=1e-4)


def test_gptq_settings_of_an_old_checkpoint_are_in_their_own_file(tmp_path: Path) -> None:
    quantized, dequantized = make(tmp_path, "gptq")
    (quantized / "quantize_config.json").write_text('{"bits": 4, "group_size": 32, "desc_act": false}')
    shutil.copy(dequantized / "config.json", quantized)
    torch.testing.assert_close(logits_of(quantized), reference_logits(dequantized, PROMPT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("int4", lambda w: w.pop(f"{UP}.weight_scale"), rf"{UP}.weight in .* has no scales: {UP}.weight_scale"),
        ("gptq", lambda w: w.pop(f"{UP}.qzeros"), rf"has no {UP}.qzeros"),
        ("awq", lambda w: w.update({f"{UP}.qzeros": torch.zeros(3, 3).int()}), r"int32 of shape \[3, 3\]; it must be"),
        ("gptq", lambda w: w.update({f"{UP}.g_idx": torch.full((64,), 2).int()}), "a group from 0 to 1 for each of 64"),
        ("gptq", lambda w: w[f"{UP}.bias"].fill_(1), f"{UP}.bias is unexpected"),
        (
            "int4",
            lambda w: w.update({f"{UP}.weight_packed": torch.zeros(96, 9).int()}),
            r"\[96, 64\]: .*_packed",
        ),
        ("awq", lambda w: w.update({f"{UP}.qweight": w[f"{UP}.qweight"].long()}), "is packed in I64; supported: I32"),
        ("gptq", lambda w: w[f"{UP}.scales"].fill_(math.nan), f"{UP}.scales in .* NaN or infinite"),
        ("int4", lambda w: w.update({f"{UP}.weight_scale": torch.ones(96, 2).int()}), "has dtype int32; the scales"),
        ("int4", lambda w: w.update({f"{UP}.weight_scale": torch.ones(96, 3)}), r"\[96, 64\] in groups of 32"),
    ],
)
def test_int4_errors_name_the_tensor(tmp_path: Path, kind: str, change: Any, message: str) -> None:
    quantized, _ = make(tmp_path, kind)
    with pytest.raises(CheckpointError, match=message):
        LLM(_changed(quantized, change))


def test_int4_weights_are_updated_in_place(tmp_path: Path) -> None:
    quantized, dequantized = make(tmp_path, "int4")
    (tmp_path / "more").mkdir()
    with_zeros, _ = make(tmp_path / "more", "int4-asym")
    wide = shutil.copytree(quantized, tmp_path / "wide")
    _changed(wide, lambda w: w.update({name: t.float() for name, t in w.items() if name.endswith("_scale")}))
    with LLM(quantized, dtype="float32") as llm:
        before = llm.generate([PROMPT], max_new_tokens=4)[0].token_ids
        for other, message in (
            (dequantized, "model holds it in I4"),
            (with_zeros, "has zero points"),
            (wide, "in float32"),
        ):
            with pytest.raises(CheckpointError, match=message):
                llm.engine.update_weights(other)
        llm.engine.update_weights(quantized)
        assert llm.generate([PROMPT], max_new_tokens=4)[0].token_ids == before
