"""Ledger: counts of values seen, sent, dropped and failed, so that missing data is never mistaken for equal data."""

import functools
import json
import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field, structs

from tapscope.core.formatting import listed
from tapscope.core.observe import DRAFT_PHASE, RowSpan, StepInfo, with_draft_names
from tapscope.run_format import validation

ROOT = "the model itself"
"""Name of the root module in messages."""
REMEDY = "call torch.compiler.reset() once the Dumper is open: the next call compiles the taps in"
"""Advice for modules that torch.compile compiled before the taps were placed."""


class StepCounts(Struct):
    """Counts of one rank in one step."""

    seen: int = 0
    """Selected values that were observed."""
    sent: int = 0
    """Values passed to the pipeline."""
    dropped: int = 0
    """Values discarded because the pipeline was full or the recorder was lost."""
    failed: int = 0
    """Values that could not be captured; an ``event`` line gives the reason."""
    aborted: str | None = None
    """Name of the exception that ended the step, or None."""
    left_out: int = 0
    """Selected values omitted after a budget was reached within the step; not included in ``seen``."""
    accepted: Mapping[str, int] = field(default_factory=dict)
    """Request id -> number of accepted draft rows; empty if the host did not report it."""
    accepted_branches: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Request id -> indices of the accepted draft rows, from 0, for requests with a draft tree."""
    injected: Mapping[str, int] = field(default_factory=dict)
    """Site -> number of tensors overwritten by stored values (setting ``inject``)."""

    def add(self, other: "StepCounts") -> None:
        """Add the counts of ``other``."""
        self.seen += other.seen
        self.sent += other.sent
        self.dropped += other.dropped
        self.failed += other.failed
        self.left_out += other.left_out


class StepLine(Struct, frozen=True):
    """One step of one rank, from its ``step`` lines."""

    info: StepInfo
    epoch: int = 0
    counts: StepCounts | None = None
    """Counts including late values; None if the step did not end."""
    skipped: bool = False
    """Whether the step was not recorded because the host marked it as a warm-up or dummy step."""

    def __repr__(self) -> str:
        how = "skipped" if self.skipped else "ended" if self.ended else "not ended"
        return f"<StepLine {self.info!r}, {how}>"

    @property
    def ended(self) -> bool:
        """Whether the rank reported the end of the step."""
        return self.counts is not None

    @property
    def rows(self) -> tuple[RowSpan, ...]:
        """Valid rows with the request names that readers use.

        Requests of a draft model are named ``draft/NAME``; an accepted draft of a tree becomes a row of its request
        (branch 0).
        """
        if self.counts is None or not self.counts.accepted_branches:
            return with_draft_names(self.info).rows
        kept = self._kept_rows()
        return tuple(structs.replace(span, branch=0) if span.branch and count else span for span, count in kept)

    def own_rows(self) -> Iterator[tuple[RowSpan, Sequence[int]]]:
        """Yield the spans whose rows belong to the final token sequence of their request, with token ids if known.

        Excludes all rows of a draft model, and the rejected drafts of a verify step. If the host did not report which
        drafts were accepted, all drafts of a chain are included (later steps recompute rejected positions) and none of
        a tree.
        """
        if self.info.phase == DRAFT_PHASE:
            return
        start = 0
        for span, num_kept in self._kept_rows():
            if num_kept:
                yield structs.replace(span, count=num_kept, branch=0), self.info.token_ids[start : start + num_kept]
            start += span.count

    def _kept_rows(self) -> Iterator[tuple[RowSpan, int]]:
        """Yield (span, n): the first n rows of the span belong to the final token sequence of the request."""
        counts, drafts = self.counts or StepCounts(), self.info.drafts
        next_row: Counter[str] = Counter()  # request -> next row, later counted such that its first draft is row 0
        for span in self.info.rows if drafts else ():
            next_row[span.request] -= span.count
        for span in self.info.rows:
            row = next_row[span.request] + drafts.get(span.request, 0)
            next_row[span.request] += span.count
            num_kept = min(span.count, max(0, -row)) if span.request in drafts else span.count
            accepted: Sequence[int] | None = counts.accepted_branches.get(span.request)
            if accepted is None and span.request in counts.accepted:
                accepted = range(counts.accepted[span.request])
            while num_kept < span.count and (not span.branch if accepted is None else row + num_kept in accepted):
                num_kept += 1
            yield span, num_kept


def begin_line(info: StepInfo, epoch: int, *, skipped: bool = False) -> dict[str, Any]:
    """Return the ``step`` line that opens a step; ``skipped`` marks a step that is not recorded due to its kind."""
    line = {
        "type": "step",
        "at": "begin",
        "step": info.step,
        "phase": info.phase,
        "epoch": epoch,
        "grid": list(info.grid),
        "num_rows": info.num_rows,
        "rows": [
            [run.request, run.position, run.count, run.visit, run.slot, *([run.branch] if run.branch else [])]
            for run in info.rows
        ],
        "token_ids": list(info.token_ids),
        "row_sets": {name: list(slots) for name, slots in info.row_sets.items()},
    }
    if info.seeds:
        line["seeds"] = dict(info.seeds)
    if info.drafts:
        line["drafts"] = dict(info.drafts)
    if info.adapters:
        line["adapters"] = dict(info.adapters)
    if info.kind is not None:
        line["kind"] = info.kind
    if skipped:
        line["skipped"] = True
    return line


def encoded_begin_line(info: StepInfo, epoch: int, *, skipped: bool = False) -> bytes:
    """Encode :func:`begin_line` as JSON, 10 times faster than :func:`encode_line`.

    This encoder is usable because the line contains no floating-point numbers.
    """
    return msgspec.json.encode(begin_line(info, epoch, skipped=skipped))


def end_line(step: int, counts: StepCounts) -> dict[str, Any]:
    """Return the ``step`` line that closes a step."""
    line = _counts_line("end", step, counts) | ({"aborted": counts.aborted} if counts.aborted else {})
    more = {"accepted": counts.accepted, "injected": counts.injected}
    if counts.accepted_branches:
        line["accepted_branches"] = {name: list(drafts) for name, drafts in counts.accepted_branches.items()}
    return line | {name: dict(numbers) for name, numbers in more.items() if numbers}


def late_line(step: int, counts: StepCounts) -> dict[str, Any]:
    """Return the ``step`` line with the counts of values captured after their step ended (gradients, recomputation).

    A step may have several late lines; readers add all counts to those of the end line.
    """
    return _counts_line("late", step, counts)


def _counts_line(at: str, step: int, counts: StepCounts) -> dict[str, Any]:
    return {
        "type": "step",
        "at": at,
        "step": step,
        "seen": counts.seen,
        "sent": counts.sent,
        "dropped": counts.dropped,
        "failed": counts.failed,
        **({"left_out": counts.left_out} if counts.left_out else {}),
    }


def event_line(kind: str, **fields: Any) -> dict[str, Any]:
    """Return an ``event`` line with the current UTC time."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"type": "event", "kind": kind, "time": now, **fields}


