"""Request: one prompt on its way to a Generation."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.per_token_outputs import HiddenStates, RoutedExperts, UnsentOutputs
from tapscope.engine.requests.token_logprob import TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor

    from tapscope.engine.structured_output.grammar import Constraint

GRAMMAR_DEAD_END = "the constraint cannot go on"
"""Begins the reason of a request that its own grammar aborted: the same request would end so again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One finished request."""

    request: str
    """Request id."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated tokens, an end token included."""
    text: str | None
    """Generated text without special tokens; None when the checkpoint has no tokenizer.json."""
    finish_reason: str
    """``stop`` (an end token, a stop token or string, a grammar's end), ``length`` (max_new_tokens) or ``abort``."""
    matched: int | str | None = None
    """The token or stop string that ended it."""
    reason: str = ""
    """Why it was aborted, one sentence."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of :attr:`token_ids`; None where not asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One for each prompt token, None for the first; None where not asked for."""
    cached_tokens: int = 0
    """Leading prompt tokens that the prefix cache held."""
    routed_experts: RoutedExperts | None = None
    """Of every computed position, which the last token is not; None where not asked for."""
    hidden_states: HiddenStates | None = None
    """Of the same positions; None where not asked for."""
    dp_rank: int = 0
    """The DP replica that computed it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One live request; the scheduler is its only owner."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    forced_token_ids: Sequence[int] = ()
    """Tokens to take instead of the sampled ones, while they last (teacher forcing)."""
    tokens: list[int] = field(init=False)
    """Prompt and generated tokens: everything known."""
    priority: int = 0
    """The higher is served first; waiting makes up for it (:attr:`EngineConfig.priority_aging_steps`)."""
    parent: str = ""
    """What it is one of several generations of; those of different parents take turns. Empty: it stands alone."""
    pooling: str | None = None
    """``last`` or ``mean``: make an embedding of the prompt (:mod:`tapscope.engine.requests.pooling`)."""
    cache_salt: str = ""
    """It shares computed prefixes only with requests of the same salt."""
    capture: str = ""
    """What observers shall keep of its rows, whatever else they do: ``stats`` or ``full``; empty for nothing."""
    seed: int = 0
    """Seed of its draws; set at submit."""
    constraint: "Constraint | None" = None
    """State of the grammar that holds its output; set at submit."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One for each generated token, where asked for; the sampler adds them."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """One for each prompt token computed so far, where asked for; None for the first."""
    finish_reason: str | None = None
    matched: int | None = None
    """The token that ended it."""
    reason: str = ""
    """Why it was aborted, one sentence."""

    pooled: "Tensor | None" = None
    """Sum of the prompt's final hidden states so far, or its last one: [hidden], float32."""
    embedding: tuple[float, ...] | None = None
    """Once the whole prompt is computed, where :attr:`pooling` asks for it."""

    routed: UnsentOutputs[RoutedExperts] | None = field(init=False)
    """Experts of computed positions, where asked for."""
    hidden: UnsentOutputs[HiddenStates] | None = field(init=False)
    """Final hidden states of computed positions, where asked for."""

    # Set by Scheduler
    num_computed: int = 0
    """Leading tokens whose keys and values are in the cache; work is what this lags behind ``tokens``."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache held when the request was first admitted."""
    num_preemptions: int = 0
    row: int = -1
    """Row of the page tables while it runs, else -1."""
    urgency: tuple[int, int] = (0, 0)
    """The lesser is served first."""
    submitted_s: float = 0.0
    started_s: float | None = None
    """When it was first admitted."""
    spans: list[list[int]] = field(default_factory=list)
    """[start, end) positions computed, once for each time; a visit is a span passed before."""

    # Set by KVCacheManager
    pages: list[int] = field(default_factory=list)
    """Page table: cache pages in order of position."""
    num_shared_pages: int = 0
    """Leading pages that are the prefix cache's."""
    num_freed_pages: int = 0
    """Leading pages given back because no row looks so far back."""
    num_sent_pages: int = 0
    """Leading pages that the ranks know."""
    prefix_node: Any = None
    """The :class:`.RadixNode` at which the shared pages end; None while there are none."""

    # Set by Engine
    num_emitted: int = 0
    """Generated tokens that outputs have told of."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self.routed = UnsentOutputs(RoutedExperts) if self.params.routed_experts else None
        self.hidden = UnsentOutputs(HiddenStates) if self.params.hidden_states else None

    @property
    def generated(self) -> tuple[int, ...]:
        """Tokens after the prompt."""
        return tuple(self.tokens[len(self.prompt_ids) :])

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt, so far."""
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def max_new_tokens(self) -> int:
        """Tokens to generate at most."""
        return self.params.max_new_tokens

    @property
    def max_positions(self) -> int:
        """Positions that may be computed: the last generated token never is."""
        return len(self.prompt_ids) + max(0, self.max_new_tokens - 1)

    @property
    def is_decoding(self) -> bool:
        """Whether all it lacks is the row of the token sampled last."""
        return len(self.prompt_ids) <= self.num_computed == len(self.tokens) - 1

    @property
    def can_run_ahead(self) -> bool:
        """Whether a row of it can be computed without the host knowing its last token: nothing that the host does
        between two steps depends on it, but where the request ends.
        """
        return not (self.forced_token_ids or self.capture or self.pooling or self.params.needs_last_token)

    @property
    def holds_nothing(self) -> bool:
        """Whether it has no row, no page and nothing computed."""
        return self.row == -1 and not self.pages and self.prefix_node is None and not self.num_computed

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether logits of every prompt row are asked for."""
        return self.params.prompt_logprobs is not None

    @property
    def needs_every_row(self) -> bool:
        """Whether every prompt row has to be computed, so that none may come from the prefix cache."""
        return self.params.needs_every_row or self.pooling == "mean" or bool(self.capture)

    def mark_computed(self, start: int, count: int) -> None:
        """Positions from ``start`` on were computed."""
        if self.spans and self.spans[-1][1] == start:
            self.spans[-1][1] = start + count
        else:
            self.spans.append([start, start + count])
        self.num_computed = start + count

    def visits(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """(rows, times computed before) of positions [start, end), in runs."""
        cuts = sorted({start, end, *(cut for span in self.spans for cut in span if start < cut < end)})
        return tuple((b - a, sum(first <= a < last for first, last in self.spans)) for a, b in pairwise(cuts))

    def append(self, sampled: int, eos_token_ids: Collection[int]) -> None:
        """Take the next token, forced_token_ids or ``sampled``, and note whether the request is finished by it.

        A constrained request whose grammar allows no token takes none and is aborted; nor does one that asked for none.
        """
        if self.max_new_tokens == 0:
            self.finish_reason = "length"
            return
        if self.constraint is not None and self.constraint.error:
            self.finish_reason, self.reason = "abort", f"{GRAMMAR_DEAD_END}: {self.constraint.error}"
            return
        index = self.num_generated
        token = self.forced_token_ids[index] if index < len(self.forced_token_ids) else sampled
        self.tokens.append(token)
        if self.constraint is not None:
            self.constraint.accept(token)
        if self._ends_with(token, eos_token_ids):
            self.finish_reason, self.matched = "stop", token
        elif self.constraint is not None and self.constraint.finished:
            self.finish_reason = "stop"
        elif index + 1 == self.max_new_tokens:
            self.finish_reason = "length"

    def _ends_with(self, token: int, eos_token_ids: Collection[int]) -> bool:
        params = self.params
        if self.num_generated < params.min_new_tokens and self.constraint is None:
            return False
        return token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos)
