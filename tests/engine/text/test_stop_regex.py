"""StopRegex finds the match that is complete first, however the text is split, at bounded cost."""

import re
import time
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.core.errors import UsageError
from tapscope.engine.params.stop_regex import MAX_PENDING, StopRegex, check_stop_regexes

_ATOMS = ["a", "b", ".", "[ab]", "[^a]", r"\s", "é", r"\n", "(?i:A)", r"\x61", "(a|b)", r"\Qa.\E"]
_ASSERTIONS = [r"\b", r"\B", "(?m:^)", "(?m:$)", "^", r"\A"]
_EXPRESSIONS = st.recursive(
    st.sampled_from(_ATOMS + _ASSERTIONS),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join).map("(?:{})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,2}", "+?", "{2}", "{2,}", "{0}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=7,
)


def _first_match(expression: str, text: str) -> tuple[int, int] | None:
    """Apply the definition with Python's `re`: the first end of a match in context, and the earliest start for it."""
    python = expression.replace(r"\Qa.\E", r"a\.")
    for end in range(1, len(text) + 1):
        ending = re.compile(rf"(?a)(?:{python})(?=[\s\S]{{{len(text) - end}}}\Z)")
        for start in range(end):
            if (match := ending.match(text, start)) is not None and match.end() == end:
                return start, end
    return None


def _feed(expression: str, pieces: list[str]) -> tuple[int, int] | None:
    search = StopRegex(expression)
    for piece in pieces:
        if (found := search.feed(piece)) is not None:
            return found
    return search.finish()


@settings(max_examples=100)
@given(
    expression=_EXPRESSIONS,
    text=st.text("abc .\n", max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=5),
)
def test_stop_regex_finds_the_first_complete_match_however_text_is_cut(
    expression: str, text: str, cuts: list[int]
) -> None:
    with suppress(UsageError):
        StopRegex(expression)
        places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        pieces = [text[start:end] for start, end in pairwise(places)]
        assert _feed(expression, pieces) == _feed(expression, list(text)) == _first_match(expression, text)


@pytest.mark.parametrize(
    ("expression", "piece"),
    [
        (r"(a+)+b", "aaaaaa"),
        (r"(a|aa)+\d", "aaaaaa"),
        (r"(?s)a.*Z", "aabxcd"),
        (r"(?s)(b[a-z]{100}x|c[a-z]{100}d).*Q", "abxbcd"),
    ],
)
def test_stop_regex_cost_is_bounded(expression: str, piece: str) -> None:
    search = StopRegex(expression)
    started = time.process_time()
    for _ in range(500):
        assert search.feed(piece) is None
    assert (time.process_time() - started) / 500 < 0.05


def test_stop_regex_holds_back_at_most_the_longest_match() -> None:
    search = StopRegex("(?s)a.*Z")
    assert search.feed("a" + "." * 2 * MAX_PENDING) is None
    assert search.pending_start == MAX_PENDING + 1


def test_check_stop_regexes_limits_number_and_size() -> None:
    with pytest.raises(UsageError, match="stop_regex has 17 expressions; the limit is 16"):
        check_stop_regexes(["a"] * 17)
    with pytest.raises(UsageError, match=r"compile to \d+ instructions; the limit is 2000"):
        check_stop_regexes([r"\pL+x", r"\pL+y"])
    with pytest.raises(UsageError, match=r"\\C \(a single byte\) is not supported"):
        check_stop_regexes([r"a\C"])
