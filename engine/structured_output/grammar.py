"""Grammars: constrained decoding with JSON schemas, regular expressions and grammars, by llguidance.

For each request, a matcher consumes the generated tokens and computes a bit mask of the allowed next tokens, which the
sampler applies. Rank 0 only.
"""

import functools
import importlib
import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tapscope.core.errors import UsageError
from tapscope.engine.params.sampling_params import SamplingParams, constraint_label
from tapscope.engine.structured_output.grammar_trial import GrammarCompilerProcess, first_line

if TYPE_CHECKING:
    import llguidance

_CACHED = 256  # number of cached compilation results, including errors
_THREADS = 4  # number of grammars compiled in parallel


class Constraint:
    """The state of one request's grammar after the request's tokens so far."""

    def __init__(self, matcher: "llguidance.LLMatcher", mask_words: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros(mask_words, dtype=np.int32)
        self._matcher_ahead: llguidance.LLMatcher | None = None
        """Matcher state after the drafts ``_ahead``, from the last call of :meth:`mask_after`."""
        self._ahead: list[int] = []
        self.error = ""
        """Reason why the grammar allows no token; empty: no error."""

    @property
    def finished(self) -> bool:
        """Whether the output is complete, so that no token may follow."""
        return not self.error and self._matcher.is_stopped()

    def mask(self) -> NDArray[np.int32]:
        """Compute the bit mask of the allowed next tokens, least significant bit first; all zero after an error."""
        if not self.error:
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            if self._matcher.is_error() or not self._mask.any():
                self.error = first_line(self._matcher.get_error()) or "no token of the vocabulary may follow"
        return self._mask

    def mask_after(self, drafts: Sequence[int]) -> NDArray[np.int32] | None:
        """Compute :meth:`mask` as if ``drafts`` had been accepted, without changing the state.

        None if the grammar does not allow ``drafts``, or allows no token after them.
        """
        if not drafts:
            return self.mask()
        if self.error:
            return None
        known = len(self._ahead)
        if list(drafts[:known]) != self._ahead or self._matcher_ahead is None:
            self._matcher_ahead, self._ahead, known = self._matcher.deep_copy(), [], 0
        matcher = self._matcher_ahead
        for token in drafts[known:]:
            if matcher.is_stopped() or not matcher.consume_token(token):
                self._matcher_ahead = None
                return None
            self._ahead.append(token)
        if matcher.is_stopped():
            return None
        mask = np.zeros_like(self._mask)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return None if matcher.is_error() or not mask.any() else mask

    def num_valid(self, drafts: Sequence[int]) -> int:
        """Return the length of the longest prefix of ``drafts`` that the grammar allows."""
        return 0 if self.error else self._matcher.validate_tokens(list(drafts))

    def accept(self, token: int) -> None:
        """Advance the state by one token; sets :attr:`error` if the grammar does not allow it."""
        self._matcher_ahead = None
        if not self.error and not self._matcher.consume_token(token):
            self.error = f"token {token} cannot follow: {first_line(self._matcher.get_error())}"


class Grammars:
    """Compiler and cache of constraints for one tokenizer; grammars are compiled in threads."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``tokenizer`` is the path of tokenizer.json.

        ``vocab_size`` is the number of columns of the logits, which may exceed the tokenizer's vocabulary.
        """
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._special: dict[str, int] = {}
        self._marks: dict[str, int] = {}
        self._tokenizer_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "grammar")
        self._trials: list[GrammarCompilerProcess] = []
        self._compiling: set[Future[llguidance.LLMatcher]] = set()
        self._thread_local = threading.local()
        self._future = functools.lru_cache(_CACHED)(self._begin)

    @property
    def num_compiling(self) -> int:
        """Number of grammars being compiled."""
        return len(self._compiling)

    def prepare(self, params: SamplingParams) -> "Future[llguidance.LLMatcher] | None":
        """Start compiling; return a future after which :meth:`start` does not block, or None if compilation is done."""
        if params.constraint is None or (future := self._future(*params.constraint)).done():
            return None
        return future

    def start(self, params: SamplingParams) -> Constraint | None:
        """Return the initial state of the constraint in ``params``; None without a constraint.

        Blocks until the constraint is compiled. Raises UsageError if the constraint is invalid, unsatisfiable or too
        expensive to compile.
        """
        if params.constraint is None:
            return None
        return Constraint(self._future(*params.constraint).result().deep_copy(), self._mask_words)

    def close(self) -> None:
        """Stop the compiler threads and their subprocesses."""
        self._threads.shutdown(cancel_futures=True)
        for trial in self._trials:
            trial.close()

    def _begin(self, kind: str, text: str) -> "Future[llguidance.LLMatcher]":
        future = self._threads.submit(self._compile, kind, text)
        self._compiling.add(future)
        future.add_done_callback(self._compiling.discard)
        return future

    @property
    def _mask_words(self) -> int:
        return -(-self._tokenizer.vocab_size // 32)

    @property
    def _tokenizer(self) -> "llguidance.LLTokenizer":
        with self._tokenizer_lock:
            return self._created_tokenizer

    @functools.cached_property
    def _created_tokenizer(self) -> "llguidance.LLTokenizer":
        """The tokenizer, created on first use, as a large vocabulary takes a second."""
        if not self._path.exists():
            raise UsageError(f"{self._path.parent} has no tokenizer.json; a constrained output needs one")
        library = _llguidance()
        text = self._path.read_text(encoding="utf-8")
        added = json.loads(text).get("added_tokens", ())
        known = [token["id"] + 1 for token in added] + [self._vocab_size]
        try:
            size = max(library.LLTokenizer(text, eos_token=self._eos or None).vocab_size, *known)
            tokenizer: llguidance.LLTokenizer = library.LLTokenizer(text, n_vocab=size, eos_token=self._eos or None)
        except ValueError as error:
            raise UsageError(f"{self._path}: llguidance cannot use this tokenizer: {error}") from None
        for token in added:  # llguidance treats any token that looks like a tag as special
            if tokenizer.is_special_token(token["id"]):
                kind = self._special if token.get("special") else self._marks
                kind[token["content"]] = token["id"]
        return tokenizer

    def _compile(self, kind: str, text: str) -> "llguidance.LLMatcher":
        try:
            tokenizer = self._tokenizer
            form = self._trial.form_of(kind, text, self._special, self._marks)
            matcher: llguidance.LLMatcher = _llguidance().LLMatcher(tokenizer, form, log_level=0)
        except (ValueError, UsageError) as error:
            raise UsageError(f"{constraint_label(kind, text)}{error}") from None
        if matcher.is_error():
            raise UsageError(f"{constraint_label(kind, text)}{first_line(matcher.get_error())}")
        probe = Constraint(matcher.deep_copy(), self._mask_words)
        probe.mask()
        if probe.error:
            raise UsageError(f"{constraint_label(kind, text)}no sequence of this model's tokens satisfies it")
        return matcher

    @property
    def _trial(self) -> GrammarCompilerProcess:
        """The compiler process of the current thread."""
        if not hasattr(self._thread_local, "trial"):
            self._thread_local.trial = GrammarCompilerProcess()
            self._trials.append(self._thread_local.trial)
        trial: GrammarCompilerProcess = self._thread_local.trial
        return trial


def _llguidance() -> Any:
    """Import llguidance on first use, as engines without constraints run without the package."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise UsageError("a constrained output needs llguidance; pip install llguidance") from None
