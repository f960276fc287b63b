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
the partial results of all of them (:class:`Parts`) in one launch. A CUDA graph summarises many tensors in one launch
(:func:`summarize_many`), in which each has programs in proportion to its size.

A program takes a group of blocks at a time, one for each of its warps, so that warps do not wait for one another within
a block. Of small tensors it takes one block with all warps. If one of its blocks has NaN, infinity or squares beyond
float32, it reads all of them again.
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
from tapscope.kernels.triton.launch_table import place_in, places_of
from tapscope.kernels.triton.statistics import (
    add_any_blocks,
    add_ordinary_blocks,
    add_small,
    empty_statistics,
    flags_of,
    no_ordinary_blocks,
    over_tile,
    with_ordinary,
)
from tapscope.kernels.triton.summary_row import PART_WIDTH, WIDTH, merge_parts, store_part, store_row

_NUM_WARPS = 4
_GROUP = 4  # blocks that a program takes at a time, of large tensors
_PROGRAMS_PER_SM = 4
_MERGED = 256  # partial results that the last program loads at a time
_PROGRAMS_OF_TABLE = 8  # for each multiprocessor, over all tensors of a table
_MERGED_OF_TABLE = 128  # as _MERGED, whatever the number of programs: another one is another kernel
COLUMNS, COUNT = 8, 3
"""Of the table of :func:`summarize_many`, and the one with the number of elements."""
_MOST_WORDS = (1 << 31) - 1  # of a tensor whose rows lie apart
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
    share = _share(flat)
    partial = result
    if share.programs > 1:
        partial = torch.empty(share.programs, PART_WIDTH, dtype=torch.int64, device=flat.device)
    args = flat.data_ptr(), flat.numel(), None, None, keys_on(flat.device), partial, result
    constants = _constants(flat.dtype, share.group, share.merged)
    _launch_summarize(flat.device, (share.programs, 1, 1), args, constants, num_warps=_NUM_WARPS)
    return result


def row_launch(tensor: Tensor, *, after_sketch: bool = False) -> DriverLaunch | None:
    """How the driver launches :func:`begin` for contiguous tensors like this one, at multiples of 16 bytes.

    ``after_sketch`` as there. Parameters are address, count, key of the hash, partial results, row, and two null
    pointers. None unless such a tensor was summarised.
    """
    if tensor.dtype not in FORMATS or not tensor.is_contiguous() or tensor.data_ptr() % 16 or is_interpreted():
        return None
    share, keys = _share(tensor), keys_on(tensor.device)
    args = tensor.data_ptr(), tensor.numel(), None, None, keys, keys, keys  # rows and partial results are like these
    constants = _begun_constants(tensor.dtype, share, after_sketch)
    direct = _launch_begin.direct(tensor.device, args, constants, num_warps=_NUM_WARPS)
    if direct is None or direct.places != (0, 1, 4, 5, 6):
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
    share = _share(flat)
    args = flat.data_ptr(), flat.numel(), None, None, keys_on(flat.device), parts.memory[parts.used :], row
    is_after_sketch = after_sketch and flat.data_ptr() == tensor.data_ptr()  # otherwise a copy has come between
    constants = _begun_constants(flat.dtype, share, is_after_sketch)
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


class Plan(NamedTuple):
    """How one launch summarises tensors of one type."""

    dtype: torch.dtype
    group: int
    """Blocks that a program takes at a time."""
    table: Tensor
    """[tensors, 8] int64 on the CPU: first program, number of programs, address (a multiple of 16), number of elements
    (of a complex tensor twice as many), the three numbers of :func:`row_gap`, address of the tensor's row."""
    places: Tensor
    """[programs] int64 on the CPU, see :mod:`.launch_table`."""


