"""Prompt lookup: which earlier occurrence is continued, and that an incremental index equals a fresh one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.request import Request
from tapscope.engine.speculative.ngram_proposer import NgramProposer
from tapscope.engine.speculative.speculator import DraftLength, SpeculationStats


def _propose(proposer: NgramProposer, request: Request, count: int = 4) -> list[int]:
    return list(proposer.propose([(request, count)]).get(request.id, Drafts(())).tokens)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3], []),
        ([1], []),
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 8, 8, 1, 2, 9, 9, 1, 2], [9, 9, 1, 2]),  # of equally long matches, the latest
        ([7, 1, 2, 8, 0, 0, 1, 2, 9, 0, 7, 1, 2], [8, 0, 0, 1]),  # the longest match, even if others are later
        ([5, 6, 7, 5, 6, 7], [5, 6, 7, 5]),  # the continuation is repeated
        ([3, 3, 3], [3, 3, 3, 3]),
    ],
)
def test_ngram_proposer_continues_the_best_match(tokens: list[int], expected: list[int]) -> None:
    assert _propose(NgramProposer(2, 12), Request(id="a", prompt_ids=tuple(tokens))) == expected


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 3), st.integers(0, 3))
def test_ngram_proposer_index_grows_with_the_request(tokens: list[int], shortest: int, more: int) -> None:
    grown, request = NgramProposer(shortest, shortest + more), Request(id="a", prompt_ids=tuple(tokens[:1]))
    for token in tokens[1:]:
        request.tokens.append(token)
        found = _propose(grown, request)
        fresh = Request(id="b", prompt_ids=tuple(request.tokens))
        assert found == _propose(NgramProposer(shortest, shortest + more), fresh)
    grown.forget("a")
    assert not grown._indexes


def test_draft_length_follows_acceptance() -> None:
    length, wanted = DraftLength(4), []
    for generated, (drafted, accepted) in enumerate([(4, 0), (2, 0), (1, 0), (1, 0)]):
        assert length.wanted(generated) == drafted
        length.update(generated, drafted, accepted)
    assert [length.wanted(generated) for generated in (3, 18, 19)] == [0, 0, 1]
    length.update(19, 1, 0)  # the next pause is twice as long
    assert [length.wanted(generated) for generated in (50, 51)] == [0, 1]
    for generated in range(51, 54):
        wanted.append(length.wanted(generated))
        length.update(generated, wanted[-1], wanted[-1])
    assert wanted == [1, 2, 4]
    length.update(54, 4, 1)
    assert length.wanted(55) == 2


def test_single_drafts_that_are_mostly_accepted_are_not_paused() -> None:
    length, drafted = DraftLength(1), 0
    for generated in range(100):
        drafted += length.wanted(generated)
        length.update(generated, 1, int(generated % 5 > 0))
    assert drafted == 100


def test_acceptance_starts_at_all_accepted_and_follows_the_last_verifications() -> None:
    chain, tree = DraftLength(3), DraftLength(3, num_drafts=7)
    assert (chain.acceptance, tree.acceptance) == (1, 3 / 7)
    for _ in range(60):
        chain.update(0, 2, 1)
        tree.update(0, 3, 1, num_drafts=7)
    assert (chain.acceptance, tree.acceptance) == pytest.approx((1 / 2, 1 / 7), abs=1e-3)


def test_speculation_stats_count_by_position() -> None:
    stats = SpeculationStats()
    assert stats.acceptance_length == 0
    stats.count(3, 3, 2)
    stats.count(1, 1, 0)
    assert (stats.drafted_by_position, stats.accepted_by_position) == ([2, 1, 1], [1, 1, 0])
    assert stats.acceptance_length == 2