def metric_line(step: int, name: str, value: float) -> bytes:
    """Encode a ``metric`` line as JSON; a non-finite value becomes null."""
    number = repr(float(value)) if math.isfinite(value) else "null"
    return f'{{"type":"metric","step":{step},"name":{_quoted(name)},"value":{number}}}'.encode()


@functools.lru_cache(maxsize=256)
def _quoted(name: str) -> str:
    return _ENCODER.encode(name)


def encode_line(line: dict[str, Any]) -> bytes:
    """Encode a line other than a record as JSON, without newline; raises ValueError for a non-finite number."""
    return _ENCODER.encode(line).encode()


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def step_from_lines(begin: dict[str, Any], end: dict[str, Any] | None, late: Iterable[dict[str, Any]] = ()) -> StepLine:
    """Combine the begin, end and late lines of a step; raises KeyError, TypeError or ValueError if malformed."""
    rows = tuple(_row_run(run) for run in begin["rows"])
    total, ids = sum(run.count for run in rows), begin["token_ids"]
    if total > validation.MAX_ROWS or total != validation.count(begin, "num_rows", total):
        raise ValueError(f"rows hold {total:,} tokens, num_rows says {validation.short(begin.get('num_rows'))}")
    if rows and len(ids) not in (0, total):
        raise ValueError(f"rows hold {total:,} tokens, and {len(ids):,} have an id")
    if not all(type(token) is int and abs(token) < validation.MAX_COUNT for token in ids):
        raise ValueError("token_ids must be integers")
    grid = validation.counts(begin["grid"], "grid")
    if math.prod(grid) > validation.MAX_ROWS:
        raise ValueError(f"grid is {validation.short(list(grid))}, more than {validation.MAX_ROWS:,} rows")
    info = StepInfo(
        step=validation.count(begin, "step"),
        phase=validation.text(begin, "phase"),
        grid=grid,
        rows=rows,
        token_ids=array("q", ids) if ids else (),
        row_sets={name: _slots(slots) for name, slots in begin["row_sets"].items()},
        seeds=_by_name(begin, "seeds", lambda seed: type(seed) is int, "an integer for each request"),
        drafts=_by_name(begin, "drafts", validation.is_count, _COUNTS),
        adapters=_by_name(begin, "adapters", lambda name: type(name) is str, "a name for each request"),
        kind=validation.text(begin, "kind", None),
    )
    counts = None
    if end is not None:
        counts = _counts(end)
        for line in late:
            counts.add(_counts(line))
    return StepLine(info, validation.count(begin, "epoch"), counts, begin.get("skipped") is True)


