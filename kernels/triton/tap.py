"""Statistics and digests of tensors, computed on the device in one pass over their bytes: the summary a tap records.

The result for a tensor is a summary row of 16 64-bit words, the first 15 in the order of kernels/native/summary.h:

    count, nan, +inf, -inf, zeros, subnormals, finite     int64
    min, max, max of magnitudes, sum, sum of squares      float64, over the finite elements
    hash (two words), bag                                 defined in kernels/native/digests.py
    arrivals                                              0 before and after every launch

Counts, extremes and digests equal those of the CPU implementation bit for bit. Sums accumulate in float32 over at most
16 words of 64 bits and in float64 beyond, or in float64 throughout if squares would overflow or underflow float32. A
complex number counts as two elements.

Digests are sums over blocks of 8 KiB in any order, so several programs share a tensor. Program i of n processes every
n-th block, and the last program to finish reduces the partial results in a fixed order: results are deterministic. If
many rows are read together, :func:`merge` instead reduces the partial results of all tensors (:class:`Parts`) in one
launch. In a CUDA graph, :func:`summarize_many` summarizes many tensors in one launch, with programs for each tensor in
proportion to its size.

A program processes a group of blocks per iteration, one block per warp, so warps need no synchronization within a
block. For small tensors, all warps process one block. A program that encounters NaN, infinity or squares outside of
float32's range rereads all of its blocks.
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
_GROUP = 4  # blocks per iteration of a program, for large tensors
_PROGRAMS_PER_SM = 4
_MERGE_BLOCK = 256  # partial results that the merging program loads per iteration
_PROGRAMS_OF_TABLE = 8  # programs per SM, over all tensors of a table
_TABLE_MERGE_BLOCK = 128  # same for table launches: a constant, since each value is another specialization
COLUMNS, COUNT = 8, 3
"""Number of columns in the table of :func:`summarize_many`, and index of the column with the number of elements."""
_MAX_WORDS = (1 << 31) - 1  # 64-bit words in a tensor with gaps between its rows
_COLUMNS = tl.constexpr(COLUMNS)
_PART_WIDTH = tl.constexpr(PART_WIDTH)


class Format(NamedTuple):
    """Bit layout of an element type; a magnitude is the bit pattern without the sign bit."""

    kind: str
    """``float``, ``signed`` or ``unsigned``."""
    bits: int
    """Width of an element."""
    mantissa: int = 0
    """Mantissa bits of a float."""
    infinity: int = -1
    """Magnitude of infinity, -1 for types without infinity."""
    nan: int = 0
    """Smallest magnitude that encodes NaN."""


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
"""Supported dtypes; complex64 and complex128 are viewed as pairs of float32 and float64."""


def summarize_reference(tensor: Tensor) -> Tensor:
    """Compute the counts, extremes and sums of :func:`summarize` in plain PyTorch: [12] float64, without digests.

    The reference implementation of the digests is kernels/native/digests.py.
    """
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
    values = flat.double()
    finite = values[values.isfinite()]
    form = FORMATS[flat.dtype]
    smallest_normal = torch.finfo(flat.dtype).smallest_normal if form.kind == "float" else 0.0
    counts = [len(values), values.isnan().sum(), (values == torch.inf).sum(), (values == -torch.inf).sum()]
    counts += [(values == 0).sum(), ((finite != 0) & (finite.abs() < smallest_normal)).sum(), len(finite)]
    low, high = (finite.min() + 0.0, finite.max() + 0.0) if len(finite) else (torch.inf, -torch.inf)
    max_abs = finite.abs().max() if len(finite) else 0.0
    return torch.tensor([*counts, low, high, max_abs, finite.sum() + 0.0, finite.square().sum()], dtype=torch.float64)


def summarize(tensor: Tensor, row: Tensor | None = None) -> Tensor:
    """Return the summary row of ``tensor``, [16] int64 on its device; written to ``row`` if given.

    The last word of ``row`` must be 0. A tensor that is not contiguous or not aligned to 16 bytes is copied first. The
    call does not synchronize with the host, so a CUDA graph may capture it. Raises UsageError for a dtype that is not
    in :data:`FORMATS` and for an unsuitable ``row``.
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
    """Return the driver launch of :func:`begin` for contiguous 16-byte-aligned tensors of this dtype and size.

    ``after_sketch`` is as in :func:`begin`. The kernel parameters are address, number of elements, key of the hash,
    partial results, row, and two null pointers. None if :func:`begin` has not launched this specialization yet.
    """
    if tensor.dtype not in FORMATS or not tensor.is_contiguous() or tensor.data_ptr() % 16 or is_interpreted():
        return None
    share, keys = _share(tensor), keys_on(tensor.device)
    args = tensor.data_ptr(), tensor.numel(), None, None, keys, keys, keys  # partial results and row: same dtype
    constants = _begun_constants(tensor.dtype, share, after_sketch)
    direct = _launch_begin.direct(tensor.device, args, constants, num_warps=_NUM_WARPS)
    if direct is None or direct.places != (0, 1, 4, 5, 6):
        return None
    return DriverLaunch(direct.function, share.programs, direct.threads, direct.shared, direct.overlaps)


