"""LarkWriter: write llguidance's Lark syntax for strings that may contain special tokens.

llguidance matches strings with lexemes, but special tokens by id. Free text that ends at the first occurrence of one of
several strings is a lazy rule.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

_ANY = "(?s:.*)"


class LarkWriter:
    """Writer of Lark expressions that collects the rules to which they refer."""

    def __init__(self, special: Mapping[str, int], marks: Mapping[str, int]) -> None:
        """``special`` and ``marks`` map token strings to ids; llguidance matches neither of them as text.

        Special tokens are written by id where their strings occur. Marks (such as ``<think>``) are ordinary added
        tokens for the tokenizer, and may also occur in free text.
        """
        self._names: dict[tuple[str, str], str] = {}
        self._marks = marks
        self._tokens = {**special, **marks}
        self._cut = _finder(self._tokens)
        self._cut_special = _finder(special)

    def rule(self, body: str, options: str = "") -> str:
        """Return the name of the rule with this body and options; a new rule is added."""
        return self._names.setdefault((body, options), f"part{len(self._names)}")

    def lines(self) -> list[str]:
        """Return the definitions of all rules collected so far."""
        return [f"{name}{options}: {body}" for (body, options), name in self._names.items()]

    def text(self, text: str) -> str:
        """Return an expression that matches exactly the string ``text``."""
        parts: list[str | re.Match[str]] = []
        start = 0
        for match in self._cut.finditer(text):
            parts += [text[start : match.start()], match]
            start = match.end()
        return " ".join(
            f"<[{self._tokens[part[0]]}]>" if isinstance(part, re.Match) else _quoted(part)
            for part in (*parts, text[start:])
            if part
        )

    def expression(self, pattern: str, ends: Sequence[str]) -> str:
        """Return an expression for a match of the regex ``pattern``, followed by one of ``ends`` if not empty."""
        slashed = re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], pattern, flags=re.DOTALL)
        if ends and not any(self._cut.search(end) for end in ends):
            return self.rule(f"/(?:{slashed}){_any_of(ends)}/", "[lazy]")
        return self.closed(self.rule(f"/{slashed}/"), ends)

    def closed(self, written: str, ends: Sequence[str]) -> str:
        """Return the expression ``written``, followed by one of ``ends`` if not empty."""
        return f"{written} {one_of(map(self.text, ends))}" if ends else written

    def free(self, stops: Sequence[str]) -> str:
        """Return an expression for free text up to the end of the output.

        Marks that overlap one of ``stops`` are excluded from the free text.
        """
        return f"{self._marked(stops)} {self._free}".strip()

    def upto(self, ends: Sequence[str], stops: Sequence[str]) -> str:
        """Return an expression for free text up to and including the first of ``ends``, as tokens or as text.

        Marks that overlap one of ``stops``, which include ``ends``, are excluded from the free text.
        """
        options = [f"{self._free} {self.text(end)}" for end in ends if self._cut.search(end)]
        as_text = [end for end in ends if not self._cut_special.search(end)]
        if as_text:
            options.append(self.rule(f"/{_ANY}{_any_of(as_text)}/", "[lazy]"))
        return f"{self._marked(stops)} {one_of(options)}".strip()

    @property
    def _free(self) -> str:
        return self.rule(f"/{_ANY}/")

    def _marked(self, stops: Sequence[str]) -> str:
        """Return an expression for zero or more repetitions of free text and a mark that overlaps none of ``stops``."""
        marks = [mark for mark in self._marks if not any(mark in stop or stop in mark for stop in stops)]
        ids = [str(self._tokens[mark]) for mark in marks]
        return f"({self._free} <[{','.join(ids)}]>)*" if ids else ""


def one_of(options: Iterable[str]) -> str:
    """Join expressions as alternatives."""
    written = list(options)
    return written[0] if len(written) == 1 else f"({' | '.join(written)})"


def _finder(strings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of ``strings``, preferring longer ones."""
    return re.compile("|".join(map(re.escape, sorted(strings, key=len, reverse=True))) or r"(?!)")


def _any_of(strings: Sequence[str]) -> str:
    """Return a regular expression that matches exactly ``strings``."""
    return f"(?:{'|'.join(''.join(map(_escaped, each)) for each in strings)})"


def _escaped(character: str) -> str:
    return character if character.isalnum() and character.isascii() else f"\\u{{{ord(character):x}}}"


def _quoted(text: str) -> str:
    """Return ``text`` as a Lark literal, or as a regular expression if it has unprintable characters."""
    return json.dumps(text, ensure_ascii=False) if text.isprintable() else f"/{_any_of([text])}/"
