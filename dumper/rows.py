"""Which token rows a forward of a Hugging Face style model computes, read off its own arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tapscope.observe import StepInfo
from tapscope.tokenrows import padded_step


def described(info: StepInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StepInfo:
    """``info`` with what ``model(input_ids, attention_mask=..., position_ids=..., past_key_values=...)`` tells.

    Request ids are the batch indices; the phase is kept where one was given. Without 2-D ``input_ids`` the rows are
    unknown and left empty.
    """
    ids = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.dtype.is_floating_point:
        return info
    batch, length = ids.shape
    past = _past_length(kwargs.get("past_key_values"))
    valid = _valid(kwargs.get("attention_mask"), batch, length)
    positions = _positions(kwargs, batch, length, past)
    phase = "decode" if past and length == 1 else "prefill" if past == 0 else "mixed"
    phase = phase if info.phase == "forward" else info.phase
    found = padded_step(info.step, phase, ids.tolist(), positions, valid, [str(i) for i in range(batch)])
    return replace(found, epoch=info.epoch)


def _past_length(cache: Any) -> int:
    get = getattr(cache, "get_seq_length", None)
    return int(get()) if callable(get) else 0


def _valid(mask: Any, batch: int, length: int) -> list[list[bool]]:
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= length:
        return [[bool(v) for v in row] for row in mask[:, -length:].tolist()]
    return [[True] * length for _ in range(batch)]


def _positions(kwargs: Mapping[str, Any], batch: int, length: int, past: int) -> list[list[int]]:
    given = kwargs.get("position_ids")
    if isinstance(given, torch.Tensor) and given.ndim == 2 and given.shape[1] == length:
        rows: list[list[int]] = given.tolist()
        return rows if len(rows) == batch else rows * batch
    cache_position = kwargs.get("cache_position")
    if isinstance(cache_position, torch.Tensor) and cache_position.numel() == length:
        return [cache_position.tolist()] * batch
    return [list(range(past, past + length))] * batch
