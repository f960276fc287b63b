"""Request: one prompt with its scheduling state, and Generation: its result."""

import base64
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tapscope.core.errors import UsageError
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.drafts import NOTHING_DRAFTED, DraftCounts
from tapscope.engine.requests.page_table import PageTable
from tapscope.engine.requests.per_token_outputs import HiddenStates, RoutedExperts, UnsentOutputs
from tapscope.engine.requests.state_table import StateTable
from tapscope.engine.requests.token_logprob import TokenLogprob

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from tapscope.engine.structured_output.grammar import Constraint

POOLINGS = ("last", "mean")
"""Pooling methods of embeddings, see :mod:`tapscope.engine.requests.pooling`."""

GRAMMAR_DEAD_END = "the constraint allows no token"
"""Prefix of the reason of a request that its own grammar aborted; a retry would fail in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The result of one request."""

    request: str
    """Request id."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated tokens, including an end token."""
    text: str | None
    """Generated text without special tokens; None if the checkpoint has no tokenizer.json."""
    finish_reason: str
    """``stop`` (end token, stop token, stop string or end of the grammar), ``length`` (max_new_tokens) or ``abort``."""
    matched: int | str | None = None
    """The token or stop string that ended the request."""
    reason: str = ""
    """One sentence that explains why the request was aborted."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One entry for each of :attr:`token_ids`; None unless requested."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One entry for each prompt token, None for the first; None unless requested."""
    cached_tokens: int = 0
    """Number of leading prompt tokens served from the prefix cache."""
    routed_experts: RoutedExperts | None = None
    """Expert ids of every computed position, which excludes the last token; None unless requested."""
    hidden_states: HiddenStates | None = None
    """Hidden states of every computed position, which excludes the last token; None unless requested."""
    dp_rank: int = 0
    """DP replica that computed the result."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One live request with its scheduling state, owned by the scheduler."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    forced_token_ids: Sequence[int] = ()
    """Tokens that replace the first sampled tokens (teacher forcing)."""
    tokens: list[int] = field(init=False)
    """Prompt tokens followed by the generated tokens so far."""
    priority: int = 0
    """Requests of higher priority are scheduled first, subject to aging (:attr:`EngineConfig.priority_aging_steps`)."""
    parent: str = ""
    """Common id of the generations of one submitted request; the scheduler alternates between parents. Empty: none."""
    pooling: str | None = None
    """``last`` or ``mean``: compute an embedding of the prompt (:mod:`tapscope.engine.requests.pooling`)."""
    cache_salt: str = ""
    """The request shares cached prefixes only with requests of the same salt."""
    adapter: str = ""
    """Name of the request's LoRA adapter; empty: the base model."""
    adapter_id: int = 0
    """Id of the adapter, never reused by a later adapter of the same name; 0: none. Set at submit."""
    experts: str = ""
    """Expert ids that override the routers' choices at the first positions: base64 of little-endian int32
    [positions, layers, k], the format of :class:`RoutedExperts`; -1: the router chooses. Empty: none."""
    capture: str = ""
    """Capture level of the request's rows, regardless of the observer's rules: ``stats``, ``full``; empty: none."""
    seed: int = 0
    """Sampling seed; set at submit."""
    constraint: "Constraint | None" = None
    """State of the grammar that constrains the output; set at submit."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One entry for each generated token if requested, appended by the sampler."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """One entry for each prompt token computed so far if requested; None for the first token."""
    finish_reason: str | None = None
    matched: int | None = None
    """The token that ended the request."""
    reason: str = ""
    """One sentence that explains why the request was aborted."""
    has_nan: bool = False
    """Whether any logits from which the request's tokens were sampled contain NaN."""

    pooled: "Tensor | None" = None
    """Sum of the prompt's final hidden states so far (``mean``), or the last state (``last``): [hidden], float32."""
    embedding: tuple[float, ...] | None = None
    """Embedding of the prompt, with :attr:`pooling`; set once the whole prompt is computed."""

    expert_rows: "npt.NDArray[Any] | None" = None
    """:attr:`experts` as an array [positions, layers, k]; set at submit."""
    is_plain: bool = field(init=False)
    """Whether the request's tokens are the argmax of unmodified logits."""
    wants_logprobs: bool = field(init=False)
    """Whether log-probabilities of the prompt or the generated tokens are returned."""
    returns_values: bool = field(init=False)
    """Whether values other than tokens are returned: log-probabilities, an embedding, experts or hidden states."""
    can_run_ahead: bool = field(init=False)
    """Whether the request's next row can be launched before the host knows the last token: only the end of the request
    depends on the value of that token."""
    routed: UnsentOutputs[RoutedExperts] | None = field(init=False)
    """Expert ids of computed positions, if requested."""
    hidden: UnsentOutputs[HiddenStates] | None = field(init=False)
    """Final hidden states of computed positions, if requested."""

    # Set by Scheduler
    num_computed: int = 0
    """Number of leading tokens whose keys and values are cached; the remaining ``tokens`` are not computed yet."""
    cached_tokens: int = 0
    """Number of prompt tokens taken from the prefix cache when the request was first admitted."""
    num_preemptions: int = 0
    row: int = -1
    """Row of the page table while the request runs; otherwise -1."""
    urgency: tuple[int, int] = (0, 0)
    """Sort key of the queue; the smallest key is scheduled first."""
    submitted_s: float = 0.0
    started_s: float | None = None
    """Time of the first admission."""
    queue_time_s: float | None = None
    """Seconds from submission to the first admission."""
    spans: list[list[int]] = field(default_factory=list)
    """Computed position ranges [start, end), one entry per computation; recomputed positions are in several entries."""

    accepted_drafts: tuple[int, ...] = ()
    """Indices (from 0) of the draft tokens accepted in the request's last step."""

    tables: list[PageTable] = field(default_factory=list)
    """The request's page table in each group of layers; set by KVCacheManager."""

    state: StateTable = field(default_factory=StateTable)
    """The request's recurrent state slots, in models with recurrent state; set by KVCacheManager."""

    # Set by Engine
    draft_counts: DraftCounts = NOTHING_DRAFTED
    num_emitted: int = 0
    """Number of generated tokens already returned in outputs."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        is_special = self.forced_token_ids or self.experts or self.capture or self.pooling
        self.is_plain = self.params.is_plain
        self.wants_logprobs = self.params.wants_logprobs or self.params.prompt_logprobs is not None
        self.can_run_ahead = not (is_special or self.params.needs_last_token)
        self.routed = UnsentOutputs(RoutedExperts) if self.params.routed_experts else None
        self.hidden = UnsentOutputs(HiddenStates) if self.params.hidden_states else None
        self.returns_values = bool(
            self.wants_logprobs or self.pooling or self.params.routed_experts or self.params.hidden_states
        )

    def table(self, group: int) -> PageTable:
        """Return the request's page table in the layer group of index ``group``."""
        while len(self.tables) <= group:
            self.tables.append(PageTable())
        return self.tables[group]

    @property
    def num_accepted(self) -> int:
        """Number of draft tokens accepted in the request's last step."""
        return len(self.accepted_drafts)

    @property
    def generated(self) -> tuple[int, ...]:
        """Generated tokens so far."""
        return tuple(self.tokens[len(self.prompt_ids) :])

    @property
    def num_generated(self) -> int:
        """Number of generated tokens so far."""
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of generated tokens."""
        return self.params.max_new_tokens

    @property
    def max_positions(self) -> int:
        """Maximum number of computed positions; the last generated token is never computed."""
        return len(self.prompt_ids) + max(0, self.max_new_tokens - 1)

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt is computed and only the row of the last sampled token remains to be computed."""
        return len(self.prompt_ids) <= self.num_computed == len(self.tokens) - 1

    @property
    def can_speculate(self) -> bool:
        """Whether draft tokens can be verified together with the request's next row."""
        params = self.params
        if self.num_generated < len(self.forced_token_ids) or self.pooling is not None:
            return False
        if params.stops_on_text and (params.routed_experts or params.hidden_states):
            return False  # the text may end in the middle of a step, whose later rows would be returned too
        return self.is_decoding and self.num_generated + 1 < self.max_new_tokens

    @property
    def holds_nothing(self) -> bool:
        """Whether the request has no page table row, no pages, no state slots and no computed tokens."""
        return (
            self.row == -1
            and not self.num_computed
            and self.state.is_empty
            and all(table.is_empty for table in self.tables)
        )

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """Start of the first page's radix cache key: requests share prefixes if salt, adapter and experts are equal."""
        if self.adapter_id or self.experts:
            return ((self.cache_salt, self.adapter_id, self.experts),)
        return (self.cache_salt,) if self.cache_salt else ()

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether the logits of every prompt row are needed."""
        return self.params.prompt_logprobs is not None

    @property
    def needs_every_row(self) -> bool:
        """Whether every prompt row must be computed, so that the prefix cache cannot be used."""
        return self.params.needs_every_row or self.pooling == "mean" or bool(self.capture)

    def experts_of(self, positions: Sequence[int]) -> str:
        """Return the routed experts to replay at ``positions`` in the plan's format: base64 of int32 [rows, layers, k].

        Positions without experts are -1; empty if no position has any.
        """
        if self.expert_rows is None or min(positions) >= len(self.expert_rows):
            return ""
        wanted = np.asarray(positions)
        rows = self.expert_rows[np.minimum(wanted, len(self.expert_rows) - 1)]
        rows[wanted >= len(self.expert_rows)] = -1
        return base64.b64encode(rows.tobytes()).decode("ascii")

    def mark_computed(self, start: int, count: int) -> None:
        """Record that ``count`` positions were computed, beginning at ``start``."""
        if self.spans and self.spans[-1][1] == start:
            self.spans[-1][1] = start + count
        else:
            self.spans.append([start, start + count])
        self.num_computed = start + count

    def visits(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Split positions [start, end) into runs (number of rows, number of previous computations)."""
        if all(last <= start for _, last in self.spans):
            return ((end - start, 0),)
        cuts = sorted({start, end, *(cut for span in self.spans for cut in span if start < cut < end)})
        return tuple((b - a, sum(first <= a < last for first, last in self.spans)) for a, b in pairwise(cuts))

    def append(self, sampled: int, eos_token_ids: Collection[int]) -> int:
        """Append the next token (forced or ``sampled``), set ``finish_reason`` if it ends the request, and return 1.

        Returns 0 without appending a token if the grammar allows no token (the request is aborted), or if
        ``max_new_tokens`` is 0 (the request finishes).
        """
        params, constraint = self.params, self.constraint
        if params.max_new_tokens == 0:
            self.finish_reason = "length"
            return 0
        if constraint is not None and constraint.error:
            self.finish_reason, self.reason = "abort", f"{GRAMMAR_DEAD_END}: {constraint.error}"
            return 0
        index = len(self.tokens) - len(self.prompt_ids)
        token = self.forced_token_ids[index] if index < len(self.forced_token_ids) else sampled
        self.tokens.append(token)
        if constraint is not None:
            constraint.accept(token)
        may_end = constraint is not None or index + 1 >= params.min_new_tokens
        if may_end and (token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos)):
            self.finish_reason, self.matched = "stop", token
        elif constraint is not None and constraint.finished:
            self.finish_reason = "stop"
        elif index + 1 == params.max_new_tokens:
            self.finish_reason = "length"
        return 1


