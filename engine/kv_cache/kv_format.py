"""KVFormat: the type that keys and values are stored in, and what a stored one means.

A value x is stored as x / scale, brought into the range of the type first: no finite value becomes infinite or NaN
(what is NaN stays NaN). It is read as stored * scale, rounded once to the type that the model computes in.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""What a KV cache may be stored in, by the names that vLLM and SGLang use."""
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Stored in one type, computed with in another."""

    stored: torch.dtype
    computed: torch.dtype

    @property
    def is_plain(self) -> bool:
        """Whether what is stored is what is computed with."""
        return self.stored == self.computed

    @property
    def is_fp8(self) -> bool:
        """Whether values are scaled and stored in 8 bits."""
        return self.stored in _FP8

    def encode(self, values: Tensor, scale: float) -> Tensor:
        """``values`` as they are stored."""
        if self.is_plain:
            return values
        most = torch.finfo(self.stored).max
        scaled = values.float() / scale if self.is_fp8 else values
        return scaled.clamp(-most, most).to(self.stored)

    def decode(self, stored: Tensor, scale: float) -> Tensor:
        """What ``stored`` means; the product is taken in fp32."""
        if not self.is_fp8:
            return stored.to(self.computed)
        most = torch.finfo(self.computed).max  # of float16: a value near it may have been rounded up
        return (stored.float() * scale).clamp(-most, most).to(self.computed)

    def table(self, scale: float, device: torch.device) -> Tensor:
        """[256]: what each byte means, for a type of 8 bits."""
        every = torch.arange(256, dtype=torch.uint8, device=device)
        return self.decode(every.view(self.stored), scale)
