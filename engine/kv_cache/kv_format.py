"""KVFormat: the dtype that keys and values are stored in, and how stored values are decoded.

A value x is stored as x / scale, clamped to the range of the stored dtype: no finite value becomes infinite or NaN
(NaN stays NaN). It is read as stored * scale, rounded once to the compute dtype.
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
"""Storage dtypes of a KV cache, by the names that vLLM and SGLang use."""
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Storage dtype and compute dtype."""

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
        """``values`` of any shape in the dtype :attr:`stored`, clamped to its range; for FP8 divided by ``scale``."""
        if self.is_plain:
            return values
        most = torch.finfo(self.stored).max
        scaled = values.float() / scale if self.is_fp8 else values
        return scaled.clamp(-most, most).to(self.stored)

    def decode(self, stored: Tensor, scale: float) -> Tensor:
        """``stored`` of any shape in the dtype :attr:`computed`; FP8 times ``scale``, computed in fp32."""
        if not self.is_fp8:
            return stored.to(self.computed)
        most = torch.finfo(self.computed).max  # for float16: a value near the maximum may have been rounded up
        return (stored.float() * scale).clamp(-most, most).to(self.computed)

    def table(self, scale: float, device: torch.device) -> Tensor:
        """[256]: the decoded value of each byte, for FP8 dtypes."""
        every = torch.arange(256, dtype=torch.uint8, device=device)
        return self.decode(every.view(self.stored), scale)
