"""KVFormat: dtype of stored keys and values, and their encoding and decoding.

A value x is stored as x / scale, clamped to the range of the stored dtype, so that no finite value becomes infinite or
NaN (NaN stays NaN). Reading returns stored * scale, rounded once to the compute dtype.
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
"""Storage dtypes of a KV cache, by their names in vLLM and SGLang."""
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Storage dtype and compute dtype of keys and values."""

    stored: torch.dtype
    computed: torch.dtype

    @property
    def is_plain(self) -> bool:
        """Whether both dtypes are equal."""
        return self.stored == self.computed

    @property
    def is_fp8(self) -> bool:
        """Whether values are scaled and stored as FP8."""
        return self.stored in _FP8

    def encode(self, values: Tensor, scale: float) -> Tensor:
        """Convert ``values`` to dtype :attr:`stored`, clamped to its range; for FP8, first divide by ``scale``."""
        if self.is_plain:
            return values
        most = torch.finfo(self.stored).max
        scaled = values.float() / scale if self.is_fp8 else values
        return scaled.clamp(-most, most).to(self.stored)

    def decode(self, stored: Tensor, scale: float) -> Tensor:
        """Convert ``stored`` to dtype :attr:`computed`; for FP8, first multiply by ``scale`` in float32."""
        if not self.is_fp8:
            return stored.to(self.computed)
        most = torch.finfo(self.computed).max  # float16: encoding may have rounded up a value near the maximum
        return (stored.float() * scale).clamp(-most, most).to(self.computed)

    def table(self, scale: float, device: torch.device) -> Tensor:
        """Return the lookup table [256] of decoded values of each byte, for FP8 dtypes."""
        every = torch.arange(256, dtype=torch.uint8, device=device)
        return self.decode(every.view(self.stored), scale)
