"""Token ids by position: what a dict would say, whatever is put, cut and asked."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tapscope.comparator.alignment.row_join import matching_keys
from tapscope.comparator.runs.token_ids import TokenIds

POSITIONS = st.one_of(st.integers(-70, 200), st.sampled_from([2**40, 2**62]))
TOKENS = st.lists(st.integers(-3, 3), max_size=150)
Known = dict[int, int]


@st.composite
def texts(draw: st.DrawFn) -> tuple[TokenIds, Known]:
    text, known = TokenIds(), dict[int, int]()
    for start, tokens, cut in draw(st.lists(st.tuples(POSITIONS, TOKENS, st.booleans()), max_size=5)):
        if cut:
            text.cut(start)
            known = {p: t for p, t in known.items() if p < start}
            continue
        expected = next((p for p, t in enumerate(tokens, start) if known.get(p, t) != t), None)
        assert text.changed(start, tokens) == expected
        text.put(start, tokens)
        known.update(enumerate(tokens, start))
    return text, known


def said(text: TokenIds) -> Known:
    return dict(zip(*(column.tolist() for column in text.columns()), strict=True))


@given(texts(), texts(), st.sampled_from([0, 1, -64]))
def test_token_ids_behave_like_a_dict(one: tuple[TokenIds, Known], two: tuple[TokenIds, Known], shift: int) -> None:
    (text, known), (other, theirs) = one, two
    assert said(text) == known
    assert list(said(text)) == sorted(known)
    assert (len(text), bool(text)) == (len(known), bool(known))
    assert all(text[p] == known.get(p) for p in [*known, -1000, 77])
    assert text.is_within(other) == (known.items() <= theirs.items())
    assert (text == other) == (known == theirs)
    both = sorted(p for p in known if p + shift in theirs)
    found = [column.tolist() for column in text.shared(other, shift)]
    assert found == [both, [known[p] for p in both], [theirs[p + shift] for p in both]]
    text.update(other)
    assert said(text) == known | theirs


@given(st.lists(st.integers(0, 9), max_size=9), st.lists(st.integers(0, 9), max_size=9), st.booleans())
def test_token_ids_matching_keys_equal_a_sorted_intersection(one: list[int], two: list[int], alike: bool) -> None:
    left, right = np.array(sorted(one) if alike else one, np.int64), np.array(sorted(one) if alike else two, np.int64)
    _, first, second = np.intersect1d(left, right, return_indices=True)
    assert [column.tolist() for column in matching_keys(left, right)] == [first.tolist(), second.tolist()]
