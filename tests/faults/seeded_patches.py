"""Faults for :mod:`seeded_faults`: each replaces one method of the engine while it is entered."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from tapscope.engine.execution import input_buffers
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.kv_cache.state_cache import StateCache, StepStates
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.experts import Experts
from tapscope.engine.layers.lora import LoraTarget
from tapscope.engine.layers.routers import Router
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import StepPlan
from tapscope.engine.scheduling.page_group import PageGroup
from tapscope.engine.scheduling.state_group import StateGroup

Patch = Callable[[], AbstractContextManager[Any]]


def replaces(holder: Any, name: str) -> Callable[[Callable[[Any], Any]], Patch]:
    """Decorator of a function that makes the faulty method from the right one, ``holder.name``."""
    return lambda make: lambda: mock.patch.object(holder, name, make(getattr(holder, name)))


def _is_decode(states: StepStates) -> bool:
    return len(states._reads) > 1


@replaces(StepStates, "read")
def state_of_another_request(read: Any) -> Any:
    def swapped(self: StepStates, layer: int, requests: slice) -> Any:
        if layer != 0 or not _is_decode(self):
            return read(self, layer, requests)
        kept, self._reads = self._reads, self._reads.flip(0)
        try:
            return read(self, layer, requests)
        finally:
            self._reads = kept

    return swapped


@replaces(StepStates, "read")
def heads_of_another_shard(read: Any) -> Any:
    def rolled(self: StepStates, layer: int, requests: slice) -> Any:
        windows, matrices = read(self, layer, requests)
        return windows, matrices.roll(1, dims=1) if layer == 0 else matrices

    return rolled


@replaces(StepStates, "write")
def state_not_written(write: Any) -> Any:
    def skipped(self: StepStates, layer: int, requests: slice, window: Any, matrix: Any) -> None:
        if layer == 2 and _is_decode(self):
            matrix = matrix.clone()
            matrix[-1] = self._cache.of(layer)[1][self._reads[requests][-1]]
        write(self, layer, requests, window, matrix)

    return skipped


@replaces(StepStates, "write")
def window_not_shifted(write: Any) -> Any:
    def kept(self: StepStates, layer: int, requests: slice, window: Any, matrix: Any) -> None:
        if layer == 0 and _is_decode(self):
            window = self._cache.of(layer)[0].index_select(0, self._reads[requests])
        write(self, layer, requests, window, matrix)

    return kept


@replaces(StepStates, "write")
def state_in_bfloat16(write: Any) -> Any:
    def rounded(self: StepStates, layer: int, requests: slice, window: Any, matrix: Any) -> None:
        write(self, layer, requests, window, matrix.bfloat16().float() if layer == 0 else matrix)

    return rounded


@replaces(StateGroup, "allocate")
def checkpoint_a_page_late(allocate: Any) -> Any:
    def late(self: StateGroup, request: Request, num_drafts: int = 0) -> Any:
        read, *written = allocate(self, request, num_drafts)
        node = request.state.checkpoint
        if request.cached_tokens and request.num_computed == request.cached_tokens and node is not None:
            others = [child.page for child in node.children.values() if child.page >= 0]
            read = next(iter(others), node.parent.page if node.parent is not None else -1)
        return read, *written

    return late


@replaces(StateGroup, "store")
def rejected_state_kept(store: Any) -> Any:
    def last(self: StateGroup, request: Request) -> None:
        accepted, request.accepted_drafts = request.accepted_drafts, tuple(range(len(request.state.draft_slots)))
        store(self, request)
        request.accepted_drafts = accepted

    return last


@replaces(PageGroup, "_num_out_of_window")
def freed_a_page_early(count: Any) -> Any:
    def early(self: PageGroup, num_computed: int, num_shared_pages: int) -> int:
        found: int = count(self, num_computed, num_shared_pages)
        return found + 1 if self.window is not None and num_computed >= self.window else found

    return early


@replaces(StepCache, "write")
def keys_of_two_requests_exchanged(write: Any) -> Any:
    def exchanged(self: StepCache, layer: int, key: Any, value: Any) -> None:
        if layer == 1 and len(self.segments) > 1 and self.segments[0].count == 1:
            key = key.clone()
            key[[0, 1]] = key[[1, 0]]
        write(self, layer, key, value)

    return exchanged


@replaces(KVCache, "write")
def value_not_written(write: Any) -> Any:
    def lost(self: KVCache, layer: int, slots: Any, key: Any, value: Any) -> None:
        if layer == 1 and len(slots) > 1:
            value = value.clone()
            value[-1] = 0
        write(self, layer, slots, key, value)

    return lost


@replaces(StepCache, "read")
def prefix_page_of_its_neighbour(read: Any) -> Any:
    def wrong(self: StepCache, layer: int, segment: Any, start: int = 0) -> Any:
        if layer != 1 or segment.position == 0 or segment.count < 2:
            return read(self, layer, segment, start)
        kept, self.page_table = self.page_table, self.page_table.clone()
        self.page_table[segment.index, 0] = kept[segment.index, 1]
        try:
            keys, values = read(self, layer, segment, start)
            return keys.clone(), values.clone()
        finally:
            self.page_table = kept

    return wrong


def rejected_draft_kept() -> AbstractContextManager[Any]:
    """The key and value at the position of the first rejected draft are never written again."""
    from tapscope.engine.scheduling.scheduler import Scheduler

    kept: list[int] = []
    write, append = KVCache.write, Scheduler._append

    def write_others(self: KVCache, layer: int, slots: Any, key: Any, value: Any) -> None:
        rows = [row for row, slot in enumerate(slots.tolist()) if slot not in kept]
        write(self, layer, slots[rows], key[rows], value[rows])

    def note_rejected(self: Any, request: Request, scheduled: Any, drawn: Any) -> int:
        count: int = append(self, request, scheduled, drawn)
        if count <= scheduled.num_drafts and not kept:
            position = scheduled.position + count
            kept.append(request.table(0).pages[position // 4] * 4 + position % 4)
        return count

    @contextmanager
    def both() -> Iterator[None]:
        with mock.patch.object(KVCache, "write", write_others), mock.patch.object(Scheduler, "_append", note_rejected):
            yield

    return both()


@replaces(input_buffers, "_positions")
def drafts_at_one_position(positions: Any) -> Any:
    def repeated(scheduled: Sequence[Any], places: Any) -> Any:
        found, first = positions(scheduled, places).copy(), 0
        for item in scheduled:
            count = len(item.tokens)
            if item.num_drafts:
                found[first + count - item.num_drafts : first + count] = item.position
            first += count
        return found

    return repeated


@replaces(input_buffers, "_positions")
def second_request_a_position_late(positions: Any) -> Any:
    def late(scheduled: Sequence[Any], places: Any) -> Any:
        found, first = positions(scheduled, places).copy(), 0
        for item in scheduled:
            count = len(item.tokens)
            if item.request == "r1" and count == 1:
                found[first] += 1
            first += count
        return found

    return late


def changes_adapter_rows(change: Callable[[list[tuple[int, int]]], list[tuple[int, int]]]) -> Patch:
    """Decorator of a function from the right (slot, row) pairs to faulty ones."""
    right: Any = StepPlan.adapter_rows.fget  # type: ignore[attr-defined]

    def changed(self: StepPlan) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(change(list(right(self)))))

    return lambda: mock.patch.object(StepPlan, "adapter_rows", property(changed))


@changes_adapter_rows
def neighbours_adapter(rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if len({slot for slot, _ in rows}) != 2 or len(rows) != 2:
        return rows
    (slot, row), (other, neighbour) = rows
    return [(slot, neighbour), (other, row)]


@changes_adapter_rows
def adapter_of_a_base_row(rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [*rows, (0, 0)] if len(rows) == 2 else rows


@replaces(LoraTarget, "update")
def scaling_of_the_other_slot(update: Any) -> Any:
    def wrong(self: LoraTarget, input: Any, rows: Any) -> Any:
        if self.scaling is None or len(rows.active) < 2:
            return update(self, input, rows)
        kept, factors = self.scaling, self.factors
        self.scaling, self.factors = kept.flip(0), factors[::-1]
        try:
            return update(self, input, rows)
        finally:
            self.scaling, self.factors = kept, factors

    return wrong


@replaces(Router, "top")
def second_choice_lost(top: Any) -> Any:
    def lost(self: Router, *args: Any, **options: Any) -> Any:
        values, chosen = top(self, *args, **options)
        if len(chosen) > 3:
            chosen = chosen.clone()
            chosen[-1, 1] = (chosen[-1, 1] + 1) % self.config.num_experts
        return values, chosen

    return lost


@replaces(Experts, "gate_up")
def pairs_of_two_experts_exchanged(gate_up: Any) -> Any:
    def wrong(self: Experts, pairs: Any, ends: Any) -> Any:
        shifted = ends.clone()
        shifted[0] = max(0, int(ends[0]) - 1)
        return gate_up(self, pairs, shifted if int(ends[0]) else ends)

    return wrong


@replaces(StateCache, "of")
def last_layers_state(of: Any) -> Any:
    def wrong(self: StateCache, layer: int) -> Any:
        windows, matrices = of(self, layer)
        return (windows, of(self, max(self._places))[1]) if layer == 0 else (windows, matrices)

    return wrong