class Parts:
    """Buffer for the per-program partial results of the tensors of one stream, until :func:`merge` reduces them."""

    def __init__(self, device: torch.device, count: int | None = None) -> None:
        """Allocate ``count`` partial results; by default enough for 80 large tensors (4 MB)."""
        self.most = _PROGRAMS_PER_SM * num_sms(device)
        """Maximum number of partial results of a tensor."""
        self.count = 80 * self.most if count is None else count
        self.memory = torch.empty(self.count, PART_WIDTH, dtype=torch.int64, device=device)
        self.used = 0

    @property
    def has_room(self) -> bool:
        """Whether the partial results of another tensor fit, whatever its size."""
        return self.used + self.most <= self.count


def begin(tensor: Tensor, row: Tensor, parts: Parts, *, after_sketch: bool = False) -> None:
    """Start the summary of ``tensor``, like :func:`summarize`; :func:`merge` completes ``row``.

    The last word of ``row`` need not be 0. With ``after_sketch``, the previous kernel of the stream must be
    :meth:`tapscope.kernels.triton.sketch.Sketches.add` of the same tensor; both kernels then run concurrently.
    """
    flat = _flat(tensor)
    share = _share(flat)
    args = flat.data_ptr(), flat.numel(), None, None, keys_on(flat.device), parts.memory[parts.used :], row
    is_after_sketch = after_sketch and flat.data_ptr() == tensor.data_ptr()  # otherwise a copy kernel ran in between
    constants = _begun_constants(flat.dtype, share, is_after_sketch)
    _launch_begin(flat.device, (share.programs, 1, 1), args, constants, num_warps=_NUM_WARPS)
    parts.used += share.programs if share.programs > 1 else 0


def merge(rows: Tensor) -> None:
    """Complete the summary rows [rows, 16] that :func:`begin` started; completed rows are left unchanged."""
    if len(rows):
        _launch_merge(rows.device, (len(rows), 1, 1), (rows,), {"BLOCK": _MERGE_BLOCK}, num_warps=_NUM_WARPS)


def merge_launch(rows: Tensor) -> DriverLaunch | None:
    """Return the driver launch of :func:`merge`, one program per row.

    The kernel parameters are the address of the rows and two null pointers. None if :func:`merge` has not run on the
    device of ``rows`` yet.
    """
    direct = (
        None
        if is_interpreted()
        else _launch_merge.direct(rows.device, (rows,), {"BLOCK": _MERGE_BLOCK}, num_warps=_NUM_WARPS)
    )
    if direct is None or direct.places != (0,):
        return None
    return DriverLaunch(direct.function, len(rows), direct.threads, direct.shared, direct.overlaps)


