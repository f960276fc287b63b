"""StopRegex: search streamed text for a regular expression, with RE2.

RE2 (https://github.com/google/re2) matches in time linear in the text, so no client's expression can stall the server.
RE2 has no partial matching: to hold back text that may become a match, a second expression is derived that matches
every prefix of a match.
"""

import functools
import importlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tapscope.core.errors import UsageError
from tapscope.core.formatting import short

MAX_CHARACTERS = 5000
MAX_EXPRESSIONS = 16
MAX_INSTRUCTIONS = 2000
"""Maximum RE2 program size, summed over all expressions of one request."""
MAX_PENDING = 4096
"""Maximum length of a match in characters; longer text is not held back."""
_MAX_MEMORY = 1 << 20  # bytes per compiled expression, including its state cache

_TOKEN = re.compile(
    r"""
      \\Q(?P<quoted>.*?)(?:\\E|\Z)
    | \(\?(?P<set>[imsU]*)(?:-(?P<cleared>[imsU]+))?(?P<scope>[:)])
    | (?P<open>\((?:\?P?<\w+>)?)
    | (?P<close>\))
    | (?P<bar>\|)
    | (?P<repeat>[*+?]|\{(?P<low>\d+)(?P<comma>,(?P<high>\d*))?\})\??
    | (?P<assertion>\\[AbBz]|\^|\$)
    | (?P<atom>\\[pP](?:\{[^}]*\}|.)|\\x(?:\{[^}]*\}|..)|\\[0-7]{1,3}|\\.|\[\^?\]?(?:\[:[^\]]*:\]|\\.|[^\]\\])*\]|.)
    """,
    re.DOTALL | re.VERBOSE,
)
_PERL = re.compile("invalid perl operator|invalid escape|bad repetition")
_FOLLOWING = ("a", " ", "\n")
"""One character of each class that the assertions ``\\b``, ``\\B`` and ``(?m)$`` distinguish."""


class _Part(NamedTuple):
    """A subexpression with two derived expressions."""

    whole: str
    prefixes: str
    """Matches every prefix of every match of ``whole``, from the empty one to the full match."""
    consuming: str
    """``whole`` without its assertions."""


class StopExpression:
    """A compiled stop expression."""

    def __init__(self, text: str) -> None:
        """Compile ``text``. Raises UsageError if it is invalid, too large, or matches the empty string."""
        if len(text) > MAX_CHARACTERS:
            raise _invalid(text, f"it has {len(text)} characters; the limit is {MAX_CHARACTERS}")
        self.size: int = _compile(text, text).programsize  # RE2 checks the syntax, which the parser relies on
        """Number of instructions in RE2's program."""
        parser = _Parser(text)
        try:
            part = parser.alternatives(set())
        except RecursionError:
            raise _invalid(text, "its groups are nested too deeply") from None
        self.text = text
        self.looks_ahead = parser.looks_ahead
        """Whether the character after a match may decide whether it is a match."""
        self.possible = _compile(text, part.consuming)
        """The expression without assertions: a necessary condition for a match of ``text``."""
        if self.possible.fullmatch("") is not None:
            raise _invalid(text, "it matches the empty string, so generation would end immediately")
        self.at_end = _compile(text, rf"(?:{part.whole})\z")
        self.before_last = _compile(text, rf"(?:{part.whole})(?s:.)\z")
        self.prefix_at_end = _compile(text, rf"(?:{part.prefixes})\z")


compile_stop_regex = functools.lru_cache(64)(StopExpression)


def check_stop_regexes(expressions: Sequence[str]) -> None:
    """Raise UsageError unless a request's stop expressions are valid and within the limits."""
    if len(expressions) > MAX_EXPRESSIONS:
        raise UsageError(f"stop_regex has {len(expressions)} expressions; the limit is {MAX_EXPRESSIONS}")
    size = sum(compile_stop_regex(text).size for text in expressions)
    if size > MAX_INSTRUCTIONS:
        rule = f"they compile to {size} instructions; the limit is {MAX_INSTRUCTIONS}; use fewer or shorter ones"
        raise UsageError(f"stop_regex={short(expressions)}: {rule}")


