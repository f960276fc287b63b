"""LarkWriter: writes llguidance's Lark syntax for strings that contain special tokens.

llguidance matches strings by lexemes and special tokens by their ids. Free text that ends at the first occurrence of
one of several strings is a lazy rule.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

_ANY = "(?s:.*)"


class LarkWriter:
    """Writes expressions and collects the rules that they refer to."""

    def __init__(self, special: Mapping[str, int], marks: Mapping[str, int]) -> None:
        """``special`` and ``marks`` map token strings to ids.

        llguidance does not match either as text. Special tokens are written by id where their strings occur; marks
        (``<think>``), which are ordinary text to the tokenizer, may also occur in free text.
        """
        self._names: dict[tuple[str, str], str] = {}
        self._marks = marks
        self._tokens = {**special, **marks}
        self._cut = _finder(self._tokens)
        self._cut_special = _finder(special)

    def rule(self, body: str, options: str = "") -> str:
        """Name of the rule with this body, which is added if it is new."""
        return self._names.setdefault((body, options), f"part{len(self._names)}")

    def lines(self) -> list[str]:
        """The rules collected so far."""
        return [f"{name}{options}: {body}" for (body, options), name in self._names.items()]

    def text(self, text: str) -> str:
        """Expression that matches exactly the string ``text``."""
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
        """Expression for a match of ``pattern`` followed by one of ``ends``, if there are any."""
        slashed = re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], pattern, flags=re.DOTALL)
        if ends and not any(self._cut.search(end) for end in ends):
            return self.rule(f"/(?:{slashed}){_any_of(ends)}/", "[lazy]")
        return self.closed(self.rule(f"/{slashed}/"), ends)

    def closed(self, written: str, ends: Sequence[str]) -> str:
        """``written`` followed by one of ``ends``, if there are any."""
        return f"{written} {one_of(map(self.text, ends))}" if ends else written

    def free(self, stops: Sequence[str]) -> str:
        """Free text to the end of the output, in which the strings ``stops`` may begin something else."""
        return f"{self._marked(stops)} {self._free}".strip()

    def upto(self, ends: Sequence[str], stops: Sequence[str]) -> str:
        """Free text up to and including the first of ``ends``, as tokens or as text; ``stops`` includes ``ends``."""
        options = [f"{self._free} {self.text(end)}" for end in ends if self._cut.search(end)]
        as_text = [end for end in ends if not self._cut_special.search(end)]
        if as_text:
            options.append(self.rule(f"/{_ANY}{_any_of(as_text)}/", "[lazy]"))
        return f"{self._marked(stops)} {one_of(options)}".strip()

    @property
    def _free(self) -> str:
        return self.rule(f"/{_ANY}/")

    def _marked(self, stops: Sequence[str]) -> str:
        """Any number of: free text followed by a mark that does not overlap ``stops``."""
        marks = [mark for mark in self._marks if not any(mark in stop or stop in mark for stop in stops)]
        ids = [str(self._tokens[mark]) for mark in marks]
        return f"({self._free} <[{','.join(ids)}]>)*" if ids else ""


def one_of(options: Iterable[str]) -> str:
    """Alternatives."""
    written = list(options)
    return written[0] if len(written) == 1 else f"({' | '.join(written)})"


def _finder(strings: Iterable[str]) -> re.Pattern[str]:
    """Pattern that finds each of ``strings``, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(strings, key=len, reverse=True))) or r"(?!)")


def _any_of(strings: Sequence[str]) -> str:
    """Regular expression that matches exactly ``strings``."""
    return f"(?:{'|'.join(''.join(map(_escaped, each)) for each in strings)})"


def _escaped(character: str) -> str:
    return character if character.isalnum() and character.isascii() else f"\\u{{{ord(character):x}}}"


def _quoted(text: str) -> str:
    """``text`` as a literal, or as a regular expression if it has unprintable characters."""
    return json.dumps(text, ensure_ascii=False) if text.isprintable() else f"/{_any_of([text])}/"
