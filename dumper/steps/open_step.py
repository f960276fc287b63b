"""OpenStep: state and counters of one step of a rank."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tapscope.core.observe import StepInfo
from tapscope.dumper.steps.deferred_line import DeferredLine, PendingRows
from tapscope.dumper.steps.row_slicing import Ranges, slots_as_ranges
from tapscope.run_format.ledger import StepCounts

StepWithRows = tuple[StepInfo, PendingRows | None]
"""(the step as known so far, rows that are still being copied from a device)."""


@dataclass(slots=True, eq=False)
class OpenStep:
    """One step of this rank. It stays referenced after its end: gradients and recomputations belong to its forward."""

    info: StepInfo
    serial: int
    """Sequence number among the rank's steps; payloads are deduplicated within one step."""
    epoch: int = 0
    age: int = 0
    """Number of steps since the configuration took effect."""
    skipped: bool = False
    """Nothing is captured, because the host marked the step as warm-up or dummy or paused recording."""
    in_full: bool = False
    """All further values are kept in full, because a trigger or a divergence fired on this or another rank."""
    late_rows: PendingRows | None = None
    """Rows that are not final yet; ``info`` is then their outline."""
    halted: bool = False
    """A budget is exhausted: further values that the rules select are left out and counted."""
    micro: int = 0
    micro_is_given: bool = False
    """Whether the host specified the microbatch."""
    calls: dict[int, int] = field(default_factory=dict)
    """Thread -> number of its call of the model, for calls that overlap another thread's call."""
    num_calls: int = 0
    """Number of overlapping calls so far."""
    counts: StepCounts = field(default_factory=StepCounts)
    """Counts of values that arrived before the step ended."""
    late: StepCounts = field(default_factory=StepCounts)
    """Counts of values that arrived after the step ended and are not written yet."""
    announced: bool = False
    """Whether the step's begin line was written."""
    rows_of_first_call: bool = False
    """Whether the rows were read from the model's arguments."""
    called: set[tuple[int, str]] = field(default_factory=set)
    """(microbatch, virtual pipeline stage) of the calls so far, in a step opened by the host."""
    num_callers: int = 0
    """Number of model calls in progress, if a call opened the step; 0 if the host did."""
    by_host: bool = True
    """Whether the host opened the step; otherwise a call of the model did, and the step ends before its backward."""
    ended: bool = False
    began: float = field(default_factory=time.perf_counter)
    row_ranges: dict[str, Ranges] = field(default_factory=dict)
    firings: dict[tuple[Any, ...], set[int]] = field(default_factory=dict)
    """(tap, kind, micro, pass) or a similar key -> occurrences in use, except for forward firings of a tap."""
    num_sketches_ahead: int = 0
    """Number of sketches computed for the preliminary rows of ``info``; they are left out if :attr:`has_other_rows`."""
    nodes: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)
    """(tap, kind, micro) -> per forward firing, the next autograd node's number; -1 once the firing was repeated."""

    def __post_init__(self) -> None:
        self.row_ranges = {name: slots_as_ranges(slots) for name, slots in self.info.row_sets.items()}

    @property
    def current_micro(self) -> int:
        """The microbatch of firings in the current thread."""
        return self.calls.get(threading.get_ident(), self.micro) if self.calls else self.micro

    @property
    def current_counts(self) -> StepCounts:
        """The counts for a value that arrives now: :attr:`late` once the step has ended."""
        return self.late if self.ended else self.counts

    @property
    def has_other_rows(self) -> bool:
        """Whether the final rows differ from those of ``info``; valid once :attr:`late_rows` are ready."""
        return self.late_rows is not None and self.late_rows.info.rows != self.info.rows

    @property
    def requests(self) -> frozenset[str]:
        """Ids of the requests that have rows in the step."""
        return frozenset(run.request for run in self.info.rows)

    def claim_occurrence(self, what: tuple[Any, ...], wanted: int | None = None) -> int:
        """Reserve an occurrence for a firing identified by ``what``, and return its number.

        That is ``wanted`` (default: the number of occurrences in use) if it is free, otherwise the largest one plus 1.
        """
        taken = self.firings.setdefault(what, set())
        number = len(taken) if wanted is None else wanted
        if number in taken:
            number = max(taken) + 1
        taken.add(number)
        return number

    def repeated_firing(self, what: tuple[Any, ...], node: int | None) -> int | None:
        """Return the occurrence of the forward firing that a recomputation repeats; None if unknown.

        ``node`` is the number of the checkpoint's autograd node; the result is the first unrepeated firing after it.
        """
        for number, place in enumerate(self.nodes.get(what, ())):
            if node is not None and place > node:
                self.nodes[what][number] = -1
                return number
        return None

    def can_set_rows(self) -> bool:
        """Return whether the rows are unknown and can still be set."""
        info = self.info
        return not (self.announced or info.grid or info.rows or info.token_ids or info.row_sets)

    def set_rows(self, info: StepInfo, late_rows: PendingRows | None) -> None:
        """Set the rows that were derived from the arguments of the model's first call."""
        self.info, self.late_rows = info, late_rows
        self.rows_of_first_call = True
        self.row_ranges = {name: slots_as_ranges(slots) for name, slots in info.row_sets.items()}

    def own_metrics(self) -> dict[str, Any]:
        """Return the metrics that the dumper itself measures, in addition to ``num_tokens``."""
        return {"latency_s": time.perf_counter() - self.began}

    def line(self, compose: Callable[[StepInfo], bytes]) -> bytes | DeferredLine:
        """Return the journal line that ``compose`` formats from the step, deferred until its rows are ready."""
        if self.late_rows is None:
            return compose(self.info)
        return DeferredLine(self.info, self.late_rows, compose)
