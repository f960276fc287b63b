"""Quantized weights of a checkpoint, dequantized for comparison with another checkpoint.

The scales of an FP8 or int8 weight are in a sibling tensor: ``NAME_scale_inv`` per block (DeepSeek-V3,
arXiv:2412.19437), or ``NAME_scale`` per tensor or output channel (compressed-tensors, modelopt). For 4-bit weights see
:mod:`~tapscope.tensor_files.int4`. Rounding to nearest has an error of at most half a quantization step times the
scale, which is the noise floor of a quantized weight.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.core import dtypes
from tapscope.run_format.index import RankIndex, SiteInfo
from tapscope.run_format.manifest import CHECKPOINT_FORMAT
from tapscope.run_format.payload import Array, Payloads
from tapscope.run_format.record import Record
from tapscope.run_format.records import Records
from tapscope.run_format.run import Run
from tapscope.tensor_files import int4
from tapscope.tensor_files.int4 import Int4Format

_CODES = ("float8_e4m3fn", "float8_e5m2", "int8")
_SCALES = ("_scale_inv", "_scale")
_METADATA = ("input_scale", "output_scale", "weight_zero_point", "k_scale", "v_scale", "q_scale", "kv_scale")
_DEFAULT_BLOCK = (128, 128)
_RMS_MARGIN = 1.5
"""Factor on the RMS error of rounding spread evenly over a step; allows for rounded scales and small tensors."""
_MAX_MARGIN = 1.05
_BF16 = 2.0**-9
"""Relative rounding error of the weight before quantization, in bf16."""
_ELEMENTS = 1 << 22
"""Number of elements dequantized at a time to measure the floor."""


class QuantizationFloor(Struct, frozen=True):
    """The error of a weight that rounding to its codes explains."""

    rel_l2: float
    """L2 norm of the error / L2 norm of the weight."""
    max_abs: float
    """Maximum absolute error of an element."""


class QuantizedWeight:
    """A weight [..., rows, columns] stored as codes and scales."""

    def __init__(self, payloads: Payloads, codes: Record, scales: Record, block: tuple[int, int]) -> None:
        self._payloads, self._codes, self._scales, self.block = payloads, codes, scales, block
        self.shape: tuple[int, ...] = codes.shape
        self._floor: QuantizationFloor | None = None

    def values(self) -> Array:
        """Return the dequantized weight in float32; raises RunCorruptError."""
        out = np.empty(self.shape, np.float32)
        for place, values, _ in self._parts():
            out.reshape(-1, out.shape[-1])[place] = values
        out.flags.writeable = False
        return out

    def floor(self) -> QuantizationFloor:
        """Return the noise floor, computed once; raises RunCorruptError."""
        if self._floor is None:
            squares = steps = largest = highest = 0.0
            for _, values, half in self._parts():
                squares += float(np.square(values, dtype=np.float64).sum())
                steps += float(np.square(half, dtype=np.float64).sum())
                largest = max(largest, float(half.max(initial=0.0)))
                highest = max(highest, float(np.abs(values).max(initial=0.0)))
            expected = (steps / 3 / squares) ** 0.5 if squares else 0.0  # uniform over ± half a step
            self._floor = QuantizationFloor(_RMS_MARGIN * expected + _BF16, _MAX_MARGIN * largest + _BF16 * highest)
        return self._floor

    def _parts(self) -> Iterator[tuple[slice, Array, Array]]:
        """Yield (rows, values, half a quantization step of each value) for a few whole blocks of rows at a time."""
        codes = self._payloads.array(self._codes)
        columns = codes.shape[-1]
        codes = codes.reshape(-1, columns)
        scales = np.asarray(self._payloads.array(self._scales), np.float32)
        num_rows, (block_rows, block_columns) = self._codes.shape[-2], self.block
        scales = scales.reshape(-1, -(-num_rows // block_rows), -(-columns // block_columns))
        values, halves = _table(self._codes.dtype or "")
        step = max(1, _ELEMENTS // max(columns, 1) // block_rows) * block_rows
        for matrix in range(len(codes) // num_rows if num_rows else 0):
            for start in range(0, num_rows, step):
                stop = min(start + step, num_rows)
                grid = scales[min(matrix, len(scales) - 1), start // block_rows : -(-stop // block_rows)]
                grid = np.repeat(np.repeat(grid, block_rows, 0)[: stop - start], block_columns, 1)[:, :columns]
                rows = slice(matrix * num_rows + start, matrix * num_rows + stop)
                index = codes[rows].view(np.uint8)
                yield rows, values[index] * grid, halves[index] * np.abs(grid)


class Int4Weight(QuantizedWeight):
    """A weight [outs, ins] stored as packed codes, with scales and zero points per group of input features."""

    def __init__(self, payloads: Payloads, packing: Int4Format, tensors: Mapping[str, Record]) -> None:
        """``tensors`` maps the last component of each tensor name of the module to its record."""
        codes, scales = tensors[packing.codes], tensors[packing.scales]
        super().__init__(payloads, codes, scales, (1, 1))
        self._packing, self._tensors = packing, tensors
        outs, num_groups = scales.shape[::-1] if packing.is_transposed else scales.shape
        stored = list(codes.shape)
        stored[packing.axis] *= int4.PER_WORD
        ins = stored[0] if packing.is_transposed else stored[1]
        if (shape := tensors.get("weight_shape")) is not None:
            ins = min(ins, int(payloads.array(shape).reshape(-1)[-1]))
        self.shape = (outs, ins)
        self._num_groups = num_groups

    def _parts(self) -> Iterator[tuple[slice, Array, Array]]:
        """See :meth:`QuantizedWeight._parts`."""
        packing, (outs, ins) = self._packing, self.shape
        scales = np.asarray(self._payloads.array(self._scales), np.float32)
        scales = scales.T if packing.is_transposed else scales
        groups = np.arange(ins) // -(-ins // self._num_groups)
        if (stored := self._tensors.get(packing.groups)) is not None:
            groups = np.clip(self._payloads.array(stored).reshape(-1), 0, self._num_groups - 1)
        zeros = np.full(scales.shape, int4.INT4_ZERO_POINT, np.uint8)
        if (stored := self._tensors.get(packing.zeros)) is not None:
            zeros = packing.unpack_zeros(self._payloads.array(stored), outs)
        codes = packing.unpack_codes(self._payloads.array(self._codes))[:outs, :ins]
        step = max(1, _ELEMENTS // max(ins, 1))
        for start in range(0, outs, step):
            rows = slice(start, min(start + step, outs))
            grid = scales[rows][:, groups]
            yield rows, (codes[rows] - zeros[rows][:, groups].astype(np.float32)) * grid, np.abs(grid) / 2


@lru_cache
def _table(dtype: str) -> tuple[Array, Array]:
    """Return (value, half the distance to its neighbors) of each of the 256 codes."""
    values = np.arange(256, dtype=np.uint8).view(dtypes.numpy_dtype(dtype)).astype(np.float32)
    if dtype == "int8":
        return values, np.full(256, 0.5, np.float32)
    bits = 3 if "e4m3" in dtype else 2
    finite = np.where(np.isfinite(values), values, 0)
    least = float(dtypes.smallest(dtype)) * 2**bits  # smallest normal number
    exponent = np.floor(np.log2(np.maximum(np.abs(finite), least)))
    return values, (2.0 ** (exponent - bits - 1)).astype(np.float32)


def dequantized(run: Run, other: Run) -> Run:
    """Return ``run`` with weights dequantized that ``other`` does not store in the same dtype; ``run`` itself if there
    are none."""
    if run.manifest.get("format") != CHECKPOINT_FORMAT:
        return run
    records = {record.key.site: record for record in run.records}
    theirs = {record.key.site: record.dtype for record in other.records}
    weights: dict[str, QuantizedWeight] = {}
    left_out = set[str]()
    for site, record in records.items():
        if theirs.get(site) == record.dtype:
            continue
        if record.dtype in _CODES and (weight := _weight_of(run, record, records)) is not None:
            weights[site] = weight
            left_out |= {_sibling(site, suffix) for suffix in _SCALES}
        elif (packed := _int4_weight_of(run, record, records)) is not None:
            weights[site], others = packed
            left_out |= others
    if not weights:
        return run
    left_out |= {site for site in records if site.rpartition(":param[")[2].removesuffix("]") in _METADATA}
    kept: list[Record] = []
    payloads = _Dequantizing(run.payloads)
    sites = dict(run.sites)
    floors: dict[str, Callable[[], QuantizationFloor]] = {}
    for record in run.records:
        if (quantized := weights.get(record.key.site)) is not None:
            is_int4 = isinstance(quantized, Int4Weight)
            site = f"{record.key.site.rpartition(':param[')[0]}:param[weight]" if is_int4 else record.key.site
            payloads.weights[record.seq] = quantized
            floors[site] = quantized.floor
            sites.setdefault(site, SiteInfo(site, "", {}))
            tags = {"quantized": "int4" if is_int4 else record.dtype}
            key = record.key._replace(site=site)
            record = record._replace(key=key, dtype="float32", shape=quantized.shape, tags=tags)
        if record.key.site not in left_out - theirs.keys():
            kept.append(record)
    index = RankIndex(records=Records(kept), sites=sites, problems=list(run.problems))
    index.add_step(0, len(kept))
    index.events = run.events()
    multiplied = Run(run.path, run.manifest, {0: index}, payloads, name=run.name)
    multiplied.quantized = floors
    return multiplied


def _int4_weight_of(
    run: Run, record: Record, records: Mapping[str, Record]
) -> tuple[Int4Weight, frozenset[str]] | None:
    """Return the 4-bit weight whose codes are in ``record`` and the sites of its other tensors; None for other
    records."""
    path, separator, last = record.key.site.rpartition(":param[")
    values = run.manifest.get("quantization") or {}
    packing = int4.format_of(str(values.get("quant_method")), values)
    if packing is None or not separator or last != f"{packing.codes}]" or record.dtype != "int32":
        return None
    others = (packing.scales, packing.zeros, *packing.others, "bias")
    sites = {other: f"{path}:param[{other}]" for other in others}
    tensors = {other: records[site] for other, site in sites.items() if site in records} | {packing.codes: record}
    if not all(name in tensors and len(tensors[name].shape) == 2 for name in (packing.codes, packing.scales)):
        return None
    if "bias" in tensors and run.payloads.array(tensors["bias"]).any():  # GPTQ adds a zero bias to layers without one
        del sites["bias"]
    weight = Int4Weight(run.payloads, packing, tensors)
    stored = packing.stored_shape((weight.shape[0], weight.shape[1]))
    return (weight, frozenset(sites.values())) if stored == record.shape else None


def _sibling(site: str, suffix: str) -> str:
    return f"{site.removesuffix(']')}{suffix}]"


def _weight_of(run: Run, record: Record, records: Mapping[str, Record]) -> QuantizedWeight | None:
    """Return the quantized weight whose codes are in ``record``; None if scales are missing or do not fit."""
    scales = next(
        (candidates for suffix in _SCALES if (candidates := records.get(_sibling(record.key.site, suffix)))), None
    )
    if scales is None or len(record.shape) < 2 or not dtypes.is_float(scales.dtype):
        return None
    *outer, rows, columns = record.shape
    inner = scales.shape[len(outer) :] if scales.shape[: len(outer)] == tuple(outer) else scales.shape
    block_rows, block_columns = run.manifest.get("weight_block_size") or _DEFAULT_BLOCK
    if inner in ((), (1,), (1, 1)):
        block = (rows, columns)
    elif inner in ((rows,), (rows, 1)):
        block = (1, columns)
    elif inner == (-(-rows // block_rows), -(-columns // block_columns)):
        block = (block_rows, block_columns)
    else:
        return None
    return QuantizedWeight(run.payloads, record, scales, block)


class _Dequantizing:
    """Payloads of a checkpoint in which some weights are dequantized."""

    def __init__(self, payloads: Payloads) -> None:
        self._payloads = payloads
        self.weights: dict[int, QuantizedWeight] = {}
        """seq of the record -> weight."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._payloads, name)

    def tail(self, record: Record) -> bytes | None:
        """See :class:`~tapscope.run_format.payload.Payloads`."""
        return None if record.seq in self.weights else self._payloads.tail(record)

    def array(self, record: Record) -> Array:
        """See :class:`~tapscope.run_format.payload.Payloads`."""
        weight = self.weights.get(record.seq)
        return self._payloads.array(record) if weight is None else weight.values()