class Plan(NamedTuple):
    """Launch plan of :func:`summarize_many` for tensors of one dtype."""

    dtype: torch.dtype
    group: int
    """Blocks per iteration of a program."""
    table: Tensor
    """[tensors, 8] int64 on the CPU: first program, number of programs, address (16-byte-aligned), number of elements
    (real and imaginary parts counted separately), the three values of :func:`row_gap`, address of the summary row."""
    places: Tensor
    """[programs] int64 on the CPU: table row of each program, see :mod:`.launch_table`."""


def plan_of(tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> Plan:
    """Plan one launch that summarizes ``tensors`` into ``rows``, each [16] int64 with last word 0.

    Pass the largest tensors first: programs start in this order, and the last programs to start should be short.
    Raises UsageError for a dtype that is not in :data:`FORMATS`, for several dtypes or devices, and for a tensor
    without a :func:`row_gap`.
    """
    flats = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    if len(types := {flat.dtype for flat in flats}) != 1 or not types <= FORMATS.keys():
        raise UsageError(f"expected tensors of one type that has statistics on the device, found {types or 'none'}")
    check_same_device(*flats, *rows)
    gaps = [gap for flat in flats if (gap := row_gap(flat)) is not None]
    if len(gaps) < len(flats):
        raise UsageError("a tensor in the table must be aligned to 16 bytes, in rows that are each contiguous")
    group, programs = _table_shares([_num_blocks(flat) for flat in flats], num_sms(flats[0].device))
    places, firsts = places_of(programs)
    words = [
        (first, count, flat.data_ptr(), flat.numel(), *gap, row.data_ptr())
        for first, count, flat, gap, row in zip(firsts, programs, flats, gaps, rows, strict=True)
    ]
    table, place = (torch.tensor(each, dtype=torch.int64, device="cpu") for each in (words, places))
    return Plan(types.pop(), group, table, place)


def summarize_many(plan: Plan, table: Tensor, places: Tensor) -> None:
    """Summarize the tensors of ``plan`` in one launch; ``table`` and ``places`` are device copies of the plan's.

    A CUDA graph may capture the call. The table may be filled after capture, and numbers of elements (:data:`COUNT`)
    may be lower than planned. The tensors must be alive when the kernel runs. Raises UsageError if ``table`` or
    ``places`` differs from the plan's in shape or dtype.
    """
    check_same_device(table, places)
    for given, like in ((table, plan.table), (places, plan.places)):
        if given.shape != like.shape or given.dtype != torch.int64 or not given.is_contiguous():
            raise UsageError(
                f"expected contiguous int64 {list(like.shape)} as planned, found {given.dtype} {list(given.shape)}"
            )
    partial = torch.empty(len(places), PART_WIDTH, dtype=torch.int64, device=table.device)
    args = 0, 0, table, places, keys_on(table.device), partial, None
    constants = _constants(plan.dtype, plan.group, _TABLE_MERGE_BLOCK)
    _launch_summarize(table.device, (len(places), 1, 1), args, constants, num_warps=_NUM_WARPS)


def row_gap(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return (gap, multiplier, shift) of a tensor with contiguous, 16-byte-aligned rows, or None for other tensors.

    ``gap`` is the number of bytes between the end of a row and the start of the next. The 64-bit word ``i`` is in row
    ``(i * multiplier >> 32) >> shift`` (Granlund and Montgomery, "Division by invariant integers using multiplication",
    PLDI 1994, theorem 4.2). A contiguous tensor is one row: (0, 0, 0).
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
    if width * size % 16 or gap % 16 or not 0 <= gap < 1 << 32 or tensor.numel() * size > 8 * _MAX_WORDS:
        return None
    words = width * size // 8
    shift = (words - 1).bit_length() - 1
    return gap, -(-(1 << 32 + shift) // words), shift


def launch_variants(device: torch.device, dtype: torch.dtype, *, after_sketch: bool = False) -> None:
    """Launch every specialization that :func:`begin`, :func:`merge` and :func:`summarize_many` may need for ``dtype``.

    Call it inside :func:`.compiled_ahead` to compile them. ``after_sketch`` is as in :func:`begin`.
    """
    size = torch.empty(0, dtype=dtype).element_size()
    begun, row = torch.zeros(2, 1, WIDTH, dtype=torch.int64, device=device)
    for blocks in (1, 2, _GROUP * num_sms(device)):  # one program; several; several with groups of blocks
        tensor = torch.zeros(blocks * BLOCK_BYTES // size, dtype=dtype, device=device)
        begin(tensor, begun[0], Parts(device, blocks), after_sketch=after_sketch)
        merge(begun)
        plan = plan_of([tensor], [row[0]])
        summarize_many(plan, plan.table.to(device), plan.places.to(device))


def prepare(device: torch.device) -> None:
    """Create the state on ``device`` that kernels need but a CUDA graph cannot capture; call before capture."""
    keys_on(device)
    num_sms(device)


def _flat(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as a contiguous, 16-byte-aligned tensor of real elements, copied only if necessary.

    Raises UsageError for a dtype that is not in :data:`FORMATS`.
    """
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if flat.dtype not in FORMATS:
        raise UsageError(f"no statistics of {tensor.dtype} on the device")
    flat = flat.contiguous()
    return flat.clone() if flat.data_ptr() % 16 else flat


class _Share(NamedTuple):
    """Number of programs that share a tensor, and their group size."""

    programs: int
    group: int
    """Blocks per iteration of a program."""

    @property
    def merged(self) -> int:
        """Partial results that the merge loads per iteration; 1 for a single program."""
        return 1 if self.programs == 1 else min(max(32, next_power(self.programs)), _MERGE_BLOCK)


def _num_blocks(flat: Tensor) -> int:
    """Return the number of hash blocks of ``flat``, at least 1."""
    return max(1, -(-flat.numel() * flat.element_size() // BLOCK_BYTES))


def _share(flat: Tensor) -> _Share:
    """Return the share for a launch of one tensor: a program per group of blocks, up to one full wave of programs."""
    blocks, sms = _num_blocks(flat), num_sms(flat.device)
    group = _group_size([blocks], sms)
    return _Share(min(-(-blocks // group), _PROGRAMS_PER_SM * sms), group)


def _table_shares(blocks: Sequence[int], sms: int) -> tuple[int, list[int]]:
    """Return (blocks per iteration, programs of each tensor) for one launch over tensors of ``blocks`` blocks each.

    All programs process about the same number of groups, except programs that have a smaller tensor to themselves.
    """
    group = _group_size(blocks, sms)
    groups = [-(-each // group) for each in blocks]
    turns = -(-sum(groups) // (_PROGRAMS_OF_TABLE * sms))
    return group, [-(-each // turns) for each in groups]


def _group_size(blocks: Sequence[int], sms: int) -> int:
    """Return the blocks per iteration of a program: one per warp if that still occupies all SMs, else 1."""
    return _GROUP if max(blocks) >= _GROUP and sum(blocks) >= _GROUP * sms else 1


@functools.lru_cache(maxsize=256)
def _constants(
    dtype: torch.dtype, group: int, merged: int, is_begun: bool = False, is_after_sketch: bool = False
) -> dict[str, Any]:
    """Return the constexpr arguments of the kernel; the merge loads ``merged`` partial results per iteration."""
    form = FORMATS[dtype]
    return {
        "IS_FLOAT": form.kind == "float", "IS_SIGNED": form.kind == "signed", "BITS": form.bits,
        "MANTISSA": form.mantissa, "INFINITY": form.infinity, "NAN": form.nan,
        "GROUP": group, "LANES": 64 * _NUM_WARPS // group, "BLOCK": merged,
        "IS_BEGUN": is_begun, "IS_AFTER_SKETCH": is_after_sketch, "IS_OVERLAPPED": False,
    }  # fmt: skip


def _begun_constants(dtype: torch.dtype, share: _Share, is_after_sketch: bool) -> dict[str, Any]:
    """Return the constexpr arguments of the kernel if :func:`merge` reduces the partial results.

    All numbers of programs above one then share a specialization.
    """
    return _constants(dtype, share.group, 1 if share.programs == 1 else _MERGE_BLOCK, True, is_after_sketch)


@triton.jit(do_not_specialize=["address", "count"])
def _summarize_kernel(
    address, count, table, places, keys, partial, row, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, IS_BEGUN: tl.constexpr, IS_AFTER_SKETCH: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Summarize every n-th group of blocks of a tensor that n programs share: the only tensor, or one of the table.

    With IS_AFTER_SKETCH, the sketch kernel before has already waited for the tensor's producer (PDL). This kernel then
    runs concurrently with the sketch and waits for it only at the end.
    """
    if not IS_AFTER_SKETCH:
        wait_for_previous(IS_OVERLAPPED)
    program, stride = tl.program_id(0), tl.num_programs(0)  # one partial result per program
    rows = None
    if table is not None:
        table_row, first_program, stride = place_in(table, places, _COLUMNS)
        program -= first_program
        partial += first_program.to(tl.int64) * _PART_WIDTH
        address, count = tl.load(table_row + 2), tl.load(table_row + 3)
        gap = tl.load(table_row + 4).to(tl.uint32).to(tl.uint64)  # so that the compiler emits a 32-bit multiplication
        rows = gap, tl.load(table_row + 5).to(tl.uint32), tl.load(table_row + 6).to(tl.uint32)
        row = tl.load(table_row + 7).to(tl.pointer_type(tl.int64))
    count = count.to(tl.int64)
    data = tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(tl.uint64)), 16)
    num_words = (count * (BITS // 8) + 7) // 8
    blocks = ((num_words + WORDS - 1) // WORDS).to(tl.int32)
    groups = (blocks + GROUP - 1) // GROUP
    programs = tl.minimum(stride, tl.maximum(groups, 1))
    if program < programs:
        stats = _summarize_blocks(
            data, count, num_words, rows, keys, blocks, groups, program, programs, IS_FLOAT, IS_SIGNED, BITS, MANTISSA,
            INFINITY, NAN, GROUP, LANES,
        )  # fmt: skip
        _store_result(row, partial, program, programs, stride, count, BITS // 8, stats, BLOCK, IS_BEGUN)
    if IS_AFTER_SKETCH:
        wait_for_previous(IS_OVERLAPPED)


@triton.jit
def _summarize_blocks(
    data, count, num_words, rows, keys, blocks, groups, program, programs, IS_FLOAT: tl.constexpr,
    IS_SIGNED: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return the statistics and the two hash sums of one program's blocks.

    Groups are processed from last to first: the end of a tensor that was just written is still in L2. Each thread
    holds two of the LANES words of a block. Sums stay in registers until the end.
    """
    nbytes = count * (BITS // 8)
    place = tl.zeros([GROUP, 1], tl.int64) + tl.arange(0, LANES)[None, :]
    stats = empty_statistics(GROUP, LANES)
    one = tl.zeros([GROUP], tl.uint64)
    two = one
    end = groups  # the loop over arbitrary elements below ends here
    if IS_FLOAT and (BITS == 32 or BITS == 16):
        begin = program  # program 0 skips the last group here if it contains partial blocks
        if program == 0 and (nbytes * 0 + groups) * (8 * WORDS * GROUP) > nbytes:
            begin += programs
        ordinary = no_ordinary_blocks(GROUP, LANES)
        for index in tl.range(begin, groups, programs):
            number, first = _block_indices(groups - 1 - index, place, GROUP)
            ordinary, sum_one, sum_two = add_ordinary_blocks(
                ordinary, data, keys, first, place, rows, BITS, MANTISSA, LANES
            )
            block_one, block_two = block_hash(sum_one, sum_two, number, blocks)
            one += block_one
            two += block_two
            if GROUP > 1:  # keep warps in step, for L2 hits
                tl.debug_barrier()
        flags = flags_of(ordinary)
        if flags < 65536:
            stats = with_ordinary(stats, ordinary)
            end = begin
            if flags != 0:
                for index in tl.range(begin, groups, programs):
                    _, first = _block_indices(groups - 1 - index, place, GROUP)
                    stats = add_small(stats, data, first, rows, BITS, MANTISSA, LANES)
        else:
            one *= 0
            two *= 0
    for index in tl.range(program, end, programs):
        number, first = _block_indices(groups - 1 - index, place, GROUP)
        stats, sum_one, sum_two = add_any_blocks(
            stats, data, keys, first, place, count, num_words, nbytes, rows, IS_FLOAT, IS_SIGNED, BITS, MANTISSA,
            INFINITY, NAN, LANES,
        )  # fmt: skip
        block_one, block_two = block_hash(sum_one, sum_two, number, blocks)
        one += block_one
        two += block_two
    return over_tile(stats, one, two)


@triton.jit
def _block_indices(group, place, GROUP: tl.constexpr):
    """Return (indices [GROUP] of a group's blocks, indices [GROUP, LANES] of their first words in the tensor)."""
    number = group.to(tl.int64) * GROUP + tl.arange(0, GROUP)
    return number, number[:, None] * WORDS + place


@triton.jit
def _store_result(
    row, partial, program, programs, stride, count, size: tl.constexpr, stats, BLOCK: tl.constexpr,
    IS_BEGUN: tl.constexpr,
):  # fmt: skip
    """Store the summary row of a tensor with one program, or the partial result of one of several programs.

    BLOCK is 1 if a single program is known at compile time. The last of several programs to arrive merges all partial
    results. With IS_BEGUN, :func:`_merge_kernel` merges instead; its inputs are left in the row: count, bytes per
    element, address of the partial results, ``stride``.
    """
    if BLOCK == 1:
        store_row(row, count, size, stats)
        if IS_BEGUN:
            tl.store(row + 15, count * 0)
    elif IS_BEGUN:
        store_part(partial + program, stride, stats)
        if program == 0:
            tl.store(row, count)
            tl.store(row + 1, count * 0 + size)
            tl.store(row + 2, partial.to(tl.int64))
            tl.store(row + 15, count * 0 + stride)
    elif programs == 1:
        store_row(row, count, size, stats)
    else:
        store_part(partial + program, stride, stats)
        tl.debug_barrier()  # all warps have stored the partial result before the atomic
        arrived = tl.atomic_add(row + 15, 1, sem="acq_rel")
        if arrived == programs - 1:
            merge_parts(partial, stride, programs, row, count, size, BLOCK)
            tl.store(row + 15, count * 0)


@triton.jit
def _merge_kernel(rows, BLOCK: tl.constexpr):
    """Complete one summary row from the partial results of the programs that :func:`begin` launched for it."""
    row = rows + 16 * tl.program_id(0).to(tl.int64)
    programs = tl.load(row + 15)
    if programs > 0:
        count, size = tl.load(row), tl.load(row + 1)
        parts = tl.load(row + 2).to(tl.pointer_type(tl.int64))
        merge_parts(parts, programs, programs, row, count, size, BLOCK)
        tl.store(row + 15, programs * 0)


_launch_summarize, _launch_begin = Launcher(_summarize_kernel), Launcher(_summarize_kernel, overlaps=True)
_launch_merge = Launcher(_merge_kernel)
