"""4-bit integer weights of checkpoints: packing of codes, scales and zero points in int32 words.

A weight [outs, ins] is ``(code - zero) * scale``, with codes from 0 to 15 and one scale and zero point per output and
group of input features. A word packs eight codes, code i in bits 4 i to 4 i + 3:

- compressed-tensors ``pack-quantized`` (its compressors/pack_quantized/helpers.py): ``weight_packed`` [outs, ins / 8],
  ``weight_scale`` [outs, groups], ``weight_zero_point`` [outs / 8, groups] unless zeros are 8;
- GPTQ (AutoGPTQ's nn_modules/qlinear/qlinear_cuda_old.py): ``qweight`` [ins / 8, outs], ``scales`` [groups, outs],
  ``qzeros`` [groups, outs / 8] with zeros minus 1, except in ``gptq_v2``; ``g_idx`` [ins], the group of each feature;
- AWQ (AutoAWQ's modules/linear/gemm.py): ``qweight`` [ins, outs / 8], ``scales`` and ``qzeros`` as in GPTQ but without
  the offset of 1; the codes of a word are outputs 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PER_WORD = 8
"""Number of codes per word."""
INT4_ZERO_POINT = 8
"""Zero point of symmetric weights."""
_IN_ORDER = tuple(range(PER_WORD))
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Words = NDArray[np.int32]
Codes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Int4Format:
    """Names and axes of the tensors of a quantized module, and the packing of words."""

    codes: str
    scales: str
    zeros: str
    others: tuple[str, ...]
    """Names of further tensors of the module; the first is the group index of each input feature."""
    is_transposed: bool
    """True if matrices are stored as [ins, outs] and [groups, outs]."""
    axis: int
    """Packed axis of the stored codes."""
    zero_axis: int
    order: tuple[int, ...] = _IN_ORDER
    """Logical index of each code in a word, from the lowest bits up."""
    zero_increment: int = 0
    """Offset to add to stored zero points."""

    @property
    def groups(self) -> str:
        """Name of the tensor with the group index of each input feature."""
        return self.others[0]

    def stored_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of the packed words for a weight of ``shape`` [outs, ins]."""
        sizes = list(reversed(shape)) if self.is_transposed else list(shape)
        sizes[self.axis] = -(-sizes[self.axis] // PER_WORD)
        return tuple(sizes)

    def unpack_codes(self, words: Words) -> Codes:
        """Unpack stored words to codes [outs, ins], including padding."""
        return self._of_outputs(unpack(words, self.axis, self.order))

    def unpack_zeros(self, words: Words, outs: int) -> Codes:
        """Unpack stored zero points to [outs, groups].

        The increment is added to whole words. A zero point of 0 is stored as -1 and borrows from its neighbor, which
        this restores, like GPTQModel (utils/model.py, convert_gptq_v1_to_v2_format_module).
        """
        increment = np.uint32(sum(self.zero_increment << 4 * i for i in range(PER_WORD)))
        wrapped = (words.astype(np.uint32) + increment).astype(np.int32)
        return self._of_outputs(unpack(wrapped, self.zero_axis, self.order))[:outs]

    def pack_codes(self, codes: Codes) -> Words:
        """Pack codes [outs, ins] into stored words."""
        return pack(codes.T if self.is_transposed else codes, self.axis, self.order)

    def pack_zeros(self, zeros: Codes) -> Words:
        """Pack zero points [outs, groups] into stored words."""
        words = pack(zeros.T if self.is_transposed else zeros, self.zero_axis, self.order)
        increment = np.uint32(sum(self.zero_increment << 4 * i for i in range(PER_WORD)))
        return (words.astype(np.uint32) - increment).astype(np.int32)

    def _of_outputs(self, codes: Codes) -> Codes:
        return codes.T if self.is_transposed else codes


COMPRESSED = Int4Format(
    *("weight_packed", "weight_scale", "weight_zero_point"), ("weight_g_idx", "weight_shape"), False, 1, 0
)
GPTQ_V2 = Int4Format("qweight", "scales", "qzeros", ("g_idx",), True, 0, 1)
GPTQ = Int4Format("qweight", "scales", "qzeros", ("g_idx",), True, 0, 1, zero_increment=1)
AWQ = Int4Format("qweight", "scales", "qzeros", ("g_idx",), True, 1, 1, order=_AWQ_ORDER)


def unpack(words: Words, axis: int, order: Sequence[int] = _IN_ORDER) -> Codes:
    """Unpack int32 words to codes from 0 to 15; the size along ``axis`` grows by a factor of eight."""
    moved = np.moveaxis(words, axis, -1)
    octets = np.ascontiguousarray(moved).view(np.uint8)  # little-endian: two codes per byte, low bits first
    codes = np.stack((octets & 15, octets >> 4), -1).reshape(*moved.shape, PER_WORD)
    codes = codes[..., np.argsort(order)].reshape(*moved.shape[:-1], PER_WORD * moved.shape[-1])
    return np.moveaxis(codes, -1, axis)


def pack(codes: Codes, axis: int, order: Sequence[int] = _IN_ORDER) -> Words:
    """Pack codes into int32 words along ``axis``, padded with zeros; the inverse of :func:`unpack`."""
    moved = np.moveaxis(codes, axis, -1)
    padding = [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % PER_WORD)]
    num_words = -(-moved.shape[-1] // PER_WORD)
    octets = np.pad(moved, padding).reshape(*moved.shape[:-1], num_words, PER_WORD)[..., list(order)]
    packed = np.ascontiguousarray(octets[..., 0::2] | octets[..., 1::2] << 4)
    return np.moveaxis(packed.view(np.int32)[..., 0], -1, axis)


def format_of(method: str, values: Mapping[str, Any]) -> Int4Format | None:
    """Return the 4-bit format for a quantization section of config.json, or None if ``method`` has no 4-bit format."""
    if method == "gptq":
        return GPTQ_V2 if values.get("checkpoint_format", values.get("format")) == "gptq_v2" else GPTQ
    return {"compressed-tensors": COMPRESSED, "awq": AWQ}.get(method)
