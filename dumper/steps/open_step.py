"""OpenStep: the step that is open on a rank, with its counters."""

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
"""A step as far as it is known, and the rows that are still being copied from a device."""


@dataclass(slots=True, eq=False)
class OpenStep:
    """One step of this rank; gradients and recomputation refer to the step of their forward."""

    info: StepInfo
    serial: int
    """Sequence number of the rank's steps; payloads are shared within one."""
    epoch: int = 0
    age: int = 0
    """Steps since the configuration took effect."""
    skipped: bool = False
    """Nothing is captured: the host marked the step as warm-up or dummy."""
    in_full: bool = False
    """A trigger fired: everything from here on is kept in full."""
    late_rows: PendingRows | None = None
    """Rows that are still being copied from a device; ``info`` is then their outline."""
    halted: bool = False
    """A budget is exhausted: what the rules would keep from here on is left out and counted."""
    micro: int = 0
    micro_is_given: bool = False
    """Whether the host said which microbatch this is."""
    calls: dict[int, int] = field(default_factory=dict)
    """Thread -> number of its call of the model, if that began during another thread's call."""
    num_calls: int = 0
    """Numbers given to such calls."""
    counts: StepCounts = field(default_factory=StepCounts)
    """Of values that came before the step ended."""
    late: StepCounts = field(default_factory=StepCounts)
    """Of values that came after it ended, not yet written."""
    announced: bool = False
    rows_of_first_call: bool = False
    """Whether the rows were read from the model's arguments."""
    called: set[tuple[int, str]] = field(default_factory=set)
    """(microbatch, virtual pipeline stage) of the calls in a step that the host opened."""
    num_callers: int = 0
    """Calls of the model inside, if the first of them opened the step; 0 when the host did."""
    by_host: bool = True
    """Whether the host opened it; else a call of the model did, and the step ends before its backward."""
    ended: bool = False
    began: float = field(default_factory=time.perf_counter)
    row_ranges: dict[str, Ranges] = field(default_factory=dict)
    firings: dict[tuple[Any, ...], set[int]] = field(default_factory=dict)
    """(what, micro, pass) -> occurrences in use, in passes other than forward."""
    num_sketches_ahead: int = 0
    """Sketches of the rows of ``info``, which are left out if it :attr:`has_other_rows`."""
    nodes: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)
    """(what, micro) -> for each forward firing, the number of the graph's next node; -1 once it was repeated."""

    def __post_init__(self) -> None:
        self.row_ranges = {name: slots_as_ranges(slots) for name, slots in self.info.row_sets.items()}

    @property
    def current_micro(self) -> int:
        """The microbatch of what fires in this thread."""
        return self.calls.get(threading.get_ident(), self.micro) if self.calls else self.micro

    @property
    def current_counts(self) -> StepCounts:
        """The counters for a value that comes now."""
        return self.late if self.ended else self.counts

    @property
    def has_other_rows(self) -> bool:
        """Whether its rows turned out not to be those of ``info``; valid once :attr:`late_rows` are ready."""
        return self.late_rows is not None and self.late_rows.info.rows != self.info.rows

    @property
    def requests(self) -> frozenset[str]:
        """Ids of the requests whose rows the step computes."""
        return frozenset(run.request for run in self.info.rows)

    def claim_occurrence(self, what: tuple[Any, ...], wanted: int | None = None) -> int:
        """An occurrence for a firing: ``wanted`` if it is free, else the next; without ``wanted`` the n-th."""
        taken = self.firings.setdefault(what, set())
        number = len(taken) if wanted is None else wanted
        if number in taken:
            number = max(taken) + 1
        taken.add(number)
        return number

    def repeated_firing(self, what: tuple[Any, ...], node: int | None) -> int | None:
        """The forward firing that a checkpoint created at ``node`` repeats: the first one after it.

        None when unknown.
        """
        for number, place in enumerate(self.nodes.get(what, ())):
            if node is not None and place > node:
                self.nodes[what][number] = -1
                return number
        return None

    def can_set_rows(self) -> bool:
        """Whether its rows are unknown and may still be set."""
        info = self.info
        return not (self.announced or info.grid or info.rows or info.token_ids or info.row_sets)

    def set_rows(self, info: StepInfo, late_rows: PendingRows | None) -> None:
        """Set the rows."""
        self.info, self.late_rows = info, late_rows
        self.rows_of_first_call = True
        self.row_ranges = {name: slots_as_ranges(slots) for name, slots in info.row_sets.items()}

    def own_metrics(self) -> dict[str, Any]:
        """The metrics that the dumper measures itself, in addition to ``num_tokens``."""
        return {"latency_s": time.perf_counter() - self.began}

    def line(self, compose: Callable[[StepInfo], bytes]) -> bytes | DeferredLine:
        """The line that ``compose`` builds from the step with its rows, now or when they have arrived."""
        if self.late_rows is None:
            return compose(self.info)
        return DeferredLine(self.info, self.late_rows, compose)
