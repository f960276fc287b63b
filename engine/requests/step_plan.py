"""StepPlan: the work of every rank in one step, as decided by rank 0, and its wire format."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any

import msgspec

from tapscope.core.observe import RowSpan, StepInfo
from tapscope.core.wire import Message
from tapscope.engine.kv_cache.draft_tree import branch, branch_hash, depths

PENDING = -1
"""Placeholder for a token of the previous step that is on the device but not on the host yet. Smaller numbers are
placeholders for the draft tokens that follow it, see :func:`pending_drafts`."""

ONE_ROW = ((1, 0),)
"""``visits`` of a single row that is computed for the first time."""

NO_TOKEN = -2
"""Replaces the sampled token in a draft's row after which the request's grammar allows no token."""


def pending_drafts(count: int) -> tuple[int, ...]:
    """Return placeholders for ``count`` draft tokens of a request that are on the device but not on the host yet."""
    return tuple(range(PENDING - 1, PENDING - 1 - count, -1))


class ScheduledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one request in a step: consecutive positions starting at ``position``, or rows of a draft tree."""

    request: str
    row: int = 0
    """The request's row in the page table of every rank, constant while the request runs."""
    position: int
    """Position of the first row; in a tree, the index in the request's pages where the first row is stored."""
    visits: tuple[tuple[int, int], ...]
    """Runs of (number of rows, number of previous computations), in row order."""
    tokens: tuple[int, ...]
    page_start: int = 0
    pages: tuple[int, ...]
    """New entries of the request's page table, starting at index ``page_start``."""
    windowed_pages: tuple[tuple[int, ...], ...] = ()
    """New page table entries in each further cache group: the index of the first new entry, then the entries."""
    states: tuple[int, ...] = ()
    """Recurrent state slots: the slot to read (-1: the initial state), the slot to write, then one slot for the state
    after each draft; empty in models without recurrent state."""
    num_drafts: int = 0
    """Number of trailing rows that are draft tokens to verify: a token is sampled from each of them and from the row
    before them."""
    tree: tuple[int, ...] = ()
    """Empty: each row follows the previous row. In a draft tree: the parent of each row, -1 for the last cached
    position. The last entries are the rows of this step; earlier steps computed the others, which are stored before."""
    branches: tuple[int, ...] = ()
    """:attr:`.RowSpan.branch` of each row of a draft model in a tree; otherwise empty."""
    num_logits: int = 1
    """Number of trailing rows with logits; 0 until the prompt is complete."""
    samples: bool = True
    """Whether a token is sampled from the last row."""
    prompt_length: int = 0
    """Number of tokens in the request's prompt, for dynamic RoPE."""
    capture: str = ""
    """Capture level that the request sets for its rows: ``stats`` or ``full``; empty: none."""

    seed: int | None = None
    """Sampling seed of the request; None for greedy requests."""
    adapter: str = ""
    """Name of the request's LoRA adapter; empty: none."""
    adapter_slot: int = -1
    """Slot that holds the adapter in this step; -1: none."""
    experts: str = ""
    """Routed expert ids to replay for the first rows: base64 of int32 [rows, layers, k]."""

    @property
    def drafts(self) -> tuple[int, ...]:
        """Draft tokens that the step verifies."""
        return self.tokens[len(self.tokens) - self.num_drafts :]

    @property
    def has_pending_drafts(self) -> bool:
        """Whether the draft tokens are not on the host yet."""
        return self.num_drafts > 0 and self.tokens[-1] < PENDING

    def with_drafts(self, drafts: Mapping[str, Sequence[int]]) -> "ScheduledRequest":
        """See :meth:`StepPlan.with_drafts`."""
        if not self.has_pending_drafts:
            return self
        known = self.tokens[: len(self.tokens) - self.num_drafts]
        return msgspec.structs.replace(self, tokens=(*known, *drafts[self.request][: self.num_drafts]))

    @property
    def num_sampled(self) -> int:
        """Number of trailing rows from which tokens are sampled, drafts included."""
        if not self.samples:
            return 0
        return self.num_logits if self.tree else self.num_drafts + 1

    @property
    def row_positions(self) -> Sequence[int]:
        """Position of each row in the request."""
        if not self.tree:
            return range(self.position, self.position + len(self.tokens))
        earlier = len(self.tree) - len(self.tokens)
        return [self.position - earlier + depth for depth in depths(self.tree)[earlier:]]

    def drafts_up_to(self, row: int) -> tuple[int, ...]:
        """Return the draft tokens on the path to ``row``, including the draft of ``row`` itself."""
        known = len(self.tokens) - self.num_drafts
        rows = branch(self.tree, row)[known:] if self.tree else range(known, row + 1)
        return tuple(self.tokens[each] for each in rows)

    def next_row(self, row: int, token: int) -> int | None:
        """Return the child row of ``row`` whose draft is ``token``; None if there is none."""
        if not self.tree:
            return row + 1 if self.tokens[row + 1 : row + 2] == (token,) else None
        is_next = (each for each in range(row + 1, len(self.tree)) if self.tree[each] == row)
        return next((each for each in is_next if self.tokens[each] == token), None)

    def runs(self, slot: int) -> Iterable[RowSpan]:
        """Return the request's rows as spans for observers; the first row has index ``slot`` in the step."""
        if len(self.visits) == 1 and not self.tree and not self.branches:  # fast path for the common case
            count, visit = self.visits[0]
            return (RowSpan(self.request, self.position, count, visit, slot),)
        return self._split_runs(slot)

    def _split_runs(self, slot: int) -> Iterator[RowSpan]:
        positions, branches, done = self.row_positions, self._row_branches, 0
        for count, visit in self.visits:
            breaks = (row for row in range(done + 1, done + count) if branches[row]) if branches else ()
            for first, end in pairwise((done, *breaks, done + count)):
                branch = branches[first] if branches else 0
                yield RowSpan(self.request, positions[first], end - first, visit, slot + first, branch)
            done += count

    @property
    def _row_branches(self) -> Sequence[int]:
        """:attr:`.RowSpan.branch` of each row; empty unless the drafts are a tree."""
        if self.branches or not self.tree:
            return self.branches
        known = len(self.tokens) - self.num_drafts
        drafts = range(known, len(self.tokens))
        return [0] * known + [branch_hash(self.position, self.drafts_up_to(row)) for row in drafts]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The plan of one step, equal on all ranks. Rows are packed in the order of ``scheduled``."""

    step: int
    phase: str
    scheduled: tuple[ScheduledRequest, ...]
    kv_pages_used: int
    greedy: bool = True
    """Whether all requests are greedy, so that each rank computes the tokens; otherwise only rank 0 samples."""
    epoch: int | None = None
    """Configuration epoch of rank 0's observer, which the observers of all ranks adopt."""
    model: str = ""
    """Model that computes the step. ``draft``: the draft model; empty: the target model."""
    draft_index: int = 0
    """In a step of the draft model: its index among the steps that propose tokens for the same target step."""
    adapter_loads: tuple[tuple[int, int], ...] = ()
    """(slot, id) of each LoRA adapter to copy into a slot before the step."""

    @cached_property
    def is_decode(self) -> bool:
        """Whether every scheduled request has exactly one row, from which a token is sampled."""
        return all(len(item.tokens) == 1 == item.num_logits and item.samples for item in self.scheduled)

    @cached_property
    def has_adapters(self) -> bool:
        """Whether any request has a LoRA adapter."""
        return any(item.adapter_slot >= 0 for item in self.scheduled)

    @cached_property
    def has_experts(self) -> bool:
        """Whether any row has routed experts to replay."""
        return any(item.experts for item in self.scheduled)

    @property
    def adapter_rows(self) -> tuple[tuple[int, int], ...]:
        """(slot, row) of each row whose request has a LoRA adapter, sorted by slot, then row."""
        each = zip(self.slots, self.scheduled, strict=True)
        return tuple(
            sorted(
                (item.adapter_slot, row)
                for first, item in each
                if item.adapter_slot >= 0
                for row in range(first, first + len(item.tokens))
            )
        )

    @cached_property
    def has_pending(self) -> bool:
        """Whether some input tokens are not on the host yet; see :data:`PENDING`."""
        if self.is_decode:
            return PENDING in [item.tokens[0] for item in self.scheduled]
        return any(PENDING in item.tokens or item.has_pending_drafts for item in self.scheduled)

    def with_drafts(self, drafts: Mapping[str, Sequence[int]]) -> "StepPlan":
        """Return the plan with ``drafts`` in place of :func:`pending_drafts`.

        ``drafts`` maps request ids to draft tokens, at least as many as the plan verifies.
        """
        return replace(self, scheduled=tuple([item.with_drafts(drafts) for item in self.scheduled]))

    @cached_property
    def num_tokens(self) -> int:
        """Number of rows of the step."""
        return len(self.scheduled) if self.is_decode else sum([len(item.tokens) for item in self.scheduled])

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Index of the first row of each scheduled request."""
        if self.is_decode:
            return tuple(range(len(self.scheduled)))
        return (0, *accumulate(len(item.tokens) for item in self.scheduled))[:-1]

    @cached_property
    def logit_rows(self) -> tuple[int, ...]:
        """Indices of the rows whose logits are computed, ascending."""
        if self.is_decode:
            return self.slots
        ends = accumulate(len(item.tokens) for item in self.scheduled)
        return tuple(row for end, s in zip(ends, self.scheduled, strict=True) for row in range(end - s.num_logits, end))

    @property
    def state_rows(self) -> tuple[int, ...]:
        """For each request, the row after which its recurrent state is stored: the last row that is not a draft."""
        ends = accumulate(len(item.tokens) for item in self.scheduled)
        return tuple(end - 1 - item.num_drafts for end, item in zip(ends, self.scheduled, strict=True))

    @cached_property
    def sampled_logits(self) -> tuple[int, ...]:
        """Indices into :attr:`logit_rows` of the rows from which tokens are sampled, drafts included."""
        if self.is_decode:
            return self.slots
        ends = accumulate(item.num_logits for item in self.scheduled)
        sampled = (range(end - item.num_sampled, end) for end, item in zip(ends, self.scheduled, strict=True))
        return tuple(chain.from_iterable(sampled))

    def info(self, num_rows: int | None = None) -> StepInfo:
        """Return the description of the step for observers; ``num_rows`` is the row count with padding, if padded."""
        scheduled, num_tokens = self.scheduled, self.num_tokens
        if self.is_decode and not any(item.tree or item.branches for item in scheduled):
            rows = [RowSpan(s.request, s.position, 1, s.visits[0][1], slot) for slot, s in enumerate(scheduled)]
        else:
            rows = [run for slot, item in zip(self.slots, scheduled, strict=True) for run in item.runs(slot)]
        row_sets = {"logits": self.logit_rows}
        if self.has_adapters:
            row_sets["adapters"] = tuple(row for _, row in self.adapter_rows)
        if any(item.states for item in scheduled):
            row_sets["states"] = self.state_rows
        return StepInfo(
            step=self.step,
            phase=self.phase,
            micro=self.draft_index,
            grid=(num_tokens,),
            num_padding=0 if num_rows is None else num_rows - num_tokens,
            rows=tuple(rows),
            token_ids=() if self.has_pending else tuple([token for item in scheduled for token in item.tokens]),
            row_sets=row_sets,
            seeds={s.request: s.seed for s in scheduled if s.seed is not None and s.samples},
            epoch=self.epoch,
            drafts={item.request: item.num_drafts for item in scheduled if item.num_drafts},
            asked={item.request: item.capture for item in scheduled if item.capture},
            adapters={item.request: item.adapter for item in scheduled if item.adapter},
        )

    def to_message(self) -> Message:
        """Encode the plan as a message, for :meth:`from_message` on another rank."""
        scheduled = [[getattr(item, name) for name in _SCHEDULED_FIELDS] for item in self.scheduled]
        return Message("plan", {name: getattr(self, name) for name in _PLAN_FIELDS} | {"scheduled": scheduled})

    @classmethod
    def from_message(cls, message: Message) -> "StepPlan":
        """Decode the message of :meth:`to_message`; raises RecorderError if a field is missing."""
        whole = tuple(_scheduled_request(values) for values in message["scheduled"])
        given = {name: message[name] for name in _PLAN_FIELDS}
        return cls(scheduled=whole, **given | {"adapter_loads": tuple(map(tuple, given["adapter_loads"]))})


_SCHEDULED_FIELDS = ScheduledRequest.__struct_fields__
_PLAN_FIELDS = tuple(field.name for field in fields(StepPlan) if field.name != "scheduled")


def _scheduled_request(values: list[Any]) -> ScheduledRequest:
    named = zip(_SCHEDULED_FIELDS, values, strict=True)
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in named}
    nested = {name: tuple(map(tuple, given[name])) for name in ("visits", "windowed_pages")}
    return ScheduledRequest(**given | nested)


def phase_of(is_prefill: Iterable[bool]) -> str:
    """Return ``prefill``, ``decode`` or ``mixed``; ``is_prefill`` tells for each request whether it is in prefill."""
    kinds = set(is_prefill)
    return "mixed" if len(kinds) > 1 else "prefill" if True in kinds else "decode"
