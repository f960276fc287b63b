"""Output: what one step gave a request, and how outputs add up to a Generation. Torch-free: a front end uses it too."""

from dataclasses import dataclass, field, replace
from typing import Any

from tapscope.engine.request import Generation
from tapscope.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token and of the most likely ones at its place."""

    token_id: int
    logprob: float
    """Natural logarithm."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most likely first."""
    full: tuple[float, ...] | None = None
    """Of every token of the vocabulary, where the request asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What is new of one request."""

    request: str
    """Request id."""
    token_ids: tuple[int, ...] = ()
    """New tokens, an end token included."""
    text: str = ""
    """New text; held back while a stop string or half a character may be under way. Engine leaves it to LLM."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of :attr:`token_ids`; None where not asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One for each prompt token, with the request's first output; None where not asked for. The first token's is None:
    nothing predicts it."""
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``; None while the request goes on."""
    matched: int | str | None = None
    """The token or stop string that ended it."""
    reason: str = ""
    """Why it was aborted, one sentence."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Leading prompt tokens that the prefix cache held."""

    def plain(self) -> dict[str, Any]:
        """Values for JSON, the inverse of :meth:`build`; what has its default is left out."""
        values: dict[str, Any] = {"request": self.request}
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                values[name] = [_plain_logprob(item) for item in value] if name in _LOGPROBS else value
        return values

    @classmethod
    def build(cls, values: dict[str, Any]) -> "Output":
        """From what :meth:`plain` gave."""
        values = dict(values)
        for name in _LOGPROBS & values.keys():
            values[name] = tuple(_build_logprob(item) for item in values[name])
        return cls(**values | {"token_ids": tuple(values.get("token_ids", ()))})

    def followed_by(self, later: "Output") -> "Output":
        """Both as one."""
        return replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            text=self.text + later.text,
            logprobs=None if later.logprobs is None else (self.logprobs or ()) + later.logprobs,
            prompt_logprobs=self.prompt_logprobs or later.prompt_logprobs,
        )


_LOGPROBS = {"logprobs", "prompt_logprobs"}
_DEFAULTS: dict[str, Any] = {
    "token_ids": (),
    "text": "",
    "logprobs": None,
    "prompt_logprobs": None,
    "finish_reason": None,
    "matched": None,
    "reason": "",
    "prompt_tokens": 0,
    "cached_tokens": 0,
}


def _plain_logprob(item: TokenLogprob | None) -> list[Any] | None:
    return None if item is None else [item.token_id, item.logprob, item.top, item.full]


def _build_logprob(item: list[Any] | None) -> TokenLogprob | None:
    if item is None:
        return None
    token_id, logprob, top, full = item
    pairs = tuple((int(other), float(value)) for other, value in top)
    return TokenLogprob(token_id=token_id, logprob=logprob, top=pairs, full=None if full is None else tuple(full))


@dataclass(slots=True, eq=False)
class Assembly:
    """One live request's outputs, with text put to them, and their sum."""

    request: str
    prompt_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    def add(self, output: Output) -> Output:
        """``output`` with its new text."""
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        if self.tokenizer is None:
            return output
        text = self.tokenizer.decode(self.token_ids)
        if output.finish_reason is None:
            text = text.rstrip("\ufffd")
        new, self.text = text[len(self.text) :], text
        return replace(output, text=new)

    def generation(self) -> Generation:
        """The sum of all outputs so far."""
        return Generation(
            request=self.request,
            prompt_ids=self.prompt_ids,
            token_ids=tuple(self.token_ids),
            text=None if self.tokenizer is None else self.text,
            finish_reason=self.finish_reason or "abort",
        )
