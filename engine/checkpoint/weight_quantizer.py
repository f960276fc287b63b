"""WeightQuantizer: round the weights of linear layers to nearest in FP8, int8 or int4."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tapscope.kernels.quantization import MOST, unpack_int4
from tapscope.tensor_files.int4 import INT4_ZERO_POINT

FORMATS = ("fp8-block", "fp8-channel", "int8", "int4")
BLOCK = 128
"""Number of rows and columns of a block in ``fp8-block``."""


@dataclass(frozen=True, slots=True)
class WeightQuantizer:
    """Quantizer of weights to one of :data:`FORMATS`."""

    to: str
    group: int
    """Number of input features that share a scale, for ``int4``."""

    def quantize(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Quantize [rows, columns]; return the tensors to store by name suffix, and the dequantized weight in fp32.

        A part of a weight must begin at a block of rows. Channel and group scales have the weight's dtype.
        """
        wide = weight.float()
        if self.to == "fp8-block":
            rows, columns = weight.shape
            blocks = functional.pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK))
            blocks = blocks.view(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK)
            scales = _nonzero(blocks.abs().amax((1, 3)) / MOST[torch.float8_e4m3fn])
            spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
            codes = _round(wide / spread, torch.float8_e4m3fn)
            return {"": codes, "_scale_inv": scales}, codes.float() * spread
        if self.to == "int4":
            groups = wide.view(len(wide), -1, self.group)
            scales = _nonzero((groups.abs().amax(-1) / (INT4_ZERO_POINT - 0.5)).to(weight.dtype))
            by = scales.float().unsqueeze(-1)
            codes = (groups / by).round().clamp(-INT4_ZERO_POINT, INT4_ZERO_POINT - 1) + INT4_ZERO_POINT
            codes = codes.flatten(1).to(torch.uint8)
            packed = codes[:, 0::2] | codes[:, 1::2] << 4
            dequantized = (unpack_int4(packed).float() - INT4_ZERO_POINT).view_as(groups) * by
            return {"_packed": packed.view(torch.int32), "_scale": scales}, dequantized.flatten(1)
        dtype = torch.int8 if self.to == "int8" else torch.float8_e4m3fn
        scales = _nonzero((wide.abs().amax(1, keepdim=True) / MOST[dtype]).to(weight.dtype))
        codes = _round(wide / scales.float(), dtype)
        return {"": codes, "_scale": scales}, codes.float() * scales.float()

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return ``quantization_config`` for config.json; ``ignored`` are paths of linear layers left unquantized."""
        if self.to == "fp8-block":
            block = {"activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
            return {"quant_method": "fp8", **block, "modules_to_not_convert": list(ignored)}
        kind, bits = ("float" if self.to == "fp8-channel" else "int"), (4 if self.to == "int4" else 8)
        shared = {"num_bits": bits, "type": kind, "symmetric": True}
        weights: dict[str, Any] = {**shared, "strategy": "channel", "dynamic": False}
        inputs: dict[str, Any] | None = {**shared, "strategy": "token", "dynamic": True}
        if self.to == "int4":
            weights, inputs = {**weights, "strategy": "group", "group_size": self.group}, None
        form = {"fp8-channel": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}[self.to]
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": list(ignored), "kv_cache_scheme": None,
        }  # fmt: skip


def _nonzero(scales: Tensor) -> Tensor:
    """Replace zero scales (of all-zero blocks) by 1, and clamp others to at least the smallest normal number."""
    return torch.where(scales == 0, 1, scales.clamp(min=torch.finfo(scales.dtype).tiny)).to(scales.dtype)


def _round(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    scaled = scaled.clamp(-MOST[dtype], MOST[dtype])
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
