"""Check for retired words and long sentences: `python tests/support/check_words.py [PATH...]`, a part of `make lint`.

The lists and the enforced paths are in `retired_words.toml`. In Python and C++ files, strings, comments, docstrings and
names are checked; in Markdown, everything but code blocks. Given paths replace the enforced ones.
"""

import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RULES = tomllib.loads((Path(__file__).with_name("retired_words.toml")).read_text())
PHRASES = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in RULES["phrases"].items()]
NAMES: dict[str, str] = RULES["identifiers"]
SUFFIXES = {".py", ".md", ".cpp", ".h", ".sh", ".toml", ".tcss"}

_CODE_BLOCK = re.compile(r"^( *)```.*?^\1```$|<!--.*?-->", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`[^`]+`")
_PROSE_TOKENS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
_END = re.compile(r"(?<=[.!?:;])[)\"'”]*\s+|\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.)\s)|\n(?=#)|(?<=\|)|\n(?=\|)")


class Problem(NamedTuple):
    """One violation of a rule."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def problems(file: Path) -> list[Problem]:
    """Return all violations in one file, by line."""
    name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)
    text = file.read_text()
    if file.suffix == ".md":
        prose = _blanked(_CODE_BLOCK, text)
        found = [*_retired(_blanked(_INLINE, prose)), *_renamed(prose), *_long(prose)]
    elif file.suffix == ".py":
        found = [(at + line, told) for at, words in _tokens(text) for line, told in _of_token(words)]
    else:
        found = [*_retired(text), *_renamed(text)]
    if name.removeprefix("src/tapscope/") in RULES["aliases"]:
        found = [each for each in found if "was renamed" not in each[1]]
    return sorted({Problem(name, line + 1, told) for line, told in found}, key=lambda each: each.line)


def _blanked(pattern: re.Pattern[str], text: str) -> str:
    """Blank out matches while keeping every line."""
    return pattern.sub(lambda found: "X" + "\n" * found[0].count("\n"), text)


def _tokens(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line from 0, text) of every string, comment and name."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _PROSE_TOKENS or token.type == tokenize.NAME:
            yield token.start[0] - 1, token.string


@cache
def _of_token(text: str) -> list[tuple[int, str]]:
    """Check one token; cached, because most tokens are names that occur many times."""
    return [*_retired(text), *_renamed(text)]


def _retired(text: str) -> Iterator[tuple[int, str]]:
    """Yield retired phrases, which may span a line break."""
    flat = re.sub(r"\s", " ", text)
    for pattern, instead in PHRASES:
        for found in pattern.finditer(flat):
            yield text.count("\n", 0, found.start()), f"'{found[0].strip()}' is retired: {instead}"


def _renamed(text: str) -> Iterator[tuple[int, str]]:
    for found in re.finditer(r"\w+", text):
        if found[0] in NAMES:
            yield text.count("\n", 0, found.start()), f"`{found[0]}` was renamed: {NAMES[found[0]]}"


def _long(prose: str) -> Iterator[tuple[int, str]]:
    """Yield sentences with more words than allowed; a table cell is separate prose, inline code counts as one word."""
    start = 0
    text = _INLINE.sub(lambda found: "X" + re.sub(r"[^\n]", "_", found[0][1:]), prose)
    ends = [found.span() for found in _END.finditer(text)] + [(len(text), len(text))]
    for end, after in ends:
        sentence = text[start:end]
        words = [word for word in sentence.split() if re.search(r"\w", word)]
        if len(words) > RULES["max_words_in_a_sentence"]:
            begin = start + len(sentence) - len(sentence.lstrip())
            yield text.count("\n", 0, begin), f"a sentence of {len(words)} words: {' '.join(words[:6])} …"
        start = after


def files(paths: list[str]) -> Iterator[Path]:
    """Yield every checked file below the given paths or the enforced ones."""
    left_out = [] if paths else [ROOT / each for each in RULES["except"]]
    for path in paths or RULES["enforced"]:
        below = ROOT / path
        for file in sorted(below.rglob("*")) if below.is_dir() else [below]:
            if file.suffix in SUFFIXES and file.is_file() and not any(file.is_relative_to(each) for each in left_out):
                yield file


def main(paths: list[str]) -> int:
    """Print every violation; return 1 if there is one."""
    found = [each for file in files(paths) for each in problems(file)]
    for each in found:
        print(each)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
