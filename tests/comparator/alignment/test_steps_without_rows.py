"""Runs in which only some steps have token rows, such as a pipeline of a text encoder and a denoiser."""

from pathlib import Path

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.core.observe import RowSpan


def write(path: Path, *, num_texts: int = 1, num_noises: int = 3, scale: float = 1.0) -> Path:
    """Write the steps of a text encoder, then those of a denoiser; values grow with the step."""
    with RunFactory(path) as run:
        for _ in range(num_texts):
            run.step(grid=(3,), rows=[RowSpan("a", 0, 3, 0, 0)], token_ids=[1, 2, 3])
            run.put("text:out", np.ones((3, 4), np.float32))
        for i in range(num_noises):
            run.step()
            run.put("unet:out", np.full((2, 5), (i + 1) * (scale if i else 1.0), np.float32))
    return path


@pytest.mark.parametrize("num_texts", [1, 2])
def test_steps_without_rows_are_compared_by_number_or_in_order(tmp_path: Path, num_texts: int) -> None:
    baseline = write(tmp_path / "a")
    same = diff(baseline, write(tmp_path / "b", num_texts=num_texts))
    assert same.exit_code == 0
    assert {f.site for f in same.findings} == {"text:out", "unet:out"}
    assert any("are matched in order, 1 with 2" in w for w in same.coverage.warnings) == (num_texts == 2)
    wrong = diff(baseline, write(tmp_path / "c", num_texts=num_texts, scale=1.5))
    assert wrong.first_divergence is not None
    assert (wrong.first_divergence.site, wrong.first_divergence.step) == ("unet:out", num_texts + 1)
