"""Sampled tokens must be equal, unless a fork or a near tie of the logits explains them."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from factories import RunFactory

from tapscope.comparator import Finding, Report, Verdict, compare
from tapscope.observe import RowRun
from tapscope.run import open_run

BASE = np.array([[3.0, 1.0, 2.0], [2.0, 2.0005, -1.0], [0.5, 4.0, 1.0]], np.float32)


def write(path: Path, logits: np.ndarray, sampled: list[int], generated: list[int]) -> Path:
    with RunFactory(path) as run:
        run.step(grid=(3,), rows=[RowRun("a", 0, 3, 0, 0)], token_ids=[1, 0, 2])
        run.put("lm_head:out", logits, dims="t v")
        run.put("sampler:out", np.array(sampled), dims="t")
        for position, token in enumerate(generated, 3):
            run.step(phase="decode", grid=(1,), rows=[RowRun("a", position, 1, 0, 0)], token_ids=[token])
            run.put("lm_head:out", logits[2:], dims="t v")
    return path


def diff(tmp_path: Path, left: tuple, right: tuple) -> tuple[Report, Finding]:  # type: ignore[type-arg]
    with open_run(write(tmp_path / "b", *left)) as one, open_run(write(tmp_path / "t", *right)) as two:
        report = compare(one, two)
    return report, next(f for f in report.findings if f.site == "sampler:out")


def test_a_flip_between_logits_closer_than_their_error_is_explained(tmp_path: Path) -> None:
    noisy = BASE + np.array([[0.002, 0, 0], [0.003, -0.003, 0], [0, 0.003, 0]], np.float32)
    report, found = diff(tmp_path, (BASE, [0, 1, 1], []), (noisy.astype(ml_dtypes.bfloat16), [0, 0, 1], []))
    assert found.verdict is Verdict.CLOSE
    assert "near tie" in found.notes[0]
    assert report.exit_code == 0


def test_a_flip_that_the_logits_do_not_explain_differs(tmp_path: Path) -> None:
    report, found = diff(tmp_path, (BASE, [0, 1, 1], []), (BASE, [0, 1, 2], []))
    assert found.verdict is Verdict.DIFFERS
    assert report.first_divergence is not None
    assert report.first_divergence.module == "sampler"


def test_a_flip_behind_wrong_logits_is_not_excused(tmp_path: Path) -> None:
    wrong = BASE[:, [1, 0, 2]].copy()
    report, found = diff(tmp_path, (BASE, [0, 1, 1], []), (wrong, [1, 0, 0], []))
    assert found.verdict is Verdict.DIFFERS
    assert found.role == "downstream"
    assert report.first_divergence is not None
    assert report.first_divergence.module == "lm_head"


def test_a_flip_behind_which_the_request_forks_is_explained(tmp_path: Path) -> None:
    report, found = diff(tmp_path, (BASE, [0, 1, 1], [1, 2]), (BASE, [0, 1, 2], [2, 2]))
    assert found.verdict is Verdict.CLOSE
    assert "tokens part" in found.notes[0]
    assert report.coverage.forks[0].position == 3
    assert report.exit_code == 0


@pytest.mark.parametrize("rows", [65])
def test_many_flips_are_no_handful_of_ties(tmp_path: Path, rows: int) -> None:
    for name, token in (("b", 0), ("t", 1)):
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(rows,), rows=[RowRun("a", 0, rows, 0, 0)], token_ids=[0] * rows)
            run.put("lm_head:out", np.zeros((rows, 3), np.float32), dims="t v")
            run.put("sampler:out", np.full(rows, token), dims="t")
    with open_run(tmp_path / "b") as one, open_run(tmp_path / "t") as two:
        report = compare(one, two)
    assert report.findings[1].verdict is Verdict.DIFFERS
    assert report.findings[1].error == rows


def test_a_flip_that_follows_from_scores_is_not_where_runs_part_though_these_are_wrong_later(tmp_path: Path) -> None:
    base = np.tile(BASE, (4, 1))
    close = (base - np.where(np.arange(3) == 1, 0.004, 0.0)).astype(ml_dtypes.bfloat16)
    for name, steps in (("b", (base, base)), ("t", (close, close[:, ::-1].copy()))):
        with RunFactory(tmp_path / name) as run:
            for first, logits in zip((0, len(base)), steps, strict=True):
                rows = RowRun("a", first, len(base), 0, 0)
                run.step(grid=(len(base),), rows=[rows], token_ids=[1] * len(base))
                run.put("lm_head:in[input]", np.ones((len(base), 4), np.float32), dims="t h")
                run.put("lm_head:out", logits, dims="t v")
                sampled = logits[:, :2].astype(np.float32).argmax(1)
                run.put("sampler:out", sampled if first == 0 else np.zeros_like(sampled), dims="t")
    with open_run(tmp_path / "b") as one, open_run(tmp_path / "t") as two:
        report = compare(one, two)
    assert next(f for f in report.findings if f.site == "sampler:out").verdict is Verdict.DIFFERS
    assert report.first_divergence is not None
    assert report.first_divergence.module == "lm_head"
