"""Sampled tokens must be equal, unless a fork or a near tie of the logits explains the difference."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import Finding, Report, Verdict, compare
from tapscope.core.observe import RowSpan

BASE = np.array([[3.0, 1.0, 2.0], [2.0, 2.0005, -1.0], [0.5, 4.0, 1.0]], np.float32)


def write(path: Path, logits: np.ndarray, sampled: list[int], generated: list[int]) -> Path:
    with RunFactory(path) as run:
        run.step(grid=(3,), rows=[RowSpan("a", 0, 3, 0, 0)], token_ids=[1, 0, 2])
        run.put("lm_head:out", logits, dims="t v")
        run.put("sampler:out", np.array(sampled), dims="t")
        for position, token in enumerate(generated, 3):
            run.step(phase="decode", grid=(1,), rows=[RowSpan("a", position, 1, 0, 0)], token_ids=[token])
            run.put("lm_head:out", logits[2:], dims="t v")
    return path


def diff_samples(tmp_path: Path, left: tuple, right: tuple) -> tuple[Report, Finding]:  # type: ignore[type-arg]
    report = diff(write(tmp_path / "b", *left), write(tmp_path / "t", *right))
    return report, next(f for f in report.findings if f.site == "sampler:out")


def test_near_ties_token_flip_within_the_error_is_explained(tmp_path: Path) -> None:
    noisy = BASE + np.array([[0.002, 0, 0], [0.003, -0.003, 0], [0, 0.003, 0]], np.float32)
    report, found = diff_samples(tmp_path, (BASE, [0, 1, 1], []), (noisy.astype(ml_dtypes.bfloat16), [0, 0, 1], []))
    assert found.verdict is Verdict.CLOSE
    assert "near tie" in found.notes[0]
    assert report.exit_code == 0


def test_near_ties_token_flip_unexplained_by_logits_differs(tmp_path: Path) -> None:
    report, found = diff_samples(tmp_path, (BASE, [0, 1, 1], []), (BASE, [0, 1, 2], []))
    assert found.verdict is Verdict.DIFFERS
    assert report.first_divergence is not None
    assert report.first_divergence.module == "sampler"


def test_near_ties_token_flip_after_wrong_logits_differs(tmp_path: Path) -> None:
    wrong = BASE[:, [1, 0, 2]].copy()
    report, found = diff_samples(tmp_path, (BASE, [0, 1, 1], []), (wrong, [1, 0, 0], []))
    assert found.verdict is Verdict.DIFFERS
    assert found.role == "downstream"
    assert report.first_divergence is not None
    assert report.first_divergence.module == "lm_head"


TIED = np.array([[3.0, 1.0, 2.0], [2.0, 2.0005, -1.0], [0.5, 4.0, 3.999]], np.float32)
TURNED = TIED + np.array([[0.0, 0.002, 0.0], [0.003, 0.0, 0.0], [0.0, -0.002, 0.002]], np.float32)


def test_near_ties_fork_after_a_near_tie_is_explained(tmp_path: Path) -> None:
    report, found = diff_samples(
        tmp_path, (TIED, [0, 1, 1], [1, 2]), (TURNED.astype(ml_dtypes.bfloat16), [0, 1, 2], [2, 2])
    )
    assert found.verdict is Verdict.CLOSE
    assert "near tie" in found.notes[0]
    assert report.coverage.forks[0].position == 3
    assert report.exit_code == 0


def unsampled(path: Path, logits: np.ndarray, generated: list[int], *, last: bool = False) -> Path:
    """Write a run without recorded samples, only the tokens that follow; ``last`` keeps the logits of the last row
    only."""
    with RunFactory(path) as run:
        run.step(grid=(3,), rows=[RowSpan("a", 0, 3, 0, 0)], token_ids=[1, 0, 2])
        run.put("model.norm:out", np.ones((3, 4), np.float32), dims="t h")
        run.put("lm_head:out", logits[2:] if last else logits, dims="t v", rows=[(2, 1)] if last else None)
        for position, token in enumerate(generated, 3):
            run.step(phase="decode", grid=(1,), rows=[RowSpan("a", position, 1, 0, 0)], token_ids=[token])
            run.put("model.norm:out", np.ones((1, 4), np.float32), dims="t h")
            run.put("lm_head:out", logits[2:], dims="t v")
    return path


@pytest.mark.parametrize("last", [False, True])
def test_near_ties_fork_at_equal_logits_blames_the_sampler(tmp_path: Path, last: bool) -> None:
    one = unsampled(tmp_path / "b", BASE, [1, 2], last=last)
    two = unsampled(tmp_path / "t", BASE, [2, 2], last=last)
    for baseline, target in ((one, two), (two, one)):
        report = compare(baseline, target)
        assert report.exit_code == 1
        assert report.first_divergence is not None
        assert report.first_divergence.module == "sampler"
        assert report.first_divergence.step == 0
        side = "target" if baseline is one else "baseline"
        assert (
            f"the {side} took token 2 (logit 1) after position 2 of request a"
            in report.first_divergence.finding.notes[0]
        )
        assert "its most likely token is 1 (4)" in report.first_divergence.finding.notes[0]


def test_near_ties_fork_of_recorded_tokens_at_equal_logits_blames_the_sampler(tmp_path: Path) -> None:
    report, found = diff_samples(tmp_path, (BASE, [0, 1, 1], [1, 2]), (BASE, [0, 1, 2], [2, 2]))
    assert found.verdict is Verdict.DIFFERS
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.module == "sampler"


def test_near_ties_runs_that_sample_at_random_differ(tmp_path: Path) -> None:
    report = compare(unsampled(tmp_path / "b", BASE, [0, 1]), unsampled(tmp_path / "t", BASE, [2, 1]))
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.module == "sampler"
    assert "sampling is random" in report.first_divergence.finding.notes[0]


def test_near_ties_fork_is_explained_without_sampled_tokens(tmp_path: Path) -> None:
    one, two = (
        unsampled(tmp_path / "b", TIED, [1, 2]),
        unsampled(tmp_path / "t", TURNED.astype(ml_dtypes.bfloat16), [2, 2]),
    )
    for baseline, target in ((one, two), (two, one)):
        report = compare(baseline, target)
        assert report.exit_code == 0
        assert next(f for f in report.findings if f.site == "sampler:out").verdict is Verdict.CLOSE


def test_near_ties_fork_after_wrong_logits_is_downstream(tmp_path: Path) -> None:
    report = compare(
        unsampled(tmp_path / "b", BASE, [1, 2]), unsampled(tmp_path / "t", BASE[:, [0, 2, 1]].copy(), [2, 2])
    )
    assert report.first_divergence is not None
    assert report.first_divergence.module == "lm_head"
    assert [each.module for each in report.divergences] == ["lm_head"]


@pytest.mark.parametrize("rows", [65])
def test_near_ties_many_flips_are_not_explained(tmp_path: Path, rows: int) -> None:
    for name, token in (("b", 0), ("t", 1)):
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(rows,), rows=[RowSpan("a", 0, rows, 0, 0)], token_ids=[0] * rows)
            run.put("lm_head:out", np.zeros((rows, 3), np.float32), dims="t v")
            run.put("sampler:out", np.full(rows, token), dims="t")
    report = diff(tmp_path / "b", tmp_path / "t")
    assert report.findings[1].verdict is Verdict.DIFFERS
    assert report.findings[1].error == rows


def test_near_ties_flip_explained_by_scores_is_not_the_divergence_despite_later_errors(tmp_path: Path) -> None:
    base = np.tile(BASE, (4, 1))
    close = (base - np.where(np.arange(3) == 1, 0.004, 0.0)).astype(ml_dtypes.bfloat16)
    for name, steps in (("b", (base, base)), ("t", (close, close[:, ::-1].copy()))):
        with RunFactory(tmp_path / name) as run:
            for first, logits in zip((0, len(base)), steps, strict=True):
                rows = RowSpan("a", first, len(base), 0, 0)
                run.step(grid=(len(base),), rows=[rows], token_ids=[1] * len(base))
                run.put("lm_head:in[input]", np.ones((len(base), 4), np.float32), dims="t h")
                run.put("lm_head:out", logits, dims="t v")
                sampled = logits[:, :2].astype(np.float32).argmax(1)
                run.put("sampler:out", sampled if first == 0 else np.zeros_like(sampled), dims="t")
    report = diff(tmp_path / "b", tmp_path / "t")
    assert next(f for f in report.findings if f.site == "sampler:out").verdict is Verdict.DIFFERS
    assert report.first_divergence is not None
    assert report.first_divergence.module == "lm_head"
