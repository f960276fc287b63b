"""Weight digests that are additive over shards: an engine's shard digests sum to the digest of a trainer's full tensor.

The digest of a tensor is the sum of ``mix(G * i + H * bits)`` modulo 2**64 over its elements. Here i is the index of an
element in C order, and bits are its bytes as an integer; mix is the finalizer of SplitMix64
(doi:10.1145/2660193.2660195). Ranks may hold arbitrary parts of the tensor. The digest detects accidentally changed or
moved elements, but does not resist deliberate collisions.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tapscope.core.errors import CheckpointError, UsageError
from tapscope.engine.checkpoint.stored_tensors import renamed
from tapscope.engine.checkpoint.weight_loader import stored_slices

_G, _H = 0x9E3779B97F4A7C15 - (1 << 64), 0xD1B54A32D192ED03 - (1 << 64)  # as int64
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20  # elements: a few int64 temporaries of 8 MiB


class ShardDigest(NamedTuple):
    """Digest of one rank's part of a tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    region: tuple[int, ...]
    """Index in a stack (-1: not stacked), axis, start and length, which identify the part across ranks."""
    num_elements: int
    digest: int


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of a whole tensor as 16 hexadecimal digits."""
    return f"{part_digest(tensor, tuple(tensor.shape)) % (1 << 64):016x}"


def part_digest(part: Tensor, shape: Sequence[int], start: Sequence[int] = ()) -> int:
    """Return the digest (modulo 2**64) of the part of a tensor of ``shape`` that begins at ``start`` (default: 0)."""
    if not part.numel():
        return 0
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    first = sum(s * stride for s, stride in zip(start, strides, strict=True)) if start else 0
    if part.ndim == 0:
        part, strides = part.reshape(1), [1]
    rest = torch.zeros(1, dtype=torch.int64, device=part.device)
    for size, stride in zip(part.shape[1:], strides[1:], strict=True):
        rest = (rest[:, None] + torch.arange(size, device=part.device) * stride).reshape(-1)
    total, rows = 0, max(1, _CHUNK // max(1, len(rest)))
    for begin in range(0, len(part), rows):
        piece = part[begin : begin + rows].contiguous()
        bits = piece.view(_BITS[piece.element_size()]).reshape(len(piece), -1).to(torch.int64)
        bits &= (1 << 8 * piece.element_size()) - 1 if piece.element_size() < 8 else -1
        numbers = torch.arange(begin, begin + len(piece), device=part.device) * strides[0] + first
        total += int(_mixed((numbers[:, None] + rest) * _G + bits * _H).sum())
    return total % (1 << 64)


def model_digests(model: nn.Module, names: Iterable[str] | None) -> list[ShardDigest]:
    """Return the digest of each tensor part in this rank's ``model``, under checkpoint names.

    ``names`` select a layout if there are several. A tensor shared by layers is listed under its first name, and under
    those of its names that are in ``names``. Raises UsageError for quantized weights.
    """
    given = {renamed(name, getattr(model, "checkpoint_prefixes", {})): name for name in names or ()}
    repeated = set(getattr(model, "shared_weights", {})) - set(given)
    digests = []
    for part in stored_slices(model, set(given) if given else None):
        if part.name in repeated:
            continue
        if part.scales is not None or part.into.dtype == torch.uint8:
            raise UsageError(f"{part.name} is quantized; weights have digests with quantized_layers='dequantize'")
        start = [0] * len(part.shape)
        stack = 0 if part.index is None else 1
        if part.index is not None:
            start[0] = part.index
        start[part.dim + stack] = part.start
        into = part.into[None] if stack else part.into
        region = (-1 if part.index is None else part.index, part.dim, part.start, part.into.shape[part.dim])
        dtype = str(part.into.dtype).removeprefix("torch.")
        digest = part_digest(into.detach(), part.shape, start)
        digests.append(
            ShardDigest(given.get(part.name, part.name), part.shape, dtype, region, part.into.numel(), digest)
        )
    return digests


def joined_digests(ranks: Sequence[Sequence[ShardDigest]]) -> dict[str, dict[str, object]]:
    """Combine the parts on all ranks to dtype, shape and digest of each whole tensor by name.

    Replicated parts count once. Raises CheckpointError if ranks differ in a replicated part, or if parts are missing.
    """
    parts: dict[str, dict[tuple[int, ...], tuple[int, ShardDigest]]] = {}
    for rank, shards in enumerate(ranks):
        for shard in shards:
            if not shard.num_elements:
                continue
            other_rank, other = parts.setdefault(shard.name, {}).setdefault(shard.region, (rank, shard))
            if other.digest != shard.digest:
                where = f"rows or columns {shard.region[2]} to {sum(shard.region[2:]) - 1} of {shard.name}"
                raise CheckpointError(f"ranks {other_rank} and {rank} hold different values in {where}")
    joined: dict[str, dict[str, object]] = {}
    for name, held in parts.items():
        shards = [shard for _, shard in held.values()]
        whole = math.prod(shards[0].shape)
        covered = sum(shard.num_elements for shard in shards)
        if covered != whole:
            raise CheckpointError(f"the ranks hold {covered} of the {whole} elements of {name}")
        digest = sum(shard.digest for shard in shards) % (1 << 64)
        joined[name] = {"dtype": shards[0].dtype, "shape": list(shards[0].shape), "digest": f"{digest:016x}"}
    return joined


def _mixed(values: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer to int64 values, with logical shifts."""
    for shift, factor in zip((30, 27), _MIX, strict=True):
        values = (values ^ _shifted(values, shift)) * factor
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, count: int) -> Tensor:
    return (values >> count) & ((1 << (64 - count)) - 1)
