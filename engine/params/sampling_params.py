"""SamplingParams: sampling, stop conditions, constraints and requested outputs of one request."""

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from tapscope.core.convert import Count, NonEmptyStr, NonNegative, Positive, convert_fields, must_be
from tapscope.core.deprecation import deprecated_fields, renamed
from tapscope.core.errors import UsageError
from tapscope.core.formatting import did_you_mean, short
from tapscope.engine.params.stop_regex import check_stop_regexes

_MIN_TEMPERATURE = 1e-5  # sampling is greedy below, because the logits would overflow
_SEED_BITS = 64
_STRINGS = must_be("a string or a list of strings")
TopP = Annotated[float, Meta(gt=0, le=1)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LogitBias = Annotated[
    Mapping[Count, Annotated[float, Meta(ge=-100, le=100)]],
    must_be("a mapping of token ids to numbers from -100 to 100"),
]


DEPRECATED_NAMES = {"include_stop": "include_stop_str_in_output"}
"""Former names of parameters, accepted for one release."""
_SYNONYMS = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_SYNONYMS |= {"top_logprobs": "logprobs", "bad_words": "bad_words_ids", "best_of": "n", "json_object": "json_schema"}
_SYNONYMS |= {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "grammar"}
"""Parameter name in other engines -> name here, for suggestions."""


def _known_parameters_only(cls: "type[SamplingParams]") -> "type[SamplingParams]":
    """Class decorator: raise UsageError for an unknown parameter, where Python would raise TypeError."""
    initialize, known = cls.__init__, [item.name for item in fields(cls)]

    @functools.wraps(initialize)
    def check(self: "SamplingParams", **values: Any) -> None:
        for name in values:
            if name not in cls.__dataclass_fields__:
                hint = did_you_mean(name, known, _SYNONYMS)
                raise UsageError(f"unknown sampling parameter {name!r}{hint}; valid parameters: {', '.join(known)}")
        initialize(self, **values)

    cls.__init__ = check  # type: ignore[method-assign]
    return cls


@deprecated_fields(DEPRECATED_NAMES)
@_known_parameters_only
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling, stop conditions and requested outputs of one request; greedy unless ``temperature`` is above 0.

    ::

        SamplingParams(max_new_tokens=64, temperature=0.8, top_p=0.95, seed=7, stop="END", logprobs=5)

    Raises UsageError naming the field, the value and the violated rule, or an unknown parameter. Rules that depend on a
    model (token ids, whether a schema compiles) are checked at submit. Accepts lists for tuples, a string for a single
    stop string, and a mapping for a JSON schema.
    """

    max_new_tokens: Count = 16
    """Maximum number of generated tokens, including the end token; 0 computes the prompt only."""
    min_new_tokens: Count = 0
    """Tokens before which end and stop tokens are masked and stop strings are ignored."""
    temperature: NonNegative = 0.0
    """Divisor of the logits; 0 is greedy decoding."""
    top_k: Annotated[int, Meta(ge=-1)] = 0
    """Sample from the k most likely tokens; 0 or -1: from all."""
    top_p: TopP = 1.0
    """Sample from the smallest set of tokens whose probabilities sum to at least ``top_p``, arXiv:1904.09751."""
    min_p: Fraction = 0.0
    """Minimum probability of a token relative to the most likely one, arXiv:2407.01082."""
    repetition_penalty: Positive = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output, arXiv:1909.05858."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of every token that the output contains, as in OpenAI's API."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit once per occurrence in the output, as in OpenAI's API."""
    logit_bias: LogitBias = field(default_factory=dict)
    """Added to the logits of these token ids."""
    allowed_token_ids: Annotated[tuple[Count, ...], Meta(min_length=1)] | None = None
    """Sample only these tokens; end tokens are allowed only if listed. None: all tokens."""
    bad_words_ids: tuple[Annotated[tuple[Count, ...], Meta(min_length=1)], ...] = ()
    """Token sequences that must not occur in the output, as in transformers."""
    seed: Seed | None = None
    """Seed of this request; the same seed samples the same tokens in any batch. None: derived from the engine's."""
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    """Number of independent generations of the prompt."""
    stop: Annotated[tuple[NonEmptyStr, ...], _STRINGS] = ()
    """Strings that end the generation when they occur in its text."""
    stop_regex: Annotated[tuple[str, ...], _STRINGS] = ()
    """Regular expressions (RE2 syntax) that end the generation when they match in its text."""
    stop_token_ids: tuple[Count, ...] = ()
    """Tokens that end the generation, in addition to the model's end tokens; not affected by ``ignore_eos``."""
    ignore_eos: bool = False
    """Continue after the model's end tokens."""
    include_stop_str_in_output: bool = False
    """Keep the matched stop string at the end of the text."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text."""
    logprobs: Count | None = None
    """Return the log-probability of each sampled token and of this many most likely tokens; None: no
    log-probabilities.
    """
    prompt_logprobs: Count | None = None
    """Like ``logprobs``, for every prompt token except the first."""
    token_ids_logprob: tuple[Count, ...] = ()
    """Token ids whose log-probabilities are returned at every position with log-probabilities."""
    full_logprobs: bool = False
    """Return the log-probabilities of the whole vocabulary for every generated token."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Log-probabilities of the model's logits (``raw``), or after penalties, masks, temperature and filters
    (``processed``).
    """
    routed_experts: bool = False
    """Return the expert ids of every position of a mixture-of-experts model; disables the prefix cache for the
    request.
    """
    hidden_states: bool = False
    """Return the last hidden state, after the final norm, of every position; disables the prefix cache for the
    request.
    """
    json_schema: NonEmptyStr | None = None
    """JSON schema that constrains the output."""
    regex: NonEmptyStr | None = None
    """Regular expression that the whole output matches."""
    grammar: NonEmptyStr | None = None
    """Grammar of the whole output, in llguidance's Lark syntax."""
    ebnf: NonEmptyStr | None = None
    """Grammar of the whole output, in the EBNF of llama.cpp (GBNF) and XGrammar; the start rule is ``root``."""
    structural_tag: NonEmptyStr | None = None
    """XGrammar structural tag (JSON): free text with constrained tags in it."""

    def __post_init__(self) -> None:
        self._coerce()
        convert_fields(self, UsageError)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.min_new_tokens > self.max_new_tokens:
            rule = f"must be at most max_new_tokens={self.max_new_tokens}"
            raise UsageError(f"min_new_tokens={self.min_new_tokens}: {rule}")
        if self.token_ids_logprob and not self.wants_logprobs and self.prompt_logprobs is None:
            rule = "needs logprobs, prompt_logprobs or full_logprobs"
            raise UsageError(f"token_ids_logprob={short(self.token_ids_logprob)}: {rule}")
        if self.stop_regex:
            check_stop_regexes(self.stop_regex)
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} are given; an output can be constrained by only one of them")
        self._check_masks(given)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is selected instead of sampling."""
        return self.temperature < _MIN_TEMPERATURE

    @property
    def has_penalty(self) -> bool:
        """Whether a repetition, presence or frequency penalty applies."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def changes_logits(self) -> bool:
        """Whether a bias, a penalty or a mask other than a grammar's may apply to the logits."""
        changed = self.has_penalty or self.logit_bias or self.min_new_tokens or self.bad_words_ids
        return bool(changed) or self.allowed_token_ids is not None

    @property
    def is_plain(self) -> bool:
        """Whether the sampled token is the argmax of the unmodified logits."""
        return self.is_greedy and not self.changes_logits and self.constraint is None

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of generated tokens are returned."""
        return self.logprobs is not None or self.full_logprobs

    @property
    def needs_every_row(self) -> bool:
        """Whether every prompt row must be computed, which rules out the prefix cache."""
        return self.prompt_logprobs is not None or self.routed_experts or self.hidden_states

    @property
    def needs_last_token(self) -> bool:
        """Whether sampling or outputs need the previous token on the host, not just as the model's input."""
        depends_on_output = self.has_penalty or self.min_new_tokens or self.constraint or self.bad_words_ids
        return bool(depends_on_output or self.wants_logprobs or self.needs_every_row)

    @property
    def stops_on_text(self) -> bool:
        """Whether a stop condition applies to text, which requires a tokenizer."""
        return bool(self.stop or self.stop_regex)

    @property
    def constraint(self) -> tuple[str, str] | None:
        """(name, value) of the output constraint, one of :data:`CONSTRAINTS`; None if unconstrained."""
        given = ((name, getattr(self, name)) for name in CONSTRAINTS)
        return next(((name, value) for name, value in given if value is not None), None)

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from JSON values as returned by :meth:`plain`. Raises UsageError for an unknown name."""
        return cls(**renamed(values, DEPRECATED_NAMES))

    def plain(self) -> dict[str, Any]:
        """Return JSON values; inverse of :meth:`build`."""
        return asdict(self) | {"logit_bias": {str(token): bias for token, bias in self.logit_bias.items()}}

    def child(self, index: int) -> "SamplingParams":
        """Return the parameters of generation ``index`` of ``n``. Only the first one keeps a given seed."""
        seed = self.seed if self.seed is None or index == 0 else derive_seed(self.seed, index)
        return replace(self, n=1, seed=seed)

    def _check_masks(self, constraints: list[str]) -> None:
        """Raise UsageError if both a mask and one of ``constraints`` are given."""
        masks = {"allowed_token_ids": self.allowed_token_ids is not None, "bad_words_ids": bool(self.bad_words_ids)}
        given = [name for name, is_given in masks.items() if is_given]
        if given and constraints:
            raise UsageError(f"{given[0]} and {constraints[0]} are given; together they could allow no token: use one")

    def _coerce(self) -> None:
        """Convert a string to a tuple of strings, string keys to token ids, and JSON objects to encoded JSON."""
        for name in ("stop", "stop_regex"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, (value,))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", {_token_id(key): bias for key, bias in self.logit_bias.items()})
        for name, kinds in (("json_schema", Mapping | bool), ("structural_tag", Mapping)):
            if isinstance(value := getattr(self, name), kinds):
                object.__setattr__(self, name, json.dumps(value))


def derive_seed(seed: int, index: int) -> int:
    """Derive the seed of child ``index``: the finalizer of splitmix64 over both arguments (Steele et al., 2014)."""
    mask = (1 << _SEED_BITS) - 1
    mixed = (seed + index * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) & (mask >> 1)


CONSTRAINTS = ("json_schema", "regex", "grammar", "ebnf", "structural_tag")


def constraint_label(kind: str, text: str) -> str:
    """Return the start of an error message about the constraint ``kind``, one of :data:`CONSTRAINTS`."""
    return f"{kind}={short(text)}: "


def _token_id(key: Any) -> Any:
    """Convert a decimal string, a key of a JSON object, to a token id; return other values unchanged."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