def _row_run(run: list[Any]) -> RowSpan:
    request, *numbers = run
    if type(request) is not str or len(numbers) not in (4, 5) or not all(map(validation.is_count, numbers)):
        raise ValueError(f"rows hold {validation.short(run)}, not [request, position, count, visit, slot(, branch)]")
    if numbers[3] + numbers[1] > validation.MAX_ROWS:
        raise ValueError(f"rows hold {validation.short(run)}: its slots go beyond {validation.MAX_ROWS:,}")
    return RowSpan(request, *numbers)


def _slots(slots: Any) -> tuple[int, ...]:
    if type(slots) is not list or not all(type(slot) is int and 0 <= slot < validation.MAX_ROWS for slot in slots):
        raise ValueError(f"row_sets hold {validation.short(slots)}, not a list of slots")
    return tuple(slots)


_COUNTS = "a count for each name"


def _by_name(line: dict[str, Any], name: str, is_valid: Callable[[Any], bool], what: str) -> dict[str, Any]:
    """Return the JSON object in field ``name``, empty if missing; raises ValueError unless all values are valid."""
    given = line.get(name, {})
    if type(given) is not dict or not all(map(is_valid, given.values())):
        raise ValueError(f"{name} are {validation.short(given)}, not {what}")
    return given


def _are_counts(rows: Any) -> bool:
    return type(rows) is list and all(map(validation.is_count, rows))


def _counts(line: dict[str, Any]) -> StepCounts:
    seen, sent, dropped, failed = (validation.count(line, name) for name in ("seen", "sent", "dropped", "failed"))
    aborted, left_out = validation.text(line, "aborted", None), validation.count(line, "left_out", 0)
    accepted, injected = (_by_name(line, name, validation.is_count, _COUNTS) for name in ("accepted", "injected"))
    branches = _by_name(line, "accepted_branches", _are_counts, "a list of draft rows for each name")
    return StepCounts(seen, sent, dropped, failed, aborted, left_out, accepted, branches, injected)


