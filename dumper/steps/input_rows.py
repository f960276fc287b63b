"""The token rows that a forward of a Hugging Face style model computes, read from its arguments."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from tapscope.core.observe import RowSpan, StepInfo
from tapscope.core.token_rows import padded_step

Array = np.ndarray[Any, Any]
CACHE_ARGUMENTS = ("past_key_values", "cache")
"""Names of the key-value cache among a forward's arguments: transformers renamed it in 5.24."""
DECODER_ARGUMENTS = {
    "decoder_input_ids": "input_ids",
    "decoder_attention_mask": "attention_mask",
    "decoder_position_ids": "position_ids",
}
"""Argument of an encoder-decoder model for its decoder -> the same argument of a decoder-only model."""
LOGITS = "logits"
"""Row set of the rows whose logits are computed, where these are not all."""


class InputRows(NamedTuple):
    """The row information in ``model(input_ids, attention_mask=..., position_ids=..., past_key_values=...)``."""

    shape: tuple[int, int]
    """Batch and sequence."""
    tensors: dict[str, torch.Tensor]
    """``ids`` [batch, sequence]; where given ``valid`` (the same, bool), ``positions`` (the same, or one row of it),
    and ``past`` [] where a cache keeps its length in a tensor."""
    past: int | None
    """Positions in the cache; None when ``past`` is a tensor."""
    logits_to_keep: int = 0
    """Logits are computed for this many last columns; 0 for all."""


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """The key-value cache among a forward's arguments; None without one. Compiled code may call it."""
    for name in CACHE_ARGUMENTS:
        if kwargs.get(name) is not None:
            return kwargs[name]
    return None


def is_integer(dtype: torch.dtype) -> bool:
    """Whether values of ``dtype`` may be token ids. Compiled code may call it."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def row_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments that describe the rows, among them ``input_ids`` [batch, sequence]; None without such token ids.

    A call without ``input_ids`` computes the rows of ``decoder_input_ids``: ``generate()`` of an encoder-decoder model
    computes the encoder's output once, and Whisper's encoder has no tokens. Compiled code may call it.
    """
    ids = kwargs.get("input_ids", args[0] if args else None)
    if _is_token_ids(ids):
        return {**kwargs, "input_ids": ids}
    if not _is_token_ids(kwargs.get("decoder_input_ids")):
        return None
    named = dict(kwargs)
    for name, plain in DECODER_ARGUMENTS.items():
        named[plain] = kwargs.get(name)
    return named


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2 and is_integer(value.dtype)


def input_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> InputRows | None:
    """The row information; None if no token ids are among the arguments: the rows are then unknown."""
    named = row_arguments(args, kwargs)
    if named is None:
        return None
    kwargs, ids = named, named["input_ids"]
    batch, length = ids.shape
    tensors = {"ids": ids}
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= length:
        mask = mask[:, -length:]
        tensors["valid"] = mask if mask.dtype == torch.bool else mask != 0
    positions, cache_position = kwargs.get("position_ids"), kwargs.get("cache_position")
    if isinstance(positions, torch.Tensor) and positions.ndim == 2 and positions.shape[1] == length:
        tensors["positions"] = positions
    elif isinstance(cache_position, torch.Tensor) and cache_position.numel() == length:
        tensors["positions"] = cache_position.reshape(1, length)
    past = _past_length(cache_of(kwargs))
    keep = kwargs.get("logits_to_keep")
    kept = keep if isinstance(keep, int) and 0 < keep <= length else 0
    if isinstance(past, torch.Tensor):
        tensors["past"] = past
        return InputRows((batch, length), tensors, None, kept)
    return InputRows((batch, length), tensors, past, kept)


def is_any_on_device(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether reading their values would wait for an accelerator."""
    return any(tensor.is_cuda for tensor in tensors.values())


def rows_from_shapes(info: StepInfo, call: InputRows) -> StepInfo:
    """``info`` with what the shapes alone determine: every row as if none were padding, no token ids.

    Request ids are the batch indices; a given phase is kept.
    """
    batch, length = call.shape
    past = 0 if call.past is None else call.past
    phase = "decode" if length == 1 and (past or call.past is None) else "mixed" if past else "prefill"
    rows = [RowSpan(str(index), past, length, 0, index * length) for index in range(batch)] if length else []
    return StepInfo(
        step=info.step,
        phase=phase if info.phase == "forward" else info.phase,
        grid=call.shape,
        rows=tuple(rows),
        row_sets=_row_sets(info, call),
        kind=info.kind,
        epoch=info.epoch,
    )


def with_token_ids(outline: StepInfo, values: Mapping[str, Array]) -> StepInfo:
    """The outline with the token ids of its rows, taken from ``ids`` [slots]; without, if there are fewer slots."""
    ids = values["ids"]
    slots = [slot for row in outline.rows for slot in range(row.slot, row.slot + row.count)]
    if not slots or max(slots) >= len(ids):
        return outline
    return replace(outline, token_ids=tuple(ids[slots].tolist()))


def rows_from_values(outline: StepInfo, values: Mapping[str, Array], *, call: InputRows) -> StepInfo:
    """The result of :func:`rows_from_shapes`, completed by the values of the tensors."""
    return _step(outline, call, values)


def host_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """The values of tensors in host memory."""
    return {name: np.asarray(tensor.tolist()) for name, tensor in tensors.items()}


def _step(info: StepInfo, call: InputRows, values: Mapping[str, Array]) -> StepInfo:
    shape = call.shape
    past = int(values.get("past", 0)) if call.past is None else call.past
    positions = values.get("positions", np.arange(past, past + shape[1]))
    valid = values.get("valid", np.ones(shape, bool))
    names = [str(i) for i in range(shape[0])]
    step = padded_step(info.step, info.phase, values["ids"], np.broadcast_to(positions, shape), valid, names)
    return replace(step, epoch=info.epoch, kind=info.kind, row_sets=_row_sets(info, call))


def _row_sets(info: StepInfo, call: InputRows) -> dict[str, Sequence[int]]:
    """Those of the step, with the rows whose logits are computed."""
    row_sets, (batch, length) = dict(info.row_sets), call.shape
    if call.logits_to_keep:
        first = length - call.logits_to_keep
        row_sets[LOGITS] = tuple(i * length + j for i in range(batch) for j in range(first, length))
    return row_sets


def _past_length(cache: Any) -> Any:
    get = getattr(cache, "get_seq_length", None)
    length = get() if callable(get) else 0
    return length if isinstance(length, torch.Tensor) else int(length)
