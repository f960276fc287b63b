"""Gumbel noise as a function of (seed, position, token id), so that sampling is deterministic and stateless.

argmax(logits + noise) is a sample from softmax(logits) (Gumbel-max, arXiv:1611.01144). A token's noise is derived from
MurmurHash3_x86_32 (Appleby, public domain) of four little-endian words: the low and high halves of the seed, the
position and the token id. The noise is the same on every rank and device.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tapscope.engine.layers.vector_stable_ops import vector_stable

_C1, _C2, _N = 0xCC9E2D51, 0x1B873593, 0xE6546B64
_F1, _F2 = 0x85EBCA6B, 0xC2B2AE35
_LENGTH = 16  # bytes hashed
_MASK = 0xFFFFFFFF


def gumbel(seeds: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device) -> Tensor:
    """Return standard Gumbel noise [rows, vocab] float32 of every token for each row's seed and position.

    u = (hash + 1/2) / 2^32 is in (0, 1). The noise -log(-log(1 - u)) is computed with log1p, so that small u, which
    give the largest noise, keep their precision in float32.
    """
    uniform = hashes(seeds, positions, vocab, device).to(torch.float32).mul_(2.0**-32)  # [-1/2, 1/2): signed
    uniform.sub_(uniform.floor()).add_(2.0**-33).clamp_(max=1 - 2.0**-24)
    return vector_stable(lambda u: u.neg().log1p_().neg_().log_().neg_(), uniform)


def hashes(seeds: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device) -> Tensor:
    """Return the 32-bit hash of each token, as signed integers [rows, vocab] int32."""
    state = torch.from_numpy(_prefix(seeds, positions).view(np.int32)).to(device)
    hashed = state.unsqueeze(1) ^ _token_words(vocab, device)
    hashed = _rotate(hashed, 13).mul_(5).add_(_signed(_N)).bitwise_xor_(_LENGTH)
    hashed ^= _shifted(hashed, 16)
    hashed.mul_(_signed(_F1))
    hashed ^= _shifted(hashed, 13)
    hashed.mul_(_signed(_F2))
    hashed ^= _shifted(hashed, 16)
    return hashed


def _prefix(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint32]:
    """Return the hash state [rows] after the first three words."""
    wide = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    words = (wide & _MASK, wide >> 32, np.array(positions, dtype=np.uint64))
    state = np.zeros(len(wide), dtype=np.uint32)
    for word in words:
        state ^= _mix(word.astype(np.uint32))
        state = _rotated(state, 13) * np.uint32(5) + np.uint32(_N)
    return state


@functools.lru_cache(maxsize=8)
def _token_words(vocab: int, device: torch.device) -> Tensor:
    """Return the mixed last word of the hash, the token id, for every token: [vocab] int32."""
    return torch.from_numpy(_mix(np.arange(vocab, dtype=np.uint32)).view(np.int32)).to(device)


def _mix(word: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return _rotated(word * np.uint32(_C1), 15) * np.uint32(_C2)


def _rotated(word: NDArray[np.uint32], count: int) -> NDArray[np.uint32]:
    return (word << np.uint32(count)) | (word >> np.uint32(32 - count))


def _rotate(bits: Tensor, count: int) -> Tensor:
    return (bits << count).bitwise_or_(_shifted(bits, 32 - count))


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift right logically; the int32 operator shifts arithmetically."""
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