class Ledger(Struct):
    """Completeness ledger of a run, or of one rank."""

    seen: int = 0
    recorded: int = 0
    """Records on disk that belong to ended steps."""
    dropped: int = 0
    failed: int = 0
    left_out: int = 0
    """Values omitted from the step in which a budget was reached."""
    lost: int = 0
    """Values that were seen but are neither on disk nor counted as dropped or failed."""
    injected: int = 0
    """Tensors overwritten by stored values (setting ``inject``)."""
    injected_sites: dict[str, None] = field(default_factory=dict)
    """Sites of the injected tensors, in order; used as an ordered set."""
    steps: int = 0
    unfinished_steps: list[tuple[int, int]] = field(default_factory=list)
    """(rank, step) of steps that began but did not end."""
    aborted_steps: list[tuple[int, int, str]] = field(default_factory=list)
    """(rank, step, exception name) of steps that ended with an exception."""
    skipped_steps: list[tuple[int, int]] = field(default_factory=list)
    """(rank, step) of skipped warm-up and dummy steps."""
    budgets: list[str] = field(default_factory=list)
    """Budgets that ended the capture early, one sentence each."""
    uneven_ranks: list[int] = field(default_factory=list)
    """Closed ranks that lack steps of other ranks."""
    cut_off: list[str] = field(default_factory=list)
    """Ranks whose recording ended early although their process is not known to have died, one sentence each."""
    lost_ranks: list[int] = field(default_factory=list)
    """Ranks whose process died."""
    never_fired: list[str] = field(default_factory=list)
    """Sites with a tap that never fired."""
    compiled: list[str] = field(default_factory=list)
    """Modules that ran as compiled code without taps; they may contain sites of ``never_fired``."""
    never_held: list[str] = field(default_factory=list)
    """Expressions of rules and filters that were evaluated but never true."""
    empty: str | None = None
    """Why the run has no records; None if it has records or may still receive some."""
    outside_step: int = 0
    """Number of firings outside any step, which were not recorded."""
    interrupted_ranks: list[int] = field(default_factory=list)
    """Ranks that closed because of an exception or a signal."""
    open_ranks: list[int] = field(default_factory=list)
    """Ranks without a close message: still running, or killed together with their recorder."""
    killed_ranks: list[int] = field(default_factory=list)
    """Ranks without a close message whose recorder is known to have been killed."""
    missing_ranks: list[int] = field(default_factory=list)
    """Ranks of the world that never connected."""
    unknown: list[str] = field(default_factory=list)
    """Information that the source does not record, one sentence each; does not make the run incomplete."""
    problems: list[str] = field(default_factory=list)
    """Errors of the reader, e.g. unparsable lines and missing files, one sentence each."""

    @property
    def complete(self) -> bool:
        """Whether every selected value is on disk, on every rank."""
        values = self.dropped or self.failed or self.lost
        steps = self.unfinished_steps or self.aborted_steps or self.uneven_ranks or self.budgets
        ranks = self.cut_off or self.lost_ranks or self.killed_ranks or self.missing_ranks or self.interrupted_ranks
        return not (values or steps or ranks or self.problems or self.empty)

    def sentences(self) -> list[str]:
        """Return one short sentence per kind of missing or unusual data."""
        facts = [
            (self.empty, f"no records: {self.empty}"),
            (self.dropped, f"{self.dropped:,} values dropped (the pipeline was full, or the recorder had ended)"),
            (self.failed, f"{self.failed:,} values could not be captured"),
            (self.lost, f"{self.lost:,} values lost between hook and disk"),
            (len(self.unfinished_steps), f"unfinished steps (rank, step): {listed(self.unfinished_steps)}"),
            (len(self.aborted_steps), f"steps ended by an exception (rank, step, error): {listed(self.aborted_steps)}"),
            (len(self.uneven_ranks), f"lack steps that other ranks have: {_ranks(self.uneven_ranks)}"),
            (len(self.lost_ranks), f"died while recording: {_ranks(self.lost_ranks)}"),
            (len(self.killed_ranks), f"recorder was killed: {_ranks(self.killed_ranks)}"),
            (len(self.missing_ranks), f"never connected: {_ranks(self.missing_ranks)}"),
            (len(self.interrupted_ranks), f"cut short by an exception or a signal: {_ranks(self.interrupted_ranks)}"),
            (len(self.open_ranks), f"still recording, or killed with its recorder: {_ranks(self.open_ranks)}"),
            (len(self.budgets), f"a budget ended the capture: {listed(self.budgets)}"),
            (self.left_out, f"{self.left_out:,} values left out of the step in which a budget was reached"),
            (self.injected, f"{self.injected:,} tensors overwritten by injection: {listed(list(self.injected_sites))}"),
            (len(self.skipped_steps), f"warm-up or dummy steps skipped (rank, step): {listed(self.skipped_steps)}"),
            (self.outside_step, f"{self.outside_step:,} firings outside a step were not kept"),
            (len(self.never_held), f"expressions that never held: {listed(self.never_held)}"),
            (len(self.compiled), compiled_sentence(self.compiled)),
            (len(self.never_fired), f"taps that never fired ({len(self.never_fired):,}): {listed(self.never_fired)}"),
        ]
        sentences = [sentence for amount, sentence in facts if amount]
        return sentences + self.cut_off + self.problems + self.unknown


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + listed(ranks)


def compiled_sentence(paths: list[str]) -> str:
    """Return a sentence that names compiled modules whose taps do not fire, and the remedy."""
    return f"compiled before the taps were placed, which do not fire there: {listed(paths)}; {REMEDY}"