def plan_of(tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> Plan:
    """How to summarise ``tensors`` into ``rows``, each [16] int64, whose last words must be 0. Largest ones should come
    first: programs start in this order, and the last ones to start should be short.

    Raises UsageError for a type that is not in :data:`FORMATS`, for several, for several devices, and for a tensor
    that has no :func:`row_gap`.
    """
    flats = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    if len(types := {flat.dtype for flat in flats}) != 1 or not types <= FORMATS.keys():
        raise UsageError(f"expected tensors of one type that has statistics on the device, found {types or 'none'}")
    check_same_device(*flats, *rows)
    found = [gap for flat in flats if (gap := row_gap(flat)) is not None]
    if len(found) < len(flats):
        raise UsageError("a tensor in the table must be aligned to 16 bytes, in rows that are each contiguous")
    group, programs = _shares([_num_blocks(flat) for flat in flats], num_sms(flats[0].device))
    places, firsts = places_of(programs)
    words = [
        (first, count, flat.data_ptr(), flat.numel(), *gap, row.data_ptr())
        for first, count, flat, gap, row in zip(firsts, programs, flats, found, rows, strict=True)
    ]
    table, place = (torch.tensor(each, dtype=torch.int64, device="cpu") for each in (words, places))
    return Plan(types.pop(), group, table, place)


def summarize_many(plan: Plan, table: Tensor, places: Tensor) -> None:
    """Summarise tensors as planned, in one launch, which reads the plan's ``table`` and ``places`` on the device.

    A CUDA graph may capture it. The table may be filled later, and numbers of elements (:data:`COUNT`) may become less
    than planned; the tensors must be alive when it runs. Raises UsageError for tensors that are not like the plan's.
    """
    check_same_device(table, places)
    for given, like in ((table, plan.table), (places, plan.places)):
        if given.shape != like.shape or given.dtype != torch.int64 or not given.is_contiguous():
            raise UsageError(
                f"expected contiguous int64 {list(like.shape)} as planned, found {given.dtype} {list(given.shape)}"
            )
    partial = torch.empty(len(places), PART_WIDTH, dtype=torch.int64, device=table.device)
    args = 0, 0, table, places, keys_on(table.device), partial, None
    constants = _constants(plan.dtype, plan.group, _MERGED_OF_TABLE)
    _launch_summarize(table.device, (len(places), 1, 1), args, constants, num_warps=_NUM_WARPS)


def row_gap(tensor: Tensor) -> tuple[int, int, int] | None:
    """(gap, multiplier, shift) of a tensor whose rows are each contiguous and begin at multiples of 16 bytes.

    ``gap`` are the bytes between the end of a row and the start of the next. Word ``i`` of 64 bits is in row
    ``(i * multiplier >> 32) >> shift`` (Granlund and Montgomery, "Division by invariant integers using multiplication",
    PLDI 1994, theorem 4.2). A contiguous tensor is one row: (0, 0, 0). None for any other tensor.
    """
    if tensor.data_ptr() % 16 or tensor.is_conj():
        return None
    if tensor.is_contiguous():
        return 0, 0, 0
    if tensor.ndim < 2 or not tensor.numel():
        return None
    width, size = 1, tensor.element_size()
    for length, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):
        if length > 1 and stride != width:
            return None
        width *= length
    gap = (tensor.stride(0) - width) * size
    if width * size % 16 or gap % 16 or not 0 <= gap < 1 << 32 or tensor.numel() * size > 8 * _MOST_WORDS:
        return None
    words = width * size // 8
    shift = (words - 1).bit_length() - 1
    return gap, -(-(1 << 32 + shift) // words), shift


def launch_variants(device: torch.device, dtype: torch.dtype, *, after_sketch: bool = False) -> None:
    """Launch every kernel that :func:`begin`, :func:`merge` and :func:`summarize_many` may need for ``dtype``.

    Inside :func:`.compiled_ahead`, where that compiles them. ``after_sketch`` as of :func:`begin`.
    """
    size = torch.empty(0, dtype=dtype).element_size()
    begun, row = torch.zeros(2, 1, WIDTH, dtype=torch.int64, device=device)
    for blocks in (1, 2, _GROUP * num_sms(device)):  # one program, several, several that take groups
        tensor = torch.zeros(blocks * BLOCK_BYTES // size, dtype=dtype, device=device)
        begin(tensor, begun[0], Parts(device, blocks), after_sketch=after_sketch)
        merge(begun)
        plan = plan_of([tensor], [row[0]])
        summarize_many(plan, plan.table.to(device), plan.places.to(device))


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

    @property
    def merged(self) -> int:
        """Partial results that are added up at a time; 1 where there is but one."""
        return 1 if self.programs == 1 else min(max(32, next_power(self.programs)), _MERGED)


def _num_blocks(flat: Tensor) -> int:
    """Blocks of the hash, at least one."""
    return max(1, -(-flat.numel() * flat.element_size() // BLOCK_BYTES))


def _share(flat: Tensor) -> _Share:
    """Of a tensor that is alone: a program for each group of blocks, as long as all of them run together."""
    blocks, sms = _num_blocks(flat), num_sms(flat.device)
    group = _group_of([blocks], sms)
    return _Share(min(-(-blocks // group), _PROGRAMS_PER_SM * sms), group)


def _shares(blocks: Sequence[int], sms: int) -> tuple[int, list[int]]:
    """(blocks that a program takes at a time, programs of each tensor) of tensors of these sizes in one launch.

    All programs take about as many groups, but those that have all of a smaller tensor."""
    group = _group_of(blocks, sms)
    groups = [-(-each // group) for each in blocks]
    turns = -(-sum(groups) // (_PROGRAMS_OF_TABLE * sms))
    return group, [-(-each // turns) for each in groups]


def _group_of(blocks: Sequence[int], sms: int) -> int:
    """Blocks that a program takes at a time: one for each warp if that keeps all multiprocessors busy."""
    return _GROUP if max(blocks) >= _GROUP and sum(blocks) >= _GROUP * sms else 1


@functools.lru_cache(maxsize=256)
def _constants(
    dtype: torch.dtype, group: int, merged: int, is_begun: bool = False, is_after_sketch: bool = False
) -> dict[str, Any]:
    """Constants of the kernel; partial results are added up ``merged`` at a time."""
    form = FORMATS[dtype]
    return {
        "IS_FLOAT": form.kind == "float", "IS_SIGNED": form.kind == "signed", "BITS": form.bits,
        "MANTISSA": form.mantissa, "INFINITY": form.infinity, "NAN": form.nan,
        "GROUP": group, "LANES": 64 * _NUM_WARPS // group, "BLOCK": merged,
        "IS_BEGUN": is_begun, "IS_AFTER_SKETCH": is_after_sketch, "IS_OVERLAPPED": False,
    }  # fmt: skip


def _begun_constants(dtype: torch.dtype, share: _Share, is_after_sketch: bool) -> dict[str, Any]:
    """Constants of the kernel where :func:`merge` adds up partial results.

    Tensors of any number of programs above one then share a kernel.
    """
    return _constants(dtype, share.group, 1 if share.programs == 1 else _MERGED, True, is_after_sketch)


@triton.jit(do_not_specialize=["address", "count"])
def _summarize_kernel(
    address, count, table, places, keys, partial, row, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, IS_BEGUN: tl.constexpr, IS_AFTER_SKETCH: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Every n-th group of blocks of one tensor that n programs share. The tensor is in the table, or the only one.

    A sketch that has begun before has waited for the tensor: with IS_AFTER_SKETCH this kernel only ends after it.
    """
    if not IS_AFTER_SKETCH:
        wait_for_previous(IS_OVERLAPPED)
    program, stride = tl.program_id(0), tl.num_programs(0)  # partial results are one for each program
    rows = None
    if table is not None:
        entry, before, stride = place_in(table, places, _COLUMNS)
        program -= before
        partial += before.to(tl.int64) * _PART_WIDTH
        address, count = tl.load(entry + 2), tl.load(entry + 3)
        gap = tl.load(entry + 4).to(tl.uint32).to(tl.uint64)  # so that the compiler multiplies words of 32 bits
        rows = gap, tl.load(entry + 5).to(tl.uint32), tl.load(entry + 6).to(tl.uint32)
        row = tl.load(entry + 7).to(tl.pointer_type(tl.int64))
    count = count.to(tl.int64)
    data = tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(tl.uint64)), 16)
    num_words = (count * (BITS // 8) + 7) // 8
    blocks = ((num_words + WORDS - 1) // WORDS).to(tl.int32)
    groups = (blocks + GROUP - 1) // GROUP
    programs = tl.minimum(stride, tl.maximum(groups, 1))
    if program < programs:
        found = _blocks_of(
            data, count, num_words, rows, keys, blocks, groups, program, programs, IS_FLOAT, IS_SIGNED, BITS, MANTISSA,
            INFINITY, NAN, GROUP, LANES,
        )  # fmt: skip
        _store(row, partial, program, programs, stride, count, BITS // 8, found, BLOCK, IS_BEGUN)
    if IS_AFTER_SKETCH:
        wait_for_previous(IS_OVERLAPPED)


@triton.jit
def _blocks_of(
    data, count, num_words, rows, keys, blocks, groups, program, programs, IS_FLOAT: tl.constexpr,
    IS_SIGNED: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The statistics and the two sums of the hash of the blocks of one program.

    Groups are read from the last to the first: the end of a tensor that was just written is still in the cache.
    Each thread has two of the LANES of a block. Sums stay in registers until the end.
    """
    nbytes = count * (BITS // 8)
    place = tl.zeros([GROUP, 1], tl.int64) + tl.arange(0, LANES)[None, :]
    found = empty_statistics(GROUP, LANES)
    one = tl.zeros([GROUP], tl.uint64)
    two = one
    end = groups  # of those that are read as any elements
    if IS_FLOAT and (BITS == 32 or BITS == 16):
        begin = program  # the last group, which comes first, may have blocks that are not whole
        if program == 0 and (nbytes * 0 + groups) * (8 * WORDS * GROUP) > nbytes:
            begin += programs
        ordinary = no_ordinary_blocks(GROUP, LANES)
        for index in tl.range(begin, groups, programs):
            number, first = _blocks_at(groups - 1 - index, place, GROUP)
            ordinary, sum_one, sum_two = add_ordinary_blocks(
                ordinary, data, keys, first, place, rows, BITS, MANTISSA, LANES
            )
            block_one, block_two = block_hash(sum_one, sum_two, number, blocks)
            one += block_one
            two += block_two
            if GROUP > 1:  # else warps drift apart, and read less of what is still in the cache
                tl.debug_barrier()
        flags = flags_of(ordinary)
        if flags < 65536:
            found = with_ordinary(found, ordinary)
            end = begin
            if flags != 0:
                for index in tl.range(begin, groups, programs):
                    _, first = _blocks_at(groups - 1 - index, place, GROUP)
                    found = add_small(found, data, first, rows, BITS, MANTISSA, LANES)
        else:
            one *= 0
            two *= 0
    for index in tl.range(program, end, programs):
        number, first = _blocks_at(groups - 1 - index, place, GROUP)
        found, sum_one, sum_two = add_any_blocks(
            found, data, keys, first, place, count, num_words, nbytes, rows, IS_FLOAT, IS_SIGNED, BITS, MANTISSA,
            INFINITY, NAN, LANES,
        )  # fmt: skip
        block_one, block_two = block_hash(sum_one, sum_two, number, blocks)
        one += block_one
        two += block_two
    return over_tile(found, one, two)


@triton.jit
def _blocks_at(group, place, GROUP: tl.constexpr):
    """(numbers of the blocks of a group, places of their first words in the tensor)."""
    number = group.to(tl.int64) * GROUP + tl.arange(0, GROUP)
    return number, number[:, None] * WORDS + place


@triton.jit
def _store(
    row, partial, program, programs, stride, count, size: tl.constexpr, found, BLOCK: tl.constexpr,
    IS_BEGUN: tl.constexpr,
):  # fmt: skip
    """The row of a tensor that has one program (BLOCK is 1 where that is known before), or what one of several found.

    The last of several to arrive adds up what all have found. With IS_BEGUN :func:`_merge_kernel` does, and finds in
    the row what it needs: count, bytes of an element, address of the partial results, ``stride``.
    """
    if BLOCK == 1:
        store_row(row, count, size, found)
        if IS_BEGUN:
            tl.store(row + 15, count * 0)
    elif IS_BEGUN:
        store_part(partial + program, stride, found)
        if program == 0:
            tl.store(row, count)
            tl.store(row + 1, count * 0 + size)
            tl.store(row + 2, partial.to(tl.int64))
            tl.store(row + 15, count * 0 + stride)
    elif programs == 1:
        store_row(row, count, size, found)
    else:
        store_part(partial + program, stride, found)
        tl.debug_barrier()  # the partial result is complete before it counts as arrived
        arrived = tl.atomic_add(row + 15, 1, sem="acq_rel")
        if arrived == programs - 1:
            merge_parts(partial, stride, programs, row, count, size, BLOCK)
            tl.store(row + 15, count * 0)


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
