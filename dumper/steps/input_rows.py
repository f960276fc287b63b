"""Input rows: the token rows of a call of a Hugging Face style model, derived from the call's arguments."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from tapscope.core.observe import RowSpan, StepInfo
from tapscope.core.token_rows import padded_step

Array = np.ndarray[Any, Any]
CACHE_ARGUMENTS = ("past_key_values", "cache")
"""Names of forward's KV cache argument; transformers renamed it in 5.24."""
DECODER_ARGUMENTS = {
    "decoder_input_ids": "input_ids",
    "decoder_attention_mask": "attention_mask",
    "decoder_position_ids": "position_ids",
}
"""Decoder argument of an encoder-decoder model -> name of the same argument in a decoder-only model."""
LOGITS = "logits"
"""Name of the row set for the rows whose logits are computed, if these are not all rows."""


class InputRows(NamedTuple):
    """Row information of ``model(input_ids, attention_mask=..., position_ids=..., past_key_values=...)``."""

    shape: tuple[int, int]
    """(batch, sequence)."""
    tensors: dict[str, torch.Tensor]
    """``ids`` [batch, sequence]; if known, ``valid`` [batch, sequence] bool, ``positions`` [batch or 1, sequence], and
    ``past`` [] if the KV cache keeps its length in a tensor."""
    past: int | None
    """Number of cached positions; None if ``past`` is a tensor."""
    logits_to_keep: int = 0
    """Logits are computed only for this many last positions; 0 for all."""


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """Return the KV cache among forward's arguments; None if there is none. Traceable by torch.compile."""
    for name in CACHE_ARGUMENTS:
        if kwargs.get(name) is not None:
            return kwargs[name]
    return None


def is_integer(dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` is an integer dtype, as of token ids. Traceable by torch.compile."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def row_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments by name, with ``input_ids`` [batch, sequence]; None if the call has no token ids.

    In a call without ``input_ids``, the ``decoder_*`` arguments take the names of their decoder-only counterparts:
    ``generate()`` of an encoder-decoder model computes the encoder's output only once, and Whisper's encoder has no
    tokens. Traceable by torch.compile.
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
    """Return the row information of a call; None if the arguments contain no token ids, so the rows are unknown."""
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
    """Return whether any tensor is on a CUDA device, so that reading its values would synchronize."""
    return any(tensor.is_cuda for tensor in tensors.values())


def rows_from_shapes(info: StepInfo, call: InputRows) -> StepInfo:
    """Return ``info`` with the rows that the shapes alone determine, ignoring padding, and without token ids.

    Request ids are the batch indices. The phase is inferred unless ``info`` has one other than ``forward``.
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
    """Return ``outline`` with the token ids of its rows, from ``values["ids"]`` [slots]; unchanged if too short."""
    ids = values["ids"]
    slots = [slot for row in outline.rows for slot in range(row.slot, row.slot + row.count)]
    if not slots or max(slots) >= len(ids):
        return outline
    return replace(outline, token_ids=tuple(ids[slots].tolist()))


def rows_from_values(outline: StepInfo, values: Mapping[str, Array], *, call: InputRows) -> StepInfo:
    """Complete ``outline``, the result of :func:`rows_from_shapes`, with the values of the tensors in ``call``."""
    return _step(outline, call, values)


def host_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """Return the values of the tensors as arrays in host memory; synchronizes with the device of a CUDA tensor."""
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
    """Return the row sets of the step, plus :data:`LOGITS` if logits are computed for some positions only."""
    row_sets, (batch, length) = dict(info.row_sets), call.shape
    if call.logits_to_keep:
        first = length - call.logits_to_keep
        row_sets[LOGITS] = tuple(i * length + j for i in range(batch) for j in range(first, length))
    return row_sets


def _past_length(cache: Any) -> Any:
    get = getattr(cache, "get_seq_length", None)
    length = get() if callable(get) else 0
    return length if isinstance(length, torch.Tensor) else int(length)
