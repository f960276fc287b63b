"""A tensor of another shape is a difference of the runs: a culprit, and no input of which anything is said."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.cli import main
from tapscope.comparator import Report
from tapscope.core.observe import RowSpan

ROWS = 12


def write(path: Path, experts: int, shift: float, *, step_of_bug: int = 0, steps: int = 1) -> Path:
    """A router that chooses ``experts`` for each token, and a module that is given its scores."""
    rng = np.random.default_rng(0)
    with RunFactory(path) as run:
        for step in range(steps):
            run.step(grid=(ROWS,), rows=[RowSpan("a", ROWS * step, ROWS, 0, 0)], token_ids=[1] * ROWS)
            x = rng.standard_normal((ROWS, 16)).astype(np.float32)
            scores = rng.standard_normal((ROWS, 4)).astype(np.float32)
            wrong = np.float32(shift if step >= step_of_bug else 0)
            run.put("layers.0.mlp.gate:in[x]", x, dims="t h")
            run.put("layers.0.mlp.gate:out[1]", scores[:, :experts], dims="t k")
            run.put("layers.0.mlp.experts:in[x]", x, dims="t h")
            run.put("layers.0.mlp.experts:in[scores]", scores[:, :experts], dims="t k")
            run.put("layers.0.mlp.experts:out", 3 * x + wrong, dims="t h")
            run.put("layers.1:in[x]", 3 * x + wrong, dims="t h")
            run.put("layers.1:out", 2 * x + wrong, dims="t h")
    return path


def diff_experts(tmp_path: Path, experts: int, shift: float) -> Report:
    return diff(write(tmp_path / "b", 4, 0.0), write(tmp_path / "t", experts, shift))


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_shapes_that_differ_are_the_culprit(tmp_path: Path, capsys: pytest.CaptureFixture[str], shift: float) -> None:
    report = diff_experts(tmp_path, 3, shift)
    assert report.first_divergence is not None
    assert report.first_divergence.site == "layers.0.mlp.gate:out[1]"
    assert [d.module for d in report.divergences] == ["layers.0.mlp.gate"]
    assert report.first_divergence.inputs == "equal"
    assert main(["diff", str(tmp_path / "b"), str(tmp_path / "t")]) == 1
    what, _, why, follows = capsys.readouterr().out.splitlines()[-4:]
    assert what == "what      layers.0.mlp.gate (out[1]) has another shape"
    assert why.startswith("why       shapes (12, 4) and (12, 3) differ beyond the token rows; ")
    assert why.endswith("; inputs equal")
    assert "--dims 'baseline:layers.*.mlp.gate:out[1]=t k=3'" in follows  # its first three columns are equal


def test_shapes_inputs_are_equal_when_their_bytes_are(tmp_path: Path) -> None:
    report = diff_experts(tmp_path, 4, 0.5)
    assert report.first_divergence is not None
    assert report.first_divergence.module == "layers.0.mlp.experts"
    assert report.first_divergence.evidence == "inputs equal"


def test_shapes_uncompared_inputs_are_not_reported(tmp_path: Path) -> None:
    """The scores lie on two ranks, and nobody says how."""
    paths: list[Path] = []
    for name, shift in (("b", 0.0), ("t", 0.5)):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((ROWS, 16)).astype(np.float32)
        parts: dict[int, Any] = {rank: rng.standard_normal((ROWS, 3)).astype(np.float32) for rank in (0, 1)}
        with RunFactory(tmp_path / name, mesh={"tp": 2}) as run:
            run.step()
            run.put("mlp:in[x]", {0: x, 1: x})
            run.put("mlp:in[scores]", parts if name == "t" else np.ones((ROWS, 4), np.float32))
            run.put("mlp:out", {rank: x + np.float32(shift) for rank in (0, 1)})
        paths.append(tmp_path / name)
    first = diff(paths[0], paths[1]).first_divergence
    assert first is not None
    assert first.module == "mlp"
    assert first.inputs == "not compared"
    assert first.evidence == "inputs equal, but in[scores] could not be compared"
    assert not first.is_certain
