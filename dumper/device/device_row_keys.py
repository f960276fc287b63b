"""Keys of a step's token rows in device memory, for sketches computed on the device."""

import functools

import torch
from torch import Tensor

from tapscope.dumper.device.late_rows import LateRows
from tapscope.dumper.steps.input_rows import InputRows
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.run_format.sketch import request_hash, row_keys

PADDING = -1
"""Key of a padding row."""
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


class DeviceRowKeys:
    """Row keys of the open step, uploaded once per stream. No method waits for a device."""

    def __init__(self) -> None:
        self._step: object = None
        self._keys: dict[tuple[torch.device, int], Tensor] = {}
        self._zero: dict[tuple[torch.device, int], Tensor] = {}

    def of(self, step: OpenStep | None, device: torch.device) -> Tensor | None:
        """Return the row keys of ``step`` on ``device``: [slots] int64, :data:`PADDING` for padding rows.

        Without a step, returns [1] of zero. Returns None while the keys are unknown, because they depend on values
        that are still being copied. Keys of rows that :func:`are_preliminary` may later prove wrong.
        """
        place = device, stream_of(device)
        if step is None:
            if place not in self._zero:
                self._zero[place] = torch.zeros(1, dtype=torch.int64, device=device)
            return self._zero[place]
        late = step.late_rows
        if isinstance(late, LateRows) and late.rows_are_late:
            is_here = late.keys is not None and (late.keys.device, late.keys_stream) == place
            return late.keys if is_here else None
        if self._step is not step.info:
            self._step, self._keys = step.info, {}
        if place not in self._keys and (found := row_keys(step.info)) is not None:
            values = found.keys.astype("int64")
            values[~found.valid] = PADDING
            self._keys[place] = _upload(torch.from_numpy(values), device)
        return self._keys.get(place)


def are_preliminary(step: OpenStep) -> bool:
    """Return whether the host may still correct the rows of ``step``, see :attr:`OpenStep.has_other_rows`."""
    return step.late_rows is not None and not isinstance(step.late_rows, LateRows)


def keys_of_call(call: InputRows) -> Tensor:
    """Return the keys of the rows that the arguments of a call determine: [slots] int64, on their device.

    The result equals :func:`tapscope.run_format.sketch.row_keys` of the step that :func:`rows_from_values` builds from
    the same arguments.
    """
    (batch, length), tensors = call.shape, call.tensors
    device = tensors["ids"].device
    with torch.no_grad():
        positions = tensors.get("positions")
        if positions is None:
            past = tensors["past"].to(torch.int64).reshape(()) if call.past is None else call.past
            positions = torch.arange(length, device=device) + past
        z = _hashes(batch, device, stream_of(device))[:, None] + positions.to(torch.int64) * _STEP
        for shift, factor in zip((30, 27), _FACTORS, strict=True):
            z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
        keys = (z ^ ((z >> 31) & ((1 << 33) - 1))) & 0xFFFFFFFF
        if (valid := tensors.get("valid")) is not None:
            keys = torch.where(valid, keys, PADDING)
        return keys.reshape(-1)


@functools.lru_cache(maxsize=16)
def _hashes(batch: int, device: torch.device, stream: int) -> Tensor:
    """Return the hashes of the request ids ``0`` to ``batch - 1``: [batch] int64 on ``device``."""
    values = [request_hash(str(i)) for i in range(batch)]
    return _upload(torch.tensor([v - (1 << 64) if v >> 63 else v for v in values], dtype=torch.int64), device)


def keys_at(keys: Tensor, slots: Tensor) -> Tensor:
    """Return ``keys[slots]``: [rows] int64 on the device, for ``slots`` [rows] int64 on the host.

    Raises IndexError for a slot out of range, which on the device would trigger an assertion and end the process.
    """
    if (last := int(slots.max())) >= len(keys):
        raise IndexError(f"no row {last} in a step of {len(keys)} rows")
    with torch.inference_mode(False):
        return keys.index_select(0, _upload(slots, keys.device))


def _upload(values: Tensor, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.clone()


def stream_of(device: torch.device) -> int:
    """Return the handle of the current stream of a device; 0 for the CPU."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
