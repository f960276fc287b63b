"""Checkpoints in every quantized format that the engine reads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_llama
from safetensors.torch import load_file, save_file
from torch import Tensor

from tapscope.engine import LLM

PROMPT = [3, 4, 5, 6, 7, 200]


Quantizer = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""(name, weight) -> tensors of the checkpoint, and the weight they stand for in fp32."""


def _is_linear(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and "embed" not in name and "lm_head" not in name


def blocks(name: str, weight: Tensor, size: int = 24) -> tuple[dict[str, Tensor], Tensor]:
    """Block-wise e4m3, one block after the other; 24 divides neither the features nor a rank's share of them."""
    rows, columns = weight.shape
    stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    meant = torch.empty(rows, columns)
    scales = torch.empty(-(-rows // size), -(-columns // size))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size))
            scales[i, j] = weight[part].abs().max() / 448
            stored[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[part] = stored[part].float() * scales[i, j]
    return {name: stored, f"{name}_scale_inv": scales}, meant


def channels(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """int8, one scale an output channel: the weights of W8A8."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round().to(torch.int8)
    zero = torch.zeros(len(weight), 1, dtype=torch.int8)
    module = name.removesuffix(".weight")
    extra = {f"{module}.weight_zero_point": zero, f"{module}.input_scale": torch.ones(1)}
    return {name: stored, f"{name}_scale": scale} | extra, stored.float() * scale


def whole(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """e4m3, one scale a tensor, and the scales of an FP8 KV cache beside it."""
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    extra = {name.replace("weight", "k_scale"): torch.ones(1)} if "k_proj" in name else {}
    return {name: stored, f"{name}_scale": scale.reshape(())} | extra, stored.float() * scale


CASES: dict[str, tuple[Quantizer, dict[str, Any]]] = {
    "fp8": (blocks, {"quant_method": "fp8", "weight_block_size": [24, 24], "modules_to_not_convert": ["lm_head"]}),
    "int8": (channels, {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}),
    "modelopt": (whole, {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}),
}


def make(folder: Path, kind: str) -> tuple[Path, Path]:
    """The quantised checkpoint, and a plain one of what it means."""
    quantize, config = CASES[kind]
    meant = make_llama(folder / "meant", seed=5, num_hidden_layers=2, torch_dtype="float32")
    quantised = folder / "quantised"
    quantised.mkdir()
    weights = load_file(meant / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in list(weights.items()):
        parts, weights[name] = quantize(name, weight.float()) if _is_linear(name, weight) else ({name: weight}, weight)
        stored |= {key: value.contiguous() for key, value in parts.items()}
    save_file(weights, meant / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((meant / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return quantised, meant


def logits_of(path: Path, **options: Any) -> Tensor:
    seen: list[Tensor] = []
    with LLM(path, logits="all", dtype="float32", **options) as llm:
        llm.model.register_forward_hook(lambda _module, _args, out: seen.append(out.logits.clone()))
        llm.generate([PROMPT], max_new_tokens=1)
    return torch.cat(seen)
