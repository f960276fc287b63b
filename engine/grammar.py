"""Grammars: outputs held to a JSON schema, a regular expression or a grammar, by llguidance.

llguidance knows which tokens may follow; here its masks become bits that the sampler applies, and its states follow
the tokens of requests. Rank 0 only.
"""

import functools
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tapscope.engine.ebnf import translate
from tapscope.engine.sampling_params import SamplingParams
from tapscope.engine.structural_tag import lark_of
from tapscope.errors import UsageError
from tapscope.text import short

if TYPE_CHECKING:
    import llguidance

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"  # bounded, so that a model cannot spend its tokens on it
_CACHED = 256  # compiled constraints kept


class Constraint:
    """One request's state in its grammar; a function of the tokens it was given."""

    def __init__(self, matcher: "llguidance.LLMatcher", mask_words: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros(mask_words, dtype=np.int32)
        self.error = ""
        """Why no token can follow; empty while one can."""

    @property
    def finished(self) -> bool:
        """Whether the output is complete and nothing may follow."""
        return not self.error and self._matcher.is_stopped()

    def mask(self) -> NDArray[np.int32]:
        """One bit for each token of the vocabulary, the lowest first: may it come next? None may after an error."""
        if not self.error:
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            if self._matcher.is_error() or not self._mask.any():
                self.error = _first_line(self._matcher.get_error()) or "no token of the vocabulary may follow"
        return self._mask

    def accept(self, token: int) -> None:
        """Go on by one token."""
        if not self.error and not self._matcher.consume_token(token):
            self.error = f"token {token} may not follow: {_first_line(self._matcher.get_error())}"


class Grammars:
    """Compiles constraints for one tokenizer; what was compiled is kept for requests to come."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``vocab_size``: columns of the logits, which may be more than the tokenizer has tokens."""
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._special: dict[str, int] = {}
        self._marks: dict[str, int] = {}
        self._compiled = functools.lru_cache(_CACHED)(self._compile)

    def start(self, params: SamplingParams) -> Constraint | None:
        """The beginning of what ``params`` ask for; raises UsageError when nothing can satisfy it."""
        if params.constraint is None:
            return None
        return Constraint(self._compiled(*params.constraint).deep_copy(), self._mask_words)

    @property
    def _mask_words(self) -> int:
        return -(-self._tokenizer.vocab_size // 32)

    @functools.cached_property
    def _tokenizer(self) -> "llguidance.LLTokenizer":
        """Made when it is first needed: a large vocabulary takes a second."""
        if not self._path.exists():
            raise UsageError(f"{self._path.parent} has no tokenizer.json; a constrained output needs one")
        library = _llguidance()
        text = self._path.read_text(encoding="utf-8")
        added = json.loads(text).get("added_tokens", ())
        known = [token["id"] + 1 for token in added] + [self._vocab_size]
        try:
            size = max(library.LLTokenizer(text, eos_token=self._eos or None).vocab_size, *known)
            made: llguidance.LLTokenizer = library.LLTokenizer(text, n_vocab=size, eos_token=self._eos or None)
        except ValueError as error:
            raise UsageError(f"{self._path}: llguidance cannot use this tokenizer: {error}") from None
        for token in added:  # what looks like a tag is no text to llguidance, whatever the tokenizer says
            if made.is_special_token(token["id"]):
                kind = self._special if token.get("special") else self._marks
                kind[token["content"]] = token["id"]
        return made

    def _compile(self, kind: str, text: str) -> "llguidance.LLMatcher":
        try:
            tokenizer = self._tokenizer
            matcher: llguidance.LLMatcher = _llguidance().LLMatcher(tokenizer, self._grammar(kind, text), log_level=0)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{kind}={short(text)}: {error}") from None
        if matcher.is_error():
            raise UsageError(f"{kind}={short(text)}: {_first_line(matcher.get_error())}")
        probe = Constraint(matcher.deep_copy(), self._mask_words)
        probe.mask()
        if probe.error:
            raise UsageError(f"{kind}={short(text)}: no text of this model's tokens satisfies it")
        return matcher

    def _grammar(self, kind: str, text: str) -> str:
        """In llguidance's own form."""
        if kind == "structural_tag":
            text = lark_of(json.loads(text), self._special, self._marks, _WHITESPACE)
            return str(_llguidance().LLMatcher.grammar_from_lark(text))
        return _grammar(kind, text)


def _llguidance() -> Any:
    """The library, loaded when a request first needs it: an engine without constraints runs without it."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise UsageError("a constrained output needs llguidance; pip install llguidance") from None


def _grammar(kind: str, text: str) -> str:
    """In llguidance's own form."""
    matcher = _llguidance().LLMatcher
    if kind == "ebnf":
        form = translate(text)
        kind, text = ("grammar" if form.kind == "lark" else form.kind), form.text
    if kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if kind == "grammar":
        return str(matcher.grammar_from_lark(text))
    schema = json.loads(text)
    if schema is not True and not isinstance(schema, dict):
        raise ValueError("a schema that anything satisfies is a JSON object or true")
    schema = {} if schema is True else schema
    return str(matcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE}))


def _first_line(text: str) -> str:
    """The first line; of a regular expression's error, drawn over several lines, also the one that gives the reason."""
    first, *rest = text.strip().split("\n")
    return " ".join([first, *(line.removeprefix("error: ") for line in rest if line.startswith("error: "))])
