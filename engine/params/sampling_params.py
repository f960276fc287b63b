"""SamplingParams: how one request's next tokens are chosen, when it ends, and what is told about them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from tapscope.core.convert import Count, NonEmptyStr, NonNegative, Positive, convert_fields
from tapscope.core.deprecation import deprecated_fields, renamed
from tapscope.core.errors import UsageError
from tapscope.core.formatting import short
from tapscope.engine.params.stop_regex import check_stop_regexes

_COLDEST = 1e-5  # below it logits would overflow; it makes no difference
_SEED_BITS = 64
_STRINGS = Meta(extra={"must be": "a string or a list of strings"})
TopP = Annotated[float, Meta(gt=0, le=1)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LogitBias = Annotated[
    Mapping[Count, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(extra={"must be": "a mapping of token ids to numbers from -100 to 100"}),
]


DEPRECATED_NAMES = {"include_stop": "include_stop_str_in_output"}
"""Former names of parameters, accepted for one release."""


@deprecated_fields(DEPRECATED_NAMES)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling, stopping and logprobs of one request; greedy unless ``temperature`` is above 0.

    Raises UsageError naming field, value and rule. What depends on a model (token ids, whether a schema compiles) is
    checked at submit. Lists are taken for tuples, one text for one stop string, a mapping for its JSON schema.
    """

    max_new_tokens: Count = 16
    """Tokens to generate at most, an end token included; with 0 the prompt is computed, for what is told of it."""
    min_new_tokens: Count = 0
    """End tokens and stop tokens cannot be drawn, and stop strings do not stop, before so many tokens."""
    temperature: NonNegative = 0.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: Annotated[int, Meta(ge=-1)] = 0
    """Draw among the k most likely tokens; 0 (or -1) among all."""
    top_p: TopP = 1.0
    """Draw among the fewest tokens whose probabilities reach it, arXiv:1904.09751; the crossing token is kept."""
    min_p: Fraction = 0.0
    """Draw among tokens at least so likely as a share of the most likely one, arXiv:2407.01082."""
    repetition_penalty: Positive = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output, arXiv:1909.05858."""
    presence_penalty: Penalty = 0.0
    """Taken off the logit of every token in the output, OpenAI's."""
    frequency_penalty: Penalty = 0.0
    """Taken off a token's logit as often as the output has it, OpenAI's."""
    logit_bias: LogitBias = field(default_factory=dict)
    """Added to the logits of these token ids."""
    seed: Seed | None = None
    """The same seed draws the same tokens, whatever else runs; None takes the next of the engine's own."""
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    """Generations of the prompt, each with draws of its own."""
    stop: Annotated[tuple[NonEmptyStr, ...], _STRINGS] = ()
    """Texts that end the generation once they appear in its text."""
    stop_regex: Annotated[tuple[str, ...], _STRINGS] = ()
    """Regular expressions (RE2's) that end the generation once they match something in its text."""
    stop_token_ids: tuple[Count, ...] = ()
    """Tokens that end the generation, beside the model's end tokens; ``ignore_eos`` does not concern them."""
    ignore_eos: bool = False
    """Go on after the model's end tokens."""
    include_stop_str_in_output: bool = False
    """Keep the matched stop string at the end of the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: Count | None = None
    """Give log-probabilities of the sampled tokens, and of so many most likely ones beside each."""
    prompt_logprobs: Count | None = None
    """The same for every token of the prompt but the first, which nothing predicts."""
    token_ids_logprob: tuple[Count, ...] = ()
    """Tokens whose log-probabilities are given wherever ``logprobs`` and ``prompt_logprobs`` give some."""
    full_logprobs: bool = False
    """Give the log-probabilities of the whole vocabulary at every generated token."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """``raw``: of the model's own logits; ``processed``: after penalties, masks, temperature and filters."""
    routed_experts: bool = False
    """Give the experts that every position went to, in a mixture of experts; the prefix cache is then not used."""
    hidden_states: bool = False
    """Give the final hidden state, behind the norm, of every computed position; the prefix cache is then not used."""
    json_schema: NonEmptyStr | None = None
    """The text is JSON that this JSON schema accepts."""
    regex: NonEmptyStr | None = None
    """The whole text matches this regular expression."""
    grammar: NonEmptyStr | None = None
    """The whole text is of this grammar, in llguidance's Lark form."""
    ebnf: NonEmptyStr | None = None
    """The whole text is of this grammar, in the EBNF of llama.cpp (GBNF) and XGrammar; its rule is ``root``."""
    structural_tag: NonEmptyStr | None = None
    """The text is free but for tags in it, as XGrammar's structural tag (JSON) describes them."""

    def __post_init__(self) -> None:
        self._coerce()
        convert_fields(self, UsageError)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.min_new_tokens > self.max_new_tokens:
            rule = f"must be at most max_new_tokens={self.max_new_tokens}"
            raise UsageError(f"min_new_tokens={self.min_new_tokens}: {rule}")
        if self.token_ids_logprob and not self.wants_logprobs and self.prompt_logprobs is None:
            rule = "needs logprobs, prompt_logprobs or full_logprobs, whose positions it adds to"
            raise UsageError(f"token_ids_logprob={short(self.token_ids_logprob)}: {rule}")
        if self.stop_regex:
            check_stop_regexes(self.stop_regex)
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} are given; an output can be constrained by only one of them")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < _COLDEST

    @property
    def has_penalty(self) -> bool:
        """Whether tokens pay for having come before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the most likely token of the model's own logits is taken."""
        changed = self.has_penalty or self.logit_bias or self.min_new_tokens or self.constraint
        return self.is_greedy and not changed

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of generated tokens are told."""
        return self.logprobs is not None or self.full_logprobs

    @property
    def needs_every_row(self) -> bool:
        """Whether every prompt row has to be computed, so that none may come from the prefix cache."""
        return self.prompt_logprobs is not None or self.routed_experts or self.hidden_states

    @property
    def needs_last_token(self) -> bool:
        """Whether what is drawn, or told of it, depends on the tokens before in more than the model's logits."""
        is_held = self.has_penalty or self.min_new_tokens or self.constraint
        return bool(is_held or self.wants_logprobs or self.needs_every_row)

    @property
    def stops_on_text(self) -> bool:
        """Whether something in the text ends it: then a tokenizer is needed."""
        return bool(self.stop or self.stop_regex)

    @property
    def constraint(self) -> tuple[str, str] | None:
        """(kind, text) of the constraint on the output: one of :data:`CONSTRAINTS`."""
        given = ((name, getattr(self, name)) for name in CONSTRAINTS)
        return next(((name, text) for name, text in given if text is not None), None)

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """From plain values, as :meth:`plain` or a JSON body has them; raises UsageError for an unknown name."""
        values = renamed(values, DEPRECATED_NAMES)
        known = [item.name for item in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise UsageError(f"unknown sampling parameter {unknown[0]!r}; valid parameters: {', '.join(known)}")
        return cls(**values)

    def plain(self) -> dict[str, Any]:
        """Values for JSON, the inverse of :meth:`build`."""
        return asdict(self) | {"logit_bias": {str(token): bias for token, bias in self.logit_bias.items()}}

    def child(self, index: int) -> "SamplingParams":
        """Of the ``index``-th of ``n`` generations; a seed given is the first's, the others' follow from it."""
        seed = self.seed if self.seed is None or index == 0 else derive_seed(self.seed, index)
        return replace(self, n=1, seed=seed)

    def _coerce(self) -> None:
        """Accept one string for a list of them, JSON's string keys for token ids, and JSON objects for their text."""
        for name in ("stop", "stop_regex"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, (value,))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", {_token_id(key): bias for key, bias in self.logit_bias.items()})
        for name, kinds in (("json_schema", Mapping | bool), ("structural_tag", Mapping)):
            if isinstance(value := getattr(self, name), kinds):
                object.__setattr__(self, name, json.dumps(value))


def derive_seed(seed: int, index: int) -> int:
    """Another seed for the ``index``-th of something: splitmix64's finaliser over both (Steele et al., 2014)."""
    mask = (1 << _SEED_BITS) - 1
    mixed = (seed + index * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) & (mask >> 1)


CONSTRAINTS = ("json_schema", "regex", "grammar", "ebnf", "structural_tag")


def _token_id(key: Any) -> Any:
    """JSON has string keys; "17" is token 17."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
