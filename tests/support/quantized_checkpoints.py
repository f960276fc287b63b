"""Checkpoints in every quantized format that the engine reads."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_llama
from moe_checkpoints import make_moe
from safetensors.torch import load_file, save_file
from torch import Tensor

from tapscope.engine import LLM
from tapscope.engine.checkpoint.mxfp4 import dequantize_mxfp4, quantize_mxfp4

PROMPT = [3, 4, 5, 6, 7, 200]


Quantizer = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""(name, weight) -> checkpoint tensors, and the fp32 weight that they represent."""


def _is_linear(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and not any(word in name for word in ("embed", "lm_head", "mlp.gate.", "mlp.router."))


def blocks(
    name: str, weight: Tensor, size: int = 24, scale_dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize block-wise to e4m3; block size 24 divides neither the features nor a rank's shard."""
    rows, columns = weight.shape
    stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    meant = torch.empty(rows, columns)
    scales = torch.empty(-(-rows // size), -(-columns // size))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size))
            scales[i, j] = weight[part].abs().max() / 448
            if scale_dtype == torch.float8_e8m0fnu:
                scales[i, j] = 2.0 ** torch.ceil(scales[i, j].log2())
            stored[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[part] = stored[part].float() * scales[i, j]
    return {name: stored, f"{name}_scale_inv": scales.to(scale_dtype)}, meant


def channels(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize to int8 with one scale per output channel: the weights of W8A8."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round().to(torch.int8)
    zero = torch.zeros(len(weight), 1, dtype=torch.int8)
    module = name.removesuffix(".weight")
    extra = {f"{module}.weight_zero_point": zero, f"{module}.input_scale": torch.ones(1)}
    return {name: stored, f"{name}_scale": scale} | extra, stored.float() * scale


def whole(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize to e4m3 with one scale per tensor, and add the scales of an FP8 KV cache."""
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    extra = {name.replace("weight", "k_scale"): torch.ones(1)} if "k_proj" in name else {}
    return {name: stored, f"{name}_scale": scale.reshape(())} | extra, stored.float() * scale


GROUP = 32
"""Features per group; a rank's features of down_proj begin inside a group."""


def int4_codes(weight: Tensor, *, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize [outs, ins] to codes from 0 to 15; return codes, scales and zeros [outs, groups], and the fp32
    values."""
    grouped = weight.unflatten(1, (-1, GROUP))
    if symmetric:
        scales = (grouped.abs().amax(-1) / 7.5).to(dtype).float()
        zeros = torch.full(scales.shape, 8.0)
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).to(dtype).float()
        zeros = (-low / scales).round().clamp(1, 15)
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    meant = (codes - zeros[..., None]) * scales[..., None]
    return codes.flatten(1).int(), scales.to(dtype), zeros.int(), meant.flatten(1)


def _words(codes: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """Pack [rows, n] codes to [rows, n / 8] words as the packages do; order[i] is the column in bits 4 i."""
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for column in range(words.shape[1]):
        for i, other in enumerate(order):
            words[:, column] |= codes[:, 8 * column + other].long() << 4 * i
    return torch.where(words < 2**31, words, words - 2**32).int()


def compressed(name: str, weight: Tensor, *, symmetric: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize for compressed-tensors: pack_to_int32 of its compressors/pack_quantized/helpers.py."""
    codes, scales, zeros, meant = int4_codes(weight, symmetric=symmetric, dtype=torch.bfloat16)
    tensors = {f"{name}_packed": _words(codes), f"{name}_scale": scales}
    zero = {} if symmetric else {f"{name}_zero_point": _words(zeros.T).T}
    return tensors | {f"{name}_shape": torch.tensor(weight.shape)} | zero, meant


def gptq(name: str, weight: Tensor, *, offset: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize as QuantLinear.pack of AutoGPTQ's nn_modules/qlinear/qlinear_cuda_old.py, including its zero-point
    offset."""
    codes, scales, zeros, meant = int4_codes(weight, symmetric=False, dtype=torch.float16)
    path = name.removesuffix(".weight")
    tensors = {
        f"{path}.qweight": _words(codes).T,
        f"{path}.qzeros": _words(zeros.T - offset),
        f"{path}.scales": scales.T,
        f"{path}.g_idx": torch.arange(weight.shape[1]).int() // GROUP,
        f"{path}.bias": torch.zeros(len(weight), dtype=torch.float16),
    }
    return tensors, meant


def gptq_reordered(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize as :func:`gptq` with ``desc_act`` and ``gptq_v2``: groups of non-adjacent features."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    tensors, meant = gptq(name, weight[:, order], offset=0)
    back, path = order.argsort(), name.removesuffix(".weight")
    codes = int4_codes(weight[:, order], symmetric=False, dtype=torch.float16)[0][:, back]
    return tensors | {f"{path}.qweight": _words(codes).T, f"{path}.g_idx": (back // GROUP).int()}, meant[:, back]


def awq(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize as WQLinear_GEMM.from_linear of AutoAWQ's modules/linear/gemm.py."""
    codes, scales, zeros, meant = int4_codes(weight, symmetric=False, dtype=torch.float16)
    path, order = name.removesuffix(".weight"), (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": _words(codes.T, order), "qzeros": _words(zeros.T, order), "scales": scales.T}
    return {f"{path}.{last}": tensor for last, tensor in tensors.items()}, meant


def packed_config(symmetric: bool) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    shared = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return {**shared, "config_groups": {"group_0": group}, "sparsity_config": {}, "transform_config": {}}


CASES: dict[str, tuple[Quantizer, dict[str, Any]]] = {
    "fp8": (blocks, {"quant_method": "fp8", "weight_block_size": [24, 24], "modules_to_not_convert": ["lm_head"]}),
    "ue8m0": (
        partial(blocks, scale_dtype=torch.float8_e8m0fnu),
        {"quant_method": "fp8", "weight_block_size": [24, 24], "scale_fmt": "ue8m0"},
    ),
    "int8": (channels, {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}),
    "modelopt": (whole, {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}),
    "int4": (compressed, packed_config(symmetric=True)),
    "int4-asym": (partial(compressed, symmetric=False), packed_config(symmetric=False)),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
}
INT4 = ("int4", "int4-asym", "gptq", "awq")


def make(folder: Path, kind: str, build: Callable[[Path], Path] | None = None, keep: str = "") -> tuple[Path, Path]:
    """Save a quantized checkpoint, and a plain one with the values that it represents.

    ``build`` writes a checkpoint in fp32, by default a Llama; modules whose names contain ``keep`` are not quantized.
    """
    quantize, config = CASES[kind]
    plain = partial(make_llama, seed=5, num_hidden_layers=2, torch_dtype="float32")
    meant, quantized = (build or plain)(folder / "meant"), folder / "quantized"
    quantized.mkdir()
    weights = load_file(meant / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in list(weights.items()):
        is_kept = not _is_linear(name, weight) or (keep and keep in name)
        parts, weights[name] = ({name: weight}, weight) if is_kept else quantize(name, weight.float())
        stored |= {key: value.contiguous() for key, value in parts.items()}
    save_file(weights, meant / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((meant / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return quantized, meant


def make_mxfp4(folder: Path) -> tuple[Path, Path]:
    """Save a checkpoint in MXFP4, and one with the same values in float32."""
    dense = make_moe(folder / "dense", "gpt_oss", seed=3)
    packed = make_moe(folder / "packed", "gpt_oss", seed=3)
    tensors, stored = load_file(dense / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = quantize_mxfp4(tensor.mT.contiguous())
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = dequantize_mxfp4(blocks, scales).mT.contiguous()
        else:
            stored[name] = tensor
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, dense


def set_config(path: Path, **changes: Any) -> Path:
    """Change fields of the quantization_config; None removes a field."""
    values = json.loads((path / "config.json").read_text())
    found = values["quantization_config"] | changes
    values["quantization_config"] = {key: value for key, value in found.items() if value is not None}
    (path / "config.json").write_text(json.dumps(values))
    return path


def logits_of(path: Path, **options: Any) -> Tensor:
    seen: list[Tensor] = []
    with LLM(path, logits="all", dtype="float32", **options) as llm:
        llm.model.register_forward_hook(lambda _module, _args, out: seen.append(out.logits.clone()))
        llm.generate([PROMPT], max_new_tokens=1)
    return torch.cat(seen)
