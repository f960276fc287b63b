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
"""Start of the reason when a request's own grammar aborted it; a retry would end the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The result of one request."""

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
    """The token or stop string that ended the request."""
    reason: str = ""
    """Why the request was aborted, one sentence."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of :attr:`token_ids`; None unless requested."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One for each prompt token, None for the first; None unless requested."""
    cached_tokens: int = 0
    """Leading prompt tokens taken from the prefix cache."""
    routed_experts: RoutedExperts | None = None
    """Of every computed position, which excludes the last token; None unless requested."""
    hidden_states: HiddenStates | None = None
    """Of the same positions; None unless requested."""
    dp_rank: int = 0
    """The DP replica that computed it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One live request, owned by the scheduler."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    forced_token_ids: Sequence[int] = ()
    """Tokens taken in place of the first sampled ones (teacher forcing)."""
    tokens: list[int] = field(init=False)
    """Known tokens: prompt and generated ones."""
    priority: int = 0
    """Higher is served first; waiting compensates for it (:attr:`EngineConfig.priority_aging_steps`)."""
    parent: str = ""
    """Id of the request that this is one of several generations of; different parents alternate. Empty for none."""
    pooling: str | None = None
    """``last`` or ``mean``: compute an embedding of the prompt (:mod:`tapscope.engine.requests.pooling`)."""
    cache_salt: str = ""
    """The request shares prefixes only with requests of the same salt."""
    adapter: str = ""
    """Name of the LoRA adapter to compute it with; empty for the model alone."""
    adapter_id: int = 0
    """Number of that adapter, which no later one of its name has; 0 for none. Set at submit."""
    experts: str = ""
    """Expert ids to compute its first positions with instead of the routers' choices: base64 of little-endian int32
    [positions, layers, k], as :class:`RoutedExperts` has them; -1: the router's choice. Empty: none."""
    capture: str = ""
    """Capture level of its rows for observers, whatever else they capture: ``stats``, ``full``, or empty for none."""
    seed: int = 0
    """Sampling seed; set at submit."""
    constraint: "Constraint | None" = None
    """State of the grammar that constrains the output; set at submit."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One for each generated token if requested; the sampler appends them."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """One for each prompt token computed so far if requested; None for the first."""
    finish_reason: str | None = None
    matched: int | None = None
    """The token that ended the request."""
    reason: str = ""
    """Why it was aborted, one sentence."""
    has_nan: bool = False
    """Whether NaN was found in the logits that its tokens were sampled from."""

    pooled: "Tensor | None" = None
    """Sum of the prompt's final hidden states so far, or the last one: [hidden], float32."""
    embedding: tuple[float, ...] | None = None
    """Set once the whole prompt is computed, with :attr:`pooling`."""

    expert_rows: "npt.NDArray[Any] | None" = None
    """:attr:`experts` as an array, set at submit."""
    is_plain: bool = field(init=False)
    """Whether its tokens are the argmax of unmodified logits."""
    wants_logprobs: bool = field(init=False)
    """Whether log-probabilities of its prompt or of generated tokens are returned."""
    returns_values: bool = field(init=False)
    """Whether something besides tokens is returned: log-probabilities, an embedding, experts or hidden states."""
    can_run_ahead: bool = field(init=False)
    """Whether its next row can be computed before the last token is known on the host, because nothing except the
    end of the request depends on that token."""
    routed: UnsentOutputs[RoutedExperts] | None = field(init=False)
    """Expert ids of computed positions, if requested."""
    hidden: UnsentOutputs[HiddenStates] | None = field(init=False)
    """Final hidden states of computed positions, if requested."""

    # Set by Scheduler
    num_computed: int = 0
    """Leading tokens whose keys and values are cached; the remaining ``tokens`` are to be computed."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache when the request was first admitted."""
    num_preemptions: int = 0
    row: int = -1
    """Row of the page table while running, else -1."""
    urgency: tuple[int, int] = (0, 0)
    """Sort key; the smallest is served first."""
    submitted_s: float = 0.0
    started_s: float | None = None
    """When it was first admitted."""
    queue_time_s: float | None = None
    """How long it waited for its first admission."""
    spans: list[list[int]] = field(default_factory=list)
    """[start, end) of computed positions, one entry per computation; recomputed positions are in several."""

    accepted_drafts: tuple[int, ...] = ()
    """Which draft tokens of its last step were accepted, from 0."""

    tables: list[PageTable] = field(default_factory=list)
    """Its page table in each group of layers; set by KVCacheManager."""

    state: StateTable = field(default_factory=StateTable)
    """Its recurrent state, in models that have one; set by KVCacheManager."""

    # Set by Engine
    draft_counts: DraftCounts = NOTHING_DRAFTED
    num_emitted: int = 0
    """Generated tokens already returned in outputs."""

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
        """Its page table in the group of this index."""
        while len(self.tables) <= group:
            self.tables.append(PageTable())
        return self.tables[group]

    @property
    def num_accepted(self) -> int:
        """Draft tokens accepted in its last step."""
        return len(self.accepted_drafts)

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
        """Maximum number of generated tokens."""
        return self.params.max_new_tokens

    @property
    def max_positions(self) -> int:
        """Maximum number of computed positions; the last generated token is never computed."""
        return len(self.prompt_ids) + max(0, self.max_new_tokens - 1)

    @property
    def is_decoding(self) -> bool:
        """Whether only the row of the last sampled token is missing."""
        return len(self.prompt_ids) <= self.num_computed == len(self.tokens) - 1

    @property
    def can_speculate(self) -> bool:
        """Whether draft tokens can be verified together with its next row."""
        params = self.params
        if self.num_generated < len(self.forced_token_ids) or self.pooling is not None:
            return False
        if params.stops_on_text and (params.routed_experts or params.hidden_states):
            return False  # the text may end within a step, whose rows would be returned too
        return self.is_decoding and self.num_generated + 1 < self.max_new_tokens

    @property
    def holds_nothing(self) -> bool:
        """Whether it has no row, no pages, no state and no computed tokens."""
        return (
            self.row == -1
            and not self.num_computed
            and self.state.is_empty
            and all(table.is_empty for table in self.tables)
        )

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """The prefix of its first page's key: requests share prefixes if salts, adapters and experts are equal."""
        if self.adapter_id or self.experts:
            return ((self.cache_salt, self.adapter_id, self.experts),)
        return (self.cache_salt,) if self.cache_salt else ()

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether logits of every prompt row are needed."""
        return self.params.prompt_logprobs is not None

    @property
    def needs_every_row(self) -> bool:
        """Whether every prompt row must be computed, so that the prefix cache cannot be used."""
        return self.params.needs_every_row or self.pooling == "mean" or bool(self.capture)

    def experts_of(self, positions: Sequence[int]) -> str:
        """The recorded experts of rows at ``positions``, -1 for those without, for a plan; empty if all are without."""
        if self.expert_rows is None or min(positions) >= len(self.expert_rows):
            return ""
        wanted = np.asarray(positions)
        rows = self.expert_rows[np.minimum(wanted, len(self.expert_rows) - 1)]
        rows[wanted >= len(self.expert_rows)] = -1
        return base64.b64encode(rows.tobytes()).decode("ascii")

    def mark_computed(self, start: int, count: int) -> None:
        """Record that ``count`` positions from ``start`` on were computed."""
        if self.spans and self.spans[-1][1] == start:
            self.spans[-1][1] = start + count
        else:
            self.spans.append([start, start + count])
        self.num_computed = start + count

    def visits(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Runs (rows, how often they were computed before) of positions [start, end)."""
        if all(last <= start for _, last in self.spans):
            return ((end - start, 0),)
        cuts = sorted({start, end, *(cut for span in self.spans for cut in span if start < cut < end)})
        return tuple((b - a, sum(first <= a < last for first, last in self.spans)) for a, b in pairwise(cuts))

    def append(self, sampled: int, eos_token_ids: Collection[int]) -> int:
        """Append the next token, forced or ``sampled``, and set ``finish_reason`` if it ends the request; returns how
        many tokens were appended.

        A request whose grammar allows no token is aborted; one with ``max_new_tokens`` of 0 finishes without a token.
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
    """Raise UsageError when ``model`` cannot compute ``request``, or it needs an observer and there is none."""
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
