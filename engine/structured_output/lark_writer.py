"""LarkRules: pieces of llguidance's Lark form for texts in which tokens stand that are no text to it.

llguidance matches texts by lexemes and special tokens by their ids. Free text ends where one of the texts that may end
it first appears: a lazy rule.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

_ANY = "(?s:.*)"


class LarkWriter:
    """Writes expressions, and collects the rules that they name."""

    def __init__(self, special: Mapping[str, int], marks: Mapping[str, int]) -> None:
        """``special`` and ``marks`` are the tokens that llguidance sees as no text, the marks (``<think>``) though they
        are: both stand where their texts do, and marks in free text, too.
        """
        self._names: dict[tuple[str, str], str] = {}
        self._marks = marks
        self._tokens = {**special, **marks}
        self._cut = _finder(self._tokens)
        self._cut_special = _finder(special)

    def rule(self, body: str, options: str = "") -> str:
        """The name of the rule that says so."""
        return self._names.setdefault((body, options), f"part{len(self._names)}")

    def lines(self) -> list[str]:
        """The rules that the expressions written so far name."""
        return [f"{name}{options}: {body}" for (body, options), name in self._names.items()]

    def text(self, text: str) -> str:
        """A text."""
        parts: list[str | re.Match[str]] = []
        place = 0
        for found in self._cut.finditer(text):
            parts += [text[place : found.start()], found]
            place = found.end()
        return " ".join(
            f"<[{self._tokens[part[0]]}]>" if isinstance(part, re.Match) else _quoted(part)
            for part in (*parts, text[place:])
            if part
        )

    def expression(self, pattern: str, ends: Sequence[str]) -> str:
        """What matches ``pattern``, up to the first of ``ends``, if there are any, after which it does."""
        slashed = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
        if ends and not any(self._cut.search(end) for end in ends):
            return self.rule(f"/(?:{slashed}){_any_of(ends)}/", "[lazy]")
        return self.closed(self.rule(f"/{slashed}/"), ends)

    def closed(self, written: str, ends: Sequence[str]) -> str:
        """``written`` and one of ``ends``, if there are any."""
        return f"{written} {one_of(map(self.text, ends))}" if ends else written

    def free(self, stops: Sequence[str]) -> str:
        """Free text to the end of everything; what else may come begins with ``stops``."""
        return f"{self._marked(stops)} {self._free}".strip()

    def upto(self, ends: Sequence[str], stops: Sequence[str]) -> str:
        """Free text up to and with the first of ``ends``, which are among the ``stops``: tokens, or spelt."""
        options = [f"{self._free} {self.text(end)}" for end in ends if self._cut.search(end)]
        spelt = [end for end in ends if not self._cut_special.search(end)]
        if spelt:
            options.append(self.rule(f"/{_ANY}{_any_of(spelt)}/", "[lazy]"))
        return f"{self._marked(stops)} {one_of(options)}".strip()

    @property
    def _free(self) -> str:
        return self.rule(f"/{_ANY}/")

    def _marked(self, stops: Sequence[str]) -> str:
        """Free text up to and with marks that have nothing in common with ``stops``, as often as it comes."""
        marks = [mark for mark in self._marks if not any(mark in stop or stop in mark for stop in stops)]
        ids = [str(self._tokens[mark]) for mark in marks]
        return f"({self._free} <[{','.join(ids)}]>)*" if ids else ""


def one_of(options: Iterable[str]) -> str:
    """An expression of alternatives."""
    written = list(options)
    return written[0] if len(written) == 1 else f"({' | '.join(written)})"


def _finder(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds each of ``texts``, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _any_of(texts: Sequence[str]) -> str:
    """A regular expression of exactly these texts."""
    return f"(?:{'|'.join(''.join(map(_escaped, text)) for text in texts)})"


def _escaped(character: str) -> str:
    return character if character.isalnum() and character.isascii() else f"\\u{{{ord(character):x}}}"


def _quoted(text: str) -> str:
    """A text as a literal, or an expression where a literal cannot say it."""
    return json.dumps(text, ensure_ascii=False) if text.isprintable() else f"/{_any_of([text])}/"
