"""A pair of runs with a known answer, and the answer of `tapscope diff`."""

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapscope.cli import main

CLEAN = "clean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs. No pair uses handwritten dims or a handwritten map."""

    suite: str
    dtype: str
    """Dtype of the target; the baseline is float32."""
    bug: str = CLEAN
    culprit: str = ""
    """Path prefix of the module or site that must be named, or "seen at"."""
    baseline: Path
    target: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The pairs of one framework."""

    name: str
    packages: tuple[str, ...]
    """Modules that must be importable."""
    pairs: Callable[[Path, Sequence[str]], Iterator[Pair]]
    """``pairs(folder, dtypes)`` captures and yields pairs one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of `tapscope diff` for one pair."""

    exit_code: int
    what: str
    """The ``what`` line, or the error."""
    is_right: bool


def answer(pair: Pair) -> Answer:
    """Run `tapscope diff BASELINE TARGET`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["diff", str(pair.baseline), str(pair.target)])
    lines = [line.removeprefix("what").strip() for line in out.getvalue().splitlines() if line.startswith("what")]
    what = lines[0] if lines else err.getvalue().strip()
    is_clean = pair.bug == CLEAN
    culprit = f"(root) ({pair.culprit[1:]}" if pair.culprit.startswith(":") else pair.culprit
    named = what.startswith(culprit) or f"(seen at {pair.culprit}" in what
    return Answer(exit_code=code, what=what, is_right=code == 0 if is_clean else code == 1 and named)
