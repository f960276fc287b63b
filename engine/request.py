"""Request: one prompt on its way to a Generation."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tapscope.engine.sampling_params import SamplingParams


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
    """``stop`` (an end token), ``length`` (max_new_tokens) or ``abort``."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One live request; the scheduler is its only owner."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    forced: Sequence[int] = ()
    """Tokens to take instead of the sampled ones, while they last (teacher forcing)."""
    tokens: list[int] = field(init=False)
    """Prompt and generated tokens: everything known."""
    num_computed: int = 0
    """Leading tokens whose keys and values are in the cache; work is what this lags behind ``tokens``."""
    pages: tuple[int, ...] = ()
    """Cache pages in order of position; set at admission, for the request's whole life."""
    finish_reason: str | None = None
    num_emitted: int = 0
    """Generated tokens that outputs have told of; set by Engine."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)

    @property
    def generated(self) -> tuple[int, ...]:
        """Tokens after the prompt."""
        return tuple(self.tokens[len(self.prompt_ids) :])

    @property
    def max_new_tokens(self) -> int:
        """Tokens to generate at most."""
        return self.params.max_new_tokens

    @property
    def max_positions(self) -> int:
        """Positions that may be computed: the last generated token never is."""
        return len(self.prompt_ids) + self.max_new_tokens - 1

    def append(self, sampled: int, eos_token_ids: Collection[int]) -> None:
        """Take the next token, forced or ``sampled``, and note whether the request is finished by it."""
        index = len(self.tokens) - len(self.prompt_ids)
        token = self.forced[index] if index < len(self.forced) else sampled
        self.tokens.append(token)
        if token in eos_token_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        elif index + 1 == self.max_new_tokens:
            self.finish_reason = "length"