class StopRegex:
    """Incremental search for the match that ends first; among matches with the same end, the longest."""

    def __init__(self, text: str) -> None:
        """Compile ``text``. Raises UsageError."""
        self._expression = compile_stop_regex(text)
        self._text = ""
        """Pending text, plus one preceding character, because assertions depend on it."""
        self._first = 0
        """Index in ``_text`` of the earliest character at which a match may start."""
        self._offset = 0
        """Number of characters that precede ``_text``."""

    @property
    def text(self) -> str:
        """The expression as given."""
        return self._expression.text

    @property
    def pending_start(self) -> int | None:
        """Position of the earliest character that may belong to a match; None if there is none."""
        return self._offset + self._first if self._first < len(self._text) else None

    def skip(self, new: str) -> None:
        """Append ``new``; no match may start in it or before it."""
        self._keep(self._text + new, len(self._text) + len(new))

    def feed(self, new: str) -> tuple[int, int] | None:
        """Append ``new``; return [start, end) of the first match that it completes, which ends the search, or None."""
        text, known = self._text + new, len(self._text)
        is_possible = self._expression.possible.search(text, self._first) is not None
        for end in range(known, len(text)) if is_possible else ():
            if (match := self._decided_by(text, end) or self._ending(text, end + 1)) is not None:
                return match
        pending = self._expression.prefix_at_end.search(text, self._first)
        self._keep(text, max(pending.start(), len(text) - MAX_PENDING))
        return None

    def finish(self) -> tuple[int, int] | None:
        """Return [start, end) of the match at the end of the text, given that no more text follows; else None."""
        return self._span(self._expression.at_end.search(self._text, self._first), len(self._text))

    def _decided_by(self, text: str, end: int) -> tuple[int, int] | None:
        """Return the match that ends at ``end`` and depends on the next character, ``text[end]``."""
        if not self._expression.looks_ahead or end == self._first:
            return None
        return self._span(self._expression.before_last.search(text[: end + 1], self._first), end)

    def _ending(self, text: str, end: int) -> tuple[int, int] | None:
        """Return the match that ends at ``end`` regardless of the next character."""
        if not self._expression.looks_ahead:
            return self._span(self._expression.at_end.search(text[:end], self._first), end)
        before_last = self._expression.before_last
        spans = {self._span(before_last.search(text[:end] + after, self._first), end) for after in _FOLLOWING}
        return spans.pop() if len(spans) == 1 else None

    def _span(self, match: Any, end: int) -> tuple[int, int] | None:
        return None if match is None else (self._offset + match.start(), self._offset + end)

    def _keep(self, text: str, first: int) -> None:
        """Drop all text before the character that precedes ``first``."""
        cut = max(first - 1, 0)
        self._text, self._first, self._offset = text[cut:], first - cut, self._offset + cut


class _Parser:
    """Parser for expressions that RE2 has accepted."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self.looks_ahead = False

    def alternatives(self, flags: set[str]) -> _Part:
        """Parse up to the closing parenthesis or the end; ``flags`` apply unless the expression changes them."""
        options: list[_Part] = []
        items: list[_Part] = []
        while self._at < len(self._text) and (token := _TOKEN.match(self._text, self._at)) is not None:
            if token["close"]:
                break
            self._at = token.end()
            if token["bar"]:
                options.append(_sequence(items))
                items = []
            elif token["repeat"]:
                items[-1] = _repeated(items[-1], token)
            elif token["scope"] == ")":
                flags = flags.union(token["set"]).difference(token["cleared"] or "")
            elif token["scope"] or token["open"]:
                inner = flags.union(token["set"] or "").difference(token["cleared"] or "")
                items.append(self.alternatives(inner))
                self._at += 1
            elif token["assertion"]:
                items.append(self._assertion(token["assertion"], flags))
            else:
                quoted = token["quoted"]
                atoms = [token["atom"]] if quoted is None else [re.escape(each) for each in quoted]
                items += [self._atom(each, flags) for each in atoms]
        return _any_of([*options, _sequence(items)])

    def _atom(self, atom: str, flags: set[str]) -> _Part:
        if atom == r"\C":
            raise _invalid(self._text, r"\C (a single byte) is not supported; use (?s:.)")
        flagged = "".join(flags & {"i", "s"})
        whole = f"(?{flagged}:{atom})" if flagged else atom
        return _Part(whole, f"(?:{whole})?", whole)

    def _assertion(self, assertion: str, flags: set[str]) -> _Part:
        multiline = assertion in "^$" and "m" in flags
        if assertion == r"\z" or (assertion == "$" and not multiline):
            rule = (
                "more text may follow, so '$' and '\\z' never match; leave them out, or write (?m:$) for a line's end"
            )
            raise _invalid(self._text, rule)
        self.looks_ahead |= assertion in (r"\b", r"\B", "$")
        return _Part(f"(?m:{assertion})" if multiline else assertion, "", "")


def _any_of(options: Sequence[_Part]) -> _Part:
    return (
        options[0]
        if len(options) == 1
        else _Part(*(f"(?:{'|'.join(column)})" for column in zip(*options, strict=True)))
    )


def _sequence(items: Sequence[_Part]) -> _Part:
    """Concatenate ``items``, split in halves so that the nesting depth of the prefix expression is logarithmic."""
    if len(items) <= 1:
        return items[0] if items else _Part("", "", "")
    left, right = _sequence(items[: len(items) // 2]), _sequence(items[len(items) // 2 :])
    prefixes = f"(?:{left.prefixes}|{left.whole}{right.prefixes})"
    return _Part(left.whole + right.whole, prefixes, left.consuming + right.consuming)


def _repeated(item: _Part, token: re.Match[str]) -> _Part:
    sign = token["repeat"]
    high = (
        {"*": None, "+": None, "?": 1}[sign]
        if sign in "*+?"
        else token["high"] or (None if token["comma"] else token["low"])
    )
    before = "*" if high is None else f"{{0,{max(int(high) - 1, 0)}}}"
    prefixes = "" if high is not None and int(high) == 0 else f"(?:{item.whole}){before}{item.prefixes}"
    return _Part(f"(?:{item.whole}){sign}", prefixes, f"(?:{item.consuming}){sign}")


def _compile(text: str, pattern: str) -> Any:
    try:
        re2 = importlib.import_module("re2")
    except ImportError:
        raise UsageError("stop_regex needs google-re2; pip install google-re2") from None
    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem = False, True, _MAX_MEMORY
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        hint = "; RE2 has no look-around, backreferences or atomic groups" if _PERL.match(reason) else ""
        raise _invalid(text, f"invalid regular expression: {reason}{hint}") from None
    except UnicodeEncodeError:
        raise _invalid(text, "it is not valid Unicode") from None


def _invalid(text: str, reason: str) -> UsageError:
    return UsageError(f"stop_regex={short(text)}: {reason}")
