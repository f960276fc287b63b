"""Dependent steps: errors of later steps do not explain a difference in an early step."""

from pathlib import Path

import numpy as np
import pytest
from factories import RunFactory

from tapscope.comparator import CompareOptions, Verdict, compare

ROWS, WIDTH, STEPS = 24, 32, 4
WEIGHTS = {
    name: (np.random.default_rng(i).standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)
    for i, name in enumerate(("first", "second"))
}


def loop(path: Path, *, harm: float = 0.0, later: float = 0.0, time: float = 0.0, seed: int = 0) -> Path:
    """Write the steps of a denoising loop, each of which receives the output of the previous one.

    ``harm`` is added to a dumped value of step 0, ``later`` to one of step 1, and ``time`` to a scalar input of every
    step.
    """
    rng = np.random.default_rng(3)
    sample = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    noise = np.random.default_rng(100 + seed).standard_normal(sample.shape) * (1e-7 if seed else 0.0)
    with RunFactory(path) as run:
        for name, weight in WEIGHTS.items():
            run.site(f"net.{name}:out", params={"weight": weight.shape})
        for step in range(STEPS):
            run.step()
            sample = (sample * (1.0 + noise)).astype(np.float32)
            scale = np.float32(1.0 - step / STEPS + time)
            run.put("net:in[sample]", sample)
            run.put("net:in[time]", scale)
            run.put("net.first:in[input]", sample)
            hidden = (sample @ WEIGHTS["first"]).astype(np.float32)
            run.put("net.first:out", hidden)
            shifted = hidden + np.float32(harm if step == 0 else later if step == 1 else 0.0)
            run.put("net:tap[shifted]", shifted)
            run.put("net.second:in[input]", shifted)
            out = (np.tanh(shifted) @ WEIGHTS["second"] * scale).astype(np.float32)
            run.put("net.second:out", out)
            run.put("net:out", out)
            sample = np.tanh(sample + 4.0 * out).astype(np.float32)
    return path


@pytest.mark.parametrize("harm", [2.3, 0.3, 0.01])
def test_steps_floor_of_an_early_step_ignores_later_errors(tmp_path: Path, harm: float) -> None:
    baseline, target = loop(tmp_path / "b"), loop(tmp_path / "t", harm=harm, seed=1)
    report = compare(baseline, target)
    first = report.first_divergence
    assert first is not None
    assert (first.site, first.step) == ("net:tap[shifted]", 0)
    assert first.finding.verdict is Verdict.DIFFERS
    assert [each.module for each in report.divergences] == ["net"]
    alone = compare(baseline, target, CompareOptions(steps=frozenset({0}))).first_divergence
    assert alone is not None
    assert (alone.site, alone.step) == (first.site, first.step)


def test_steps_earliest_differing_step_wins(tmp_path: Path) -> None:
    report = compare(loop(tmp_path / "b"), loop(tmp_path / "t", time=0.05, later=3.0, seed=1))
    assert report.first_divergence is not None
    assert (report.first_divergence.site, report.first_divergence.step) == ("net:in[time]", 0)


def test_steps_that_only_round_agree(tmp_path: Path) -> None:
    report = compare(loop(tmp_path / "b"), loop(tmp_path / "t", seed=1))
    assert report.exit_code == 0
