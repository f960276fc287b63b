"""Statistics and digests of tensors in one pass over their bytes on the device: what a tap keeps of a value.

The result of a tensor is a row of 16 64-bit words, the first 15 in the order of kernels/native/summary.h:

    count, nan, +inf, -inf, zeros, subnormals, finite     int64
    min, max, max of magnitudes, sum, sum of squares      float64, over the finite elements
    hash (two words), bag                                 defined in kernels/native/digests.py
    arrivals                                              0 before and after every launch

Counts, extremes and digests are those of the host bit for bit; sums are taken in float32 over at most 16 words of 64
bits and in float64 across, and in float64 throughout where squares would leave float32's range. A complex number counts
as two elements. Digests add up over blocks of 8 KiB whatever their order, so that programs share a tensor: each takes
every n-th block, and the last one to finish adds up the partial results in a fixed order. The same tensor gives the
same bits in every call. Where many rows are read together, no tensor waits for its last program: :func:`merge` adds up
the partial results of all of them (:class:`Parts`) in one launch.

A program takes a group of blocks at a time, one for each of its warps, so that warps do not wait for one another within
a block. Of small tensors it takes one block with all warps. Blocks without NaN, infinity and squares beyond float32
take the short way; every other group is read again.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton import is_interpreted
from tapscope.kernels.triton.digest import BLOCK_BYTES, WORDS, block_hash, keys_on
from tapscope.kernels.triton.launch import (
    DriverLaunch,
    Launcher,
    check_same_device,
    next_power,
    num_sms,
    wait_for_previous,
)
from tapscope.kernels.triton.statistics import (
    add_any_blocks,
    add_ordinary_blocks,
    empty_statistics,
    over_tile,
)
from tapscope.kernels.triton.summary_row import PART_WIDTH, WIDTH, merge_parts, store_part, store_row

_NUM_WARPS = 4
_GROUP = 4  # blocks that a program takes at a time, of large tensors
_PROGRAMS_PER_SM = 4
_MERGED = 256  # partial results that the last program loads at a time
_PROGRAMS_OF_TABLE = 8  # for each multiprocessor, over all tensors of a table
COLUMNS = 5
"""Of the table of :func:`summarize_many`."""
ONE_ROW = (1 << 31) - 1
"""Words in a row of a contiguous tensor: all of them."""
_COLUMNS = tl.constexpr(COLUMNS)
_PART_WIDTH = tl.constexpr(PART_WIDTH)


class Format(NamedTuple):
    """What the bits of an element mean; magnitudes are bits without the sign."""

    kind: str
    """``float``, ``signed`` or ``unsigned``."""
    bits: int
    mantissa: int = 0
    infinity: int = -1
    """Magnitude of infinity, -1 where there is none."""
    nan: int = 0
    """The least magnitude that is NaN."""


FORMATS = {
    torch.float64: Format("float", 64, 52, 0x7FF << 52, (0x7FF << 52) + 1),
    torch.float32: Format("float", 32, 23, 0x7F800000, 0x7F800001),
    torch.float16: Format("float", 16, 10, 0x7C00, 0x7C01),
    torch.bfloat16: Format("float", 16, 7, 0x7F80, 0x7F81),
    torch.float8_e5m2: Format("float", 8, 2, 0x7C, 0x7D),
    torch.float8_e4m3fn: Format("float", 8, 3, -1, 0x7F),
    torch.int64: Format("signed", 64),
    torch.int32: Format("signed", 32),
    torch.int16: Format("signed", 16),
    torch.int8: Format("signed", 8),
    torch.uint8: Format("unsigned", 8),
    torch.bool: Format("unsigned", 8),
}
"""The types that are served; complex64 and complex128 as two of their parts."""


def summarize_reference(tensor: Tensor) -> Tensor:
    """The counts and sums of :func:`summarize` in plain torch, [12] float64: a row without its digests.

    The digests' reference is kernels/native/digests.py.
    """
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
    wide = flat.double()
    finite = wide[wide.isfinite()]
    form = FORMATS[flat.dtype]
    tiny = torch.finfo(flat.dtype).smallest_normal if form.kind == "float" else 0.0
    counts = [len(wide), wide.isnan().sum(), (wide == torch.inf).sum(), (wide == -torch.inf).sum()]
    counts += [(wide == 0).sum(), ((finite != 0) & (finite.abs() < tiny)).sum(), len(finite)]
    low, high = (finite.min() + 0.0, finite.max() + 0.0) if len(finite) else (torch.inf, -torch.inf)
    most = finite.abs().max() if len(finite) else 0.0
    return torch.tensor([*counts, low, high, most, finite.sum() + 0.0, finite.square().sum()], dtype=torch.float64)


def summarize(tensor: Tensor, row: Tensor | None = None) -> Tensor:
    """The row of ``tensor``: [16] int64 on its device, into ``row`` where it is given, whose last word must be 0.

    A tensor that is not contiguous, or does not begin at a multiple of 16 bytes, is copied first. Nothing is read on
    the host, so that a CUDA graph may capture it. Raises UsageError for a type that is not in :data:`FORMATS`.
    """
    flat = _flat(tensor)
    check_same_device(flat, row)
    result = torch.zeros(WIDTH, dtype=torch.int64, device=flat.device) if row is None else row
    if result.shape != (WIDTH,) or result.dtype != torch.int64 or not result.is_contiguous():
        raise UsageError(f"row is {result.dtype} {list(result.shape)}; expected contiguous int64 [{WIDTH}]")
    share = _share(flat.numel() * flat.element_size(), num_sms(flat.device))
    _run(flat.data_ptr(), flat.numel(), None, flat.dtype, share, result.view(1, WIDTH))
    return result


def row_launch(tensor: Tensor, *, after_sketch: bool = False) -> DriverLaunch | None:
    """How the driver launches :func:`begin` for contiguous tensors like this one, at multiples of 16 bytes.

    ``after_sketch`` as there. Parameters are address, count, key of the hash, partial results, row, and two null
    pointers. None unless such a tensor was summarised.
    """
    if tensor.dtype not in FORMATS or not tensor.is_contiguous() or tensor.data_ptr() % 16 or is_interpreted():
        return None
    share, keys = _share(tensor.nbytes, num_sms(tensor.device)), keys_on(tensor.device)
    args = tensor.data_ptr(), tensor.numel(), None, keys, keys, keys  # all rows and partial results are like these
    constants = _constants(tensor.dtype, share, False, True, after_sketch)
    direct = _launch_begin.direct(tensor.device, args, constants, num_warps=_NUM_WARPS)
    if direct is None or direct.places != (0, 1, 3, 4, 5):
        return None
    return DriverLaunch(direct.function, share.programs, direct.threads, direct.shared, direct.overlaps)


class Parts:
    """Room for the partial results of tensors of one stream, until :func:`merge`."""

    def __init__(self, device: torch.device, count: int | None = None) -> None:
        """Room for ``count`` partial results; if not given, for those of 80 large tensors (4 MB)."""
        self.most = _PROGRAMS_PER_SM * num_sms(device)
        """Partial results of a tensor at most."""
        self.count = 80 * self.most if count is None else count
        self.memory = torch.empty(self.count, PART_WIDTH, dtype=torch.int64, device=device)
        self.used = 0

    @property
    def has_room(self) -> bool:
        """Whether the partial results of a tensor of any size fit in."""
        return self.used + self.most <= self.count


def begin(tensor: Tensor, row: Tensor, parts: Parts, *, after_sketch: bool = False) -> None:
    """As :func:`summarize`, but ``row`` is complete after :func:`merge`; its last word may be anything before.

    ``after_sketch``: the kernel before it in its stream is :meth:`tapscope.kernels.triton.sketch.Sketches.add` of the
    same tensor; then both run at the same time.
    """
    flat = _flat(tensor)
    share = _share(flat.numel() * flat.element_size(), num_sms(flat.device))
    args = flat.data_ptr(), flat.numel(), None, keys_on(flat.device), parts.memory[parts.used :], row
    is_after_sketch = after_sketch and flat.data_ptr() == tensor.data_ptr()  # otherwise a copy has come between
    constants = _constants(flat.dtype, share, False, True, is_after_sketch)
    _launch_begin(flat.device, (share.programs, 1, 1), args, constants, num_warps=_NUM_WARPS)
    parts.used += share.programs if share.programs > 1 else 0


def merge(rows: Tensor) -> None:
    """Complete ``rows`` [rows, 16], which :func:`begin` has begun; those that are complete stay as they are."""
    if len(rows):
        _launch_merge(rows.device, (len(rows), 1, 1), (rows,), {"BLOCK": _MERGED}, num_warps=_NUM_WARPS)


def merge_launch(rows: Tensor) -> DriverLaunch | None:
    """How the driver launches :func:`merge`, a program for each row.

    Parameters are the address of the rows and two null pointers. None unless it has run on their device.
    """
    how = (
        None
        if is_interpreted()
        else _launch_merge.direct(rows.device, (rows,), {"BLOCK": _MERGED}, num_warps=_NUM_WARPS)
    )
    if how is None or how.places != (0,):
        return None
    return DriverLaunch(how.function, len(rows), how.threads, how.shared, how.overlaps)


def summarize_many(table: Tensor, dtype: torch.dtype, max_bytes: int, *, strided: bool = True) -> None:
    """Summarise tensors of one type at addresses that are read on the device, in one launch.

    ``table`` [tensors, 5] int64 on the device, see :func:`table_entry`. ``max_bytes`` is the size of the largest
    tensor, or an upper bound of it. ``strided`` is False where every tensor is contiguous. The table may be filled
    after a CUDA graph has captured the call, and the tensors must be alive when it runs. The last word of every row
    must be 0. Raises UsageError for invalid arguments.
    """
    check_same_device(table)
    if dtype not in FORMATS:
        raise UsageError(f"no statistics of {dtype} on the device")
    if table.shape[1:] != (COLUMNS,) or table.dtype != torch.int64 or not table.is_contiguous():
        raise UsageError(f"table is {table.dtype} {list(table.shape)}; expected contiguous int64 [tensors, {COLUMNS}]")
    if len(table):
        share = _share(max_bytes, num_sms(table.device), len(table))
        _run(0, 0, table, dtype, share, None, is_strided=strided)


def table_entry(tensor: Tensor, row: Tensor) -> tuple[int, int, int, int, int]:
    """The row of ``tensor`` in the table of :func:`summarize_many`; ``row`` [16] int64 receives its summary.

    Address (a multiple of 16), number of elements (of a complex tensor twice as many), 64-bit words between the
    starts of two rows, words in a row, address of ``row``. Raises UsageError for a tensor that has no :func:`row_step`.
    """
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    found = row_step(flat)
    if found is None:
        raise UsageError("a tensor in the table must be aligned to 16 bytes, in rows that are each contiguous")
    return flat.data_ptr(), flat.numel(), *found, row.data_ptr()


def table_of(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    """The table of :func:`summarize_many` for ``tensors`` and ``rows`` [tensors, 16], on the CPU. Raises as above."""
    entries = [table_entry(tensor, row) for tensor, row in zip(tensors, rows, strict=True)]
    return torch.tensor(entries, dtype=torch.int64).view(-1, COLUMNS)


def row_step(tensor: Tensor) -> tuple[int, int] | None:
    """(words between the starts of two rows, words in a row) of a tensor whose rows are each contiguous.

    Words have 64 bits; rows begin at multiples of 16 bytes. A contiguous tensor is one row: (0, :data:`ONE_ROW`). None
    for any other tensor.
    """
    if tensor.data_ptr() % 16 or tensor.is_conj():
        return None
    if tensor.is_contiguous():
        return 0, ONE_ROW
    if tensor.ndim < 2 or not tensor.numel():
        return None
    width, size = 1, tensor.element_size()
    for length, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):
        if length > 1 and stride != width:
            return None
        width *= length
    step = tensor.stride(0)
    if step < width or width * size % 16 or step * size % 16 or tensor.numel() * size >= 8 * ONE_ROW:
        return None
    return step * size // 8, width * size // 8


def prepare(device: torch.device) -> None:
    """Make what the kernels need on ``device``, which a CUDA graph cannot capture: before a capture."""
    keys_on(device)
    num_sms(device)


def _flat(tensor: Tensor) -> Tensor:
    """``tensor`` as its real elements, in order and aligned."""
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if flat.dtype not in FORMATS:
        raise UsageError(f"no statistics of {tensor.dtype} on the device")
    flat = flat.contiguous()
    return flat.clone() if flat.data_ptr() % 16 else flat


class _Share(NamedTuple):
    """How programs share a tensor."""

    programs: int
    group: int
    """Blocks that each takes at a time."""


def _share(nbytes: int, sms: int, tensors: int = 1) -> _Share:
    """A program for each group of blocks, as long as all of them run together."""
    blocks = max(1, -(-nbytes // BLOCK_BYTES))
    group = _GROUP if blocks >= _GROUP and blocks * tensors >= _GROUP * sms else 1
    together = _PROGRAMS_PER_SM * sms if tensors == 1 else max(2, _PROGRAMS_OF_TABLE * sms // tensors)
    return _Share(min(-(-blocks // group), together, _PROGRAMS_PER_SM * sms), group)


def _run(
    address: int, count: int, table: Tensor | None, dtype: torch.dtype, share: _Share, rows: Tensor | None, *,
    is_strided: bool = False,
) -> None:  # fmt: skip
    """Launch the kernel for every row."""
    given = rows if table is None else table
    assert given is not None
    partial = given
    if share.programs > 1:
        partial = torch.empty(len(given), PART_WIDTH, share.programs, dtype=torch.int64, device=given.device)
    args = address, count, table, keys_on(given.device), partial, rows
    constants = _constants(dtype, share, is_strided, False, False)
    _launch_summarize(given.device, (share.programs, len(given), 1), args, constants, num_warps=_NUM_WARPS)


@functools.lru_cache(maxsize=256)
def _constants(
    dtype: torch.dtype, share: _Share, is_strided: bool, is_begun: bool, is_after_sketch: bool
) -> dict[str, Any]:
    """Constants of the kernel."""
    form = FORMATS[dtype]
    return {
        "IS_FLOAT": form.kind == "float", "IS_SIGNED": form.kind == "signed", "BITS": form.bits,
        "MANTISSA": form.mantissa, "INFINITY": form.infinity, "NAN": form.nan,
        "GROUP": share.group, "LANES": 64 * _NUM_WARPS // share.group,
        "BLOCK": 1 if share.programs == 1 else min(max(32, next_power(share.programs)), _MERGED),
        "IS_STRIDED": is_strided, "IS_BEGUN": is_begun, "IS_AFTER_SKETCH": is_after_sketch,
        "IS_OVERLAPPED": False,
    }  # fmt: skip


@triton.jit(do_not_specialize=["address", "count"])
def _summarize_kernel(
    address, count, table, keys, partial, rows, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr, IS_STRIDED: tl.constexpr, IS_BEGUN: tl.constexpr, IS_AFTER_SKETCH: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Every n-th group of blocks of one tensor that n programs share; the last of them writes its row. BLOCK is 1 if n
    is. With IS_BEGUN :func:`_merge_kernel` writes the row if n is not 1, and finds in it what it needs: count, bytes of
    an element, address of the partial results, n.

    Groups are read from the last to the first: the end of a tensor that was just written is still in the cache.
    Each thread has two of the LANES of a block. Sums stay in registers until the end. A sketch that has begun before
    has waited for the tensor: with IS_AFTER_SKETCH this kernel only ends after it.
    """
    if not IS_AFTER_SKETCH:
        wait_for_previous(IS_OVERLAPPED)
    # The tensor: that of the arguments, or of its row in the table
    program, tensor = tl.program_id(0), tl.program_id(1).to(tl.int64)
    step, width, row = 0, 1, rows
    if table is not None:
        entry = table + _COLUMNS * tensor
        address, count = tl.load(entry), tl.load(entry + 1)
        step, width = tl.load(entry + 2), tl.load(entry + 3)
        row = tl.load(entry + 4).to(tl.pointer_type(tl.int64))
    count = count.to(tl.int64)
    nbytes = count * (BITS // 8)
    data = tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(tl.uint64)), 16)
    num_words = (nbytes + 7) // 8
    blocks = ((num_words + WORDS - 1) // WORDS).to(tl.int32)
    programs = tl.minimum(tl.num_programs(0), tl.maximum((blocks + GROUP - 1) // GROUP, 1))
    if program < programs:
        # The blocks of this program: hash, statistics and bag
        place = tl.zeros([GROUP, 1], tl.int64) + tl.arange(0, LANES)[None, :]
        found = empty_statistics(GROUP, LANES)
        one = tl.zeros([GROUP], tl.uint64)
        two = one
        groups = (blocks + GROUP - 1) // GROUP
        for index in tl.range(program, groups, programs):
            start = (groups - 1 - index) * GROUP
            number = nbytes * 0 + start + tl.arange(0, GROUP)
            first = number[:, None] * WORDS + place
            sum_one = tl.zeros([GROUP], tl.uint64)
            sum_two = sum_one
            is_added = False
            if IS_FLOAT and (BITS == 32 or BITS == 16):
                if (nbytes * 0 + start + GROUP) * (8 * WORDS) <= nbytes:
                    found, is_added, sum_one, sum_two = add_ordinary_blocks(
                        found, data, keys, first, place, step, width, BITS, MANTISSA, LANES, IS_STRIDED
                    )  # fmt: skip
            if not is_added:
                found, sum_one, sum_two = add_any_blocks(
                    found, data, keys, first, place, count, num_words, nbytes, step, width, IS_FLOAT, IS_SIGNED, BITS,
                    MANTISSA, INFINITY, NAN, LANES, IS_STRIDED,
                )  # fmt: skip
            block_one, block_two = block_hash(sum_one, sum_two, number, blocks)
            one += block_one
            two += block_two

        # The row: immediately, or by the last program to arrive, from the partial results of all
        statistics = over_tile(found)
        hash_one, hash_two = tl.sum(one, 0), tl.sum(two, 0)
        if BLOCK == 1:
            store_row(row, count, BITS // 8, statistics, hash_one, hash_two)
            if IS_BEGUN:
                tl.store(row + 15, nbytes * 0)
        elif IS_BEGUN:
            stride = tl.num_programs(0)
            store_part(partial + program, stride, statistics, hash_one, hash_two)
            if program == 0:
                tl.store(row, count)
                tl.store(row + 1, nbytes * 0 + BITS // 8)
                tl.store(row + 2, partial.to(tl.int64))
                tl.store(row + 15, nbytes * 0 + stride)
        else:
            stride = tl.num_programs(0)
            parts = partial + tensor * stride * _PART_WIDTH
            store_part(parts + program, stride, statistics, hash_one, hash_two)
            tl.debug_barrier()  # the partial result is complete before it counts as arrived
            arrived = tl.atomic_add(row + 15, 1, sem="acq_rel")
            if arrived == programs - 1:
                merge_parts(parts, stride, programs, row, count, BITS // 8, BLOCK)
                tl.store(row + 15, nbytes * 0)
    if IS_AFTER_SKETCH:
        wait_for_previous(IS_OVERLAPPED)


@triton.jit
def _merge_kernel(rows, BLOCK: tl.constexpr):
    """One row, from the partial results of the programs that :func:`begin` has launched for it."""
    row = rows + 16 * tl.program_id(0).to(tl.int64)
    programs = tl.load(row + 15)
    if programs > 0:
        count, size = tl.load(row), tl.load(row + 1)
        parts = tl.load(row + 2).to(tl.pointer_type(tl.int64))
        merge_parts(parts, programs, programs, row, count, size, BLOCK)
        tl.store(row + 15, programs * 0)


_launch_summarize, _launch_begin = Launcher(_summarize_kernel), Launcher(_summarize_kernel, overlaps=True)
_launch_merge = Launcher(_merge_kernel)