def check_request(request: Request, model: ModelConfig, *, is_observed: bool) -> None:
    """Raise UsageError if ``model`` cannot compute ``request``, or if it needs an observer and there is none."""
    _check_tokens(request, model)
    if request.pooling not in (None, *POOLINGS):
        raise UsageError(
            f"request {request.id!r}: invalid pooling {request.pooling!r}: expected {' or '.join(POOLINGS)}"
        )
    if request.capture not in ("", "stats", "full"):
        raise UsageError(f"request {request.id!r}: invalid capture {request.capture!r}: expected 'stats' or 'full'")
    if request.capture and not is_observed:
        raise UsageError(
            f"request {request.id!r}: capture={request.capture!r}, but this engine has no observer; pass one to "
            "LLM, or serve with `tapscope serve`"
        )
    if request.params.routed_experts and model.moe is None:
        raise UsageError(f"request {request.id!r} requests routed experts, but {model.architecture} has no experts")
    _check_experts(request, model)


def _check_experts(request: Request, model: ModelConfig) -> None:
    if not request.experts:
        return
    if model.moe is None:
        raise UsageError(f"request {request.id!r} has routed experts, but {model.architecture} has no experts")
    shape = model.num_layers, model.moe.top_k
    try:
        data = base64.b64decode(request.experts, validate=True)
    except ValueError as error:
        raise UsageError(f"request {request.id!r}: routed experts are not base64: {error}") from None
    if len(data) % (4 * shape[0] * shape[1]):
        rule = f"int32 [positions, {shape[0]} layers, {shape[1]} experts]"
        raise UsageError(f"request {request.id!r}: routed experts have {len(data)} bytes; they must be {rule}")
    ids = np.frombuffer(data, RoutedExperts.DTYPE)
    wrong = ids[(ids < -1) | (ids >= model.moe.num_experts)]
    if len(wrong):
        raise UsageError(
            f"request {request.id!r}: invalid expert {wrong[0]} in its routed experts: expected 0 to "
            f"{model.moe.num_experts - 1}, or -1 for the router's choice"
        )
    request.expert_rows = ids.reshape(-1, *shape)


def _check_tokens(request: Request, model: ModelConfig) -> None:
    vocab = model.vocab_size
    for name, ids in (("the prompt", request.prompt_ids), ("forced_token_ids", request.forced_token_ids)):
        wrong = next((token for token in ids if type(token) is not int or not 0 <= token < vocab), None)
        if wrong is not None:
            raise UsageError(f"request {request.id!r}: invalid token id {wrong!r} in {name}: expected 0 to {vocab - 1}")
    if not request.prompt_ids:
        raise UsageError(f"request {request.id!r} has no prompt tokens; pass at least one")
    limit, needed = model.max_positions, len(request.prompt_ids) + request.max_new_tokens
    if needed > limit:
        raise UsageError(
            f"request {request.id!r} needs {needed} positions (prompt {len(request.prompt_ids)}, "
            f"{request.max_new_tokens} new) but the limit is {limit} (max_model_len); shorten the prompt or lower "
            "max_new_tokens"
        )
