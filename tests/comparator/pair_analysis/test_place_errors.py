"""Errors by rank and by token, on runs whose ranks hold columns, rows, copies or summands."""

import numpy as np
import pytest
from factories import RunFactory
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.comparator import CompareOptions, compare_open_runs
from tapscope.core.observe import RowSpan
from tapscope.sources import open_run

SITE, HEALTHY = "a:out", "b:out"
ROWS, COLUMNS = 6, 8
SPANS = [RowSpan("x", 0, 4, 0, 0), RowSpan("y", 0, 2, 0, 4)]


def write(path, arrays, dims, others):
    """One step of two requests; ``arrays`` are those of each rank."""
    with RunFactory(path, mesh={"tp": len(arrays)} if len(arrays) > 1 else {}) as run:
        run.step(grid=(ROWS,), rows=SPANS, token_ids=range(ROWS))
        run.put(SITE, dict(enumerate(arrays)), dims=dims)
        run.put(HEALTHY, dict.fromkeys(range(len(arrays)), others), dims="t h # tp:replicated")


def found(root, parts, dims, values):
    """(finding, its places, tokens, its row errors) of ``parts``, one per rank, against the whole ``values``."""
    others = np.ones((ROWS, COLUMNS), np.float32)
    write(root / "base", [values], "t h", others)
    write(root / "target", parts, dims, others)
    with open_run(root / "base") as baseline, open_run(root / "target") as target:
        comparison = compare_open_runs(baseline, target, CompareOptions())
        errors = comparison.place_errors()
        finding = next(f for f in comparison.report.findings if f.site == SITE)
        return finding, comparison.places(errors, finding), errors.tokens, comparison.token_view(finding)


def by_place(places):
    return dict(zip(places.at.tolist(), places.errors.tolist(), strict=True))


VALUES = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, ROWS - 1), st.integers(2, 4), st.sampled_from([1.0, 1e-3, -20.0]))
def test_squares_of_the_errors_of_shards_add_up_to_that_of_the_row(tmp_path_factory, row, num_ranks, size):
    wrong = VALUES.copy()
    wrong[row] += size * np.arange(1, COLUMNS + 1, dtype=np.float32)
    parts = np.array_split(wrong, num_ranks, axis=1)
    _, places, _, view = found(tmp_path_factory.mktemp("shards"), parts, "t h[tp]", VALUES)
    assert sum(error**2 for error in by_place(places.ranks).values()) == pytest.approx(view.errors.max() ** 2)
    assert places.ranks.max_abs.max() == view.max_abs.max()
    delta = [np.abs(part - one).max() for part, one in zip(parts, np.array_split(VALUES, num_ranks, 1), strict=True)]
    np.testing.assert_array_equal(places.ranks.max_abs, delta)


def test_tokens_have_the_errors_of_their_rows(tmp_path):
    wrong = VALUES.copy()
    wrong[[1, 5]] *= [[2], [3]]
    _, places, tokens, view = found(tmp_path, [wrong], "t h", VALUES)
    assert tokens == (("x", 0), ("x", 1), ("x", 2), ("x", 3), ("y", 0), ("y", 1))
    np.testing.assert_array_equal(places.tokens.errors, view.errors)
    np.testing.assert_array_equal(np.flatnonzero(places.tokens.errors), [1, 5])


def test_rows_on_several_ranks_count_for_the_rank_that_holds_them(tmp_path):
    wrong = VALUES.copy()
    wrong[4] += 1  # the third of three ranks
    _, places, _, view = found(tmp_path, np.array_split(wrong, 3), "t[tp] h", VALUES)
    assert by_place(places.ranks) == {0: 0.0, 1: 0.0, 2: pytest.approx(view.errors[4])}


def test_a_wrong_replica_shows_on_its_rank_alone(tmp_path):
    wrong = VALUES.copy()
    wrong[2] += 1
    _, places, _, _ = found(tmp_path, [VALUES, VALUES, wrong], "t h # tp:replicated", VALUES)
    errors = by_place(places.ranks)
    assert errors[2] > 0.1
    assert errors[0] == errors[1] == 0.0


def test_a_partial_sum_counts_for_every_rank(tmp_path):
    wrong = VALUES.copy()
    wrong[2] += 1
    _, places, _, view = found(tmp_path, [wrong / 2, wrong / 2], "t h[tp:partial]", VALUES)
    errors = by_place(places.ranks)
    assert errors[0] == errors[1] == pytest.approx(view.errors.max())


def test_fused_sections_count_for_the_rank_that_holds_their_columns(tmp_path):
    q, k = VALUES[:, :4], VALUES[:, 4:].copy()
    wrong = k.copy()
    wrong[3, 3] += 9  # the second rank's half of the second section
    parts = [np.concatenate([q[:, :2], wrong[:, :2]], 1), np.concatenate([q[:, 2:], wrong[:, 2:]], 1)]
    _, places, _, _ = found(tmp_path, parts, "t (q=4+k=4)[tp]", VALUES)
    errors = by_place(places.ranks)
    assert errors[0] == 0.0 < errors[1]


def test_values_that_are_not_finite_are_infinitely_far_apart(tmp_path):
    wrong = VALUES.copy()
    wrong[0, 7] = np.nan
    _, places, _, _ = found(tmp_path, np.array_split(wrong, 2, axis=1), "t h[tp]", VALUES)
    assert by_place(places.ranks) == {0: 0.0, 1: np.inf}
    assert places.tokens.errors[0] == np.inf


def test_findings_that_agree_are_not_read(tmp_path):
    close = VALUES * np.float32(1 + 2e-7)
    finding, places, _, _ = found(tmp_path, np.array_split(close, 2, axis=1), "t h[tp]", VALUES)
    assert not finding.verdict.is_bad
    assert places.ranks.at.tolist() == [0, 1]
    assert np.isnan(places.ranks.errors).all()
    assert np.isnan(places.tokens.errors).all()
