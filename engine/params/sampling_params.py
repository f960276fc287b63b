"""SamplingParams: how one request's next tokens are chosen, when it ends, and what is told about them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

from tapscope.core.errors import UsageError
from tapscope.engine.params.stop_regex_nfa import compiled
from tapscope.engine.params.validators import is_number, require

_MAX_N = 128
_MAX_EXPRESSIONS = 16
_COLDEST = 1e-5  # below it logits would overflow; it makes no difference
_SEED_BITS = 64
_require = partial(require, UsageError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling, stopping and logprobs of one request; greedy unless ``temperature`` is above 0.

    Raises UsageError naming field, value and rule. What depends on a model (token ids, whether a schema compiles) is
    checked at submit. Lists are taken for tuples, one text for one stop string, a mapping for its JSON schema.
    """

    max_new_tokens: int = 16
    """Tokens to generate at most, an end token included; with 0 the prompt is computed, for what is told of it."""
    min_new_tokens: int = 0
    """End tokens and stop tokens cannot be drawn, and stop strings do not stop, before so many tokens."""
    temperature: float = 0.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: int = 0
    """Draw among the k most likely tokens; 0 (or -1) among all."""
    top_p: float = 1.0
    """Draw among the fewest tokens whose probabilities reach it, arXiv:1904.09751; the crossing token is kept."""
    min_p: float = 0.0
    """Draw among tokens at least so likely as a share of the most likely one, arXiv:2407.01082."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output, arXiv:1909.05858."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token in the output, OpenAI's."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit as often as the output has it, OpenAI's."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    seed: int | None = None
    """The same seed draws the same tokens, whatever else runs; None takes the next of the engine's own."""
    n: int = 1
    """Generations of the prompt, each with draws of its own."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation once they appear in its text."""
    stop_regex: tuple[str, ...] = ()
    """Regular expressions (Python's) that end the generation once they match something in its text."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the generation, beside the model's end tokens; ``ignore_eos`` does not concern them."""
    ignore_eos: bool = False
    """Go on after the model's end tokens."""
    include_stop: bool = False
    """Keep the matched stop string at the end of the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Give log-probabilities of the sampled tokens, and of so many most likely ones beside each."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but the first, which nothing predicts."""
    token_ids_logprob: tuple[int, ...] = ()
    """Tokens whose log-probabilities are given wherever ``logprobs`` and ``prompt_logprobs`` give some."""
    full_logprobs: bool = False
    """Give the log-probabilities of the whole vocabulary at every generated token."""
    logprobs_mode: str = "raw"
    """``raw``: of the model's own logits; ``processed``: after penalties, masks, temperature and filters."""
    routed_experts: bool = False
    """Give the experts that every position went to, in a mixture of experts; the prefix cache is then not used."""
    hidden_states: bool = False
    """Give the final hidden state, behind the norm, of every computed position; the prefix cache is then not used."""
    json_schema: str | None = None
    """The text is JSON that this JSON schema accepts."""
    regex: str | None = None
    """The whole text matches this regular expression."""
    grammar: str | None = None
    """The whole text is of this grammar, in llguidance's Lark form."""
    ebnf: str | None = None
    """The whole text is of this grammar, in the EBNF of llama.cpp (GBNF) and XGrammar; its rule is ``root``."""
    structural_tag: str | None = None
    """The text is free but for tags in it, as XGrammar's structural tag (JSON) describes them."""

    def __post_init__(self) -> None:
        self._coerce()
        for name, low, high in _WHOLE:
            self._check_whole(name, low, high)
        for name, least, most, rule in _NUMBERS:
            value = getattr(self, name)
            _require(is_number(value) and least <= value <= most, name, value, f"it must be a number {rule}")
        _require(self.top_p > 0, "top_p", self.top_p, "it must be a number above 0, at most 1")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "it must be above 0")
        rule = f"it must be at most max_new_tokens, {self.max_new_tokens}"
        _require(self.min_new_tokens <= self.max_new_tokens, "min_new_tokens", self.min_new_tokens, rule)
        for name in _FLAGS:
            _require(type(getattr(self, name)) is bool, name, getattr(self, name), "it must be true or false")
        modes = ("raw", "processed")
        _require(self.logprobs_mode in modes, "logprobs_mode", self.logprobs_mode, f"it must be {' or '.join(modes)}")
        self._check_bias()
        self._check_stops()
        self._check_constraint()

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
        known = [item.name for item in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise UsageError(f"there is no sampling parameter {unknown[0]!r}; there are {', '.join(known)}")
        return cls(**values)

    def plain(self) -> dict[str, Any]:
        """Values for JSON, the inverse of :meth:`build`."""
        return asdict(self) | {"logit_bias": {str(token): bias for token, bias in self.logit_bias.items()}}

    def child(self, index: int) -> "SamplingParams":
        """Of the ``index``-th of ``n`` generations; a seed given is the first's, the others' follow from it."""
        seed = self.seed if self.seed is None or index == 0 else derive_seed(self.seed, index)
        return replace(self, n=1, seed=seed)

    def _coerce(self) -> None:
        """Put lists, whole numbers, JSON's text keys and schema objects into the types of the fields."""
        for name in ("stop", "stop_regex", "stop_token_ids", "token_ids_logprob"):
            value = getattr(self, name)
            rule = "it must be a list of token ids" if "token" in name else "it must be a text or a list of texts"
            _require(isinstance(value, str | Sequence), name, value, rule)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if type(value) is int and is_number(value):
                object.__setattr__(self, name, float(value))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _require(
            isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "it must map token ids to numbers"
        )
        object.__setattr__(self, "logit_bias", {_token_key(key): bias for key, bias in self.logit_bias.items()})
        for name, kinds in (("json_schema", Mapping | bool), ("structural_tag", Mapping)):
            value = getattr(self, name)
            if isinstance(value, kinds):
                object.__setattr__(self, name, json.dumps(value))

    def _check_whole(self, name: str, low: int | None, high: int | None) -> None:
        value = getattr(self, name)
        if value is None and name in ("seed", "logprobs", "prompt_logprobs"):
            return
        rule = "above 0" if low == 1 else "from 0" if low == 0 else f"from {low}"
        rule = rule if high is None else f"{rule} to {high}" if low != 1 else f"from 1 to {high}"
        holds = type(value) is int and (low is None or value >= low) and (high is None or value <= high)
        _require(holds, name, value, f"it must be a whole number {rule}")

    def _check_bias(self) -> None:
        for token, bias in self.logit_bias.items():
            _require(type(token) is int and token >= 0, "logit_bias", token, "its keys must be token ids")
            rule = f"the bias of token {token} must be a number from -100 to 100"
            _require(is_number(bias) and -100 <= bias <= 100, "logit_bias", bias, rule)

    def _check_stops(self) -> None:
        for text in self.stop:
            _require(isinstance(text, str) and text != "", "stop", text, "each must be a text that is not empty")
        for name in ("stop_token_ids", "token_ids_logprob"):
            for token in getattr(self, name):
                _require(type(token) is int and token >= 0, name, token, "each must be a token id")
        rule = "they are told beside logprobs, prompt_logprobs or full_logprobs; ask for one of these too"
        told = self.wants_logprobs or self.prompt_logprobs is not None
        _require(told or not self.token_ids_logprob, "token_ids_logprob", self.token_ids_logprob, rule)
        _require(len(self.stop_regex) <= _MAX_EXPRESSIONS, "stop_regex", self.stop_regex, f"at most {_MAX_EXPRESSIONS}")
        for text in self.stop_regex:
            _require(isinstance(text, str), "stop_regex", text, "each must be a text, a regular expression")
            compiled(text)

    def _check_constraint(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        for name in given:
            text = getattr(self, name)
            _require(isinstance(text, str) and text != "", name, text, "it must be a text that is not empty")
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} are given; an output can be held to only one of them")


def derive_seed(seed: int, index: int) -> int:
    """Another seed for the ``index``-th of something: splitmix64's finaliser over both (Steele et al., 2014)."""
    mask = (1 << _SEED_BITS) - 1
    mixed = (seed + index * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) & (mask >> 1)


_WHOLE: tuple[tuple[str, int | None, int | None], ...] = (
    ("max_new_tokens", 0, None),
    ("min_new_tokens", 0, None),
    ("top_k", 0, None),
    ("n", 1, _MAX_N),
    ("seed", -(1 << (_SEED_BITS - 1)), (1 << (_SEED_BITS - 1)) - 1),
    ("logprobs", 0, None),
    ("prompt_logprobs", 0, None),
)
_NUMBERS = (
    ("temperature", 0.0, float("inf"), "from 0"),
    ("top_p", 0.0, 1.0, "above 0, at most 1"),
    ("min_p", 0.0, 1.0, "from 0 to 1"),
    ("repetition_penalty", 0.0, float("inf"), "above 0"),
    ("presence_penalty", -2.0, 2.0, "from -2 to 2"),
    ("frequency_penalty", -2.0, 2.0, "from -2 to 2"),
)
_FLAGS = ("ignore_eos", "include_stop", "skip_special_tokens", "full_logprobs", "routed_experts", "hidden_states")
CONSTRAINTS = ("json_schema", "regex", "grammar", "ebnf", "structural_tag")


def _token_key(key: Any) -> Any:
    """JSON has text keys; "17" is token 17."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
