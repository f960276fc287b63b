"""Plain values (numbers, strings, booleans) must be equal, unless the user allows the site to differ."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.cli import main
from tapscope.comparator import Report, Verdict, compare
from tapscope.core.errors import RuleError
from tapscope.core.observe import RowSpan

SCALE = "layers.0.attn:in[sm_scale]"


def write(path: Path, values: dict[str, Any], *, steps: int = 1, tensor: bool = False) -> Path:
    with RunFactory(path) as run:
        for step in range(steps):
            run.step()
            if tensor:
                run.put("layers.0.attn:in[q]", np.ones((3, 4), np.float32))
            for site, value in values.items():
                run.put_value(site, value(step) if callable(value) else value)
            if tensor:
                run.put("layers.0.attn:out", np.ones((3, 4), np.float32))
                run.put("norm:out", np.ones((3, 4), np.float32))
    return path


def diff_values(
    tmp_path: Path, left: Any, right: Any, *, tensor: bool = False, steps: int = 1, **options: Any
) -> Report:
    one = write(tmp_path / "b", {SCALE: left}, steps=steps, tensor=tensor)
    two = write(tmp_path / "t", {SCALE: right}, steps=steps, tensor=tensor)
    return diff(one, two, **options)


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize(
    ("left", "right"), [(0.125, 0.25), (4, 5), ("silu", "gelu"), (True, False), ([1, 2], [1, 3]), (1, "1")]
)
def test_plain_values_that_differ_fail(tmp_path: Path, left: Any, right: Any, tensor: bool) -> None:
    report = diff_values(tmp_path, left, right, tensor=tensor)
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.site == SCALE
    assert any("a plain value differs" in note for note in report.first_divergence.finding.notes)
    assert "[]" not in str(report)


@pytest.mark.parametrize(("left", "right"), [(0.125, 0.125), (1, 1.0), (float("nan"), float("nan"))])
def test_plain_values_that_are_equal_are_the_same(tmp_path: Path, left: Any, right: Any) -> None:
    report = diff_values(tmp_path, left, right, tensor=True)
    assert report.exit_code == 0
    assert {f.verdict for f in report.findings} == {Verdict.SAME}


def test_plain_values_name_the_step_that_differs(tmp_path: Path) -> None:
    report = diff_values(tmp_path, lambda step: step, lambda step: step + 10 * (step == 2), steps=4, tensor=True)
    assert report.first_divergence is not None
    assert report.first_divergence.step == 2
    assert report.first_divergence.finding.notes[0] == "a plain value differs: 2 against 12"


def test_plain_values_allow_differ_is_reported_but_does_not_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = diff_values(tmp_path, 0.125, 0.25, tensor=True, allow_differ=("*:in[sm_scale]",))
    assert report.exit_code == 0
    assert any("1 site allowed to differ" in warning for warning in report.coverage.warnings)
    words = ["diff", str(tmp_path / "b"), str(tmp_path / "t")]
    assert main(words) == 1
    assert "0.125 against 0.25" in capsys.readouterr().out
    assert main([*words, "--allow-differ", "*:in[sm_scale]"]) == 0
    assert "allowed to differ" in capsys.readouterr().out
    with pytest.raises(RuleError, match="no site matches"):
        diff_values(tmp_path / "again", 0.125, 0.25, allow_differ=("*:in[scale]",))


@pytest.mark.parametrize("site", ["model:in[use_cache]", "rotary_pos_emb:in[packed_seq]"])
def test_plain_values_that_affect_no_row_are_ignored(tmp_path: Path, site: str) -> None:
    one = write(tmp_path / "b", {site: True}, tensor=True)
    two = write(tmp_path / "t", {site: False}, tensor=True)
    report = diff(one, two)
    assert report.exit_code == 0
    assert any("1 plain value not equal" in warning for warning in report.coverage.warnings)


def write_padded(path: Path, length: int, value: int) -> Path:
    """Two requests of 3 and 2 tokens in a batch padded to ``length`` columns."""
    hidden = np.zeros((2, length, 4), np.float32)
    hidden[0, :3], hidden[1, :2] = 1.0, 2.0
    with RunFactory(path) as run:
        rows = [RowSpan("0", 0, 3, 0, 0), RowSpan("1", 0, 2, 0, length)]
        run.step(grid=(2, length), rows=rows, token_ids=[1, 2, 3, 4, 5])
        run.put_value("rotary_pos_emb:in[max_seq_len]", value)
        run.put("norm:out", hidden, dims="b s h")
    return path


@pytest.mark.parametrize(("value", "code"), [(4, 0), (5, 1)])
def test_plain_values_batch_size_of_different_padding_is_excluded(tmp_path: Path, value: int, code: int) -> None:
    """Megatron pads sequences to a multiple of its ranks and hands the length on as a number."""
    one, two = write_padded(tmp_path / "b", 3, 3), write_padded(tmp_path / "t", 4, value)
    report = compare(one, two)
    assert report.exit_code == code
    assert any("the runs batch differently" in each for each in report.coverage.warnings) == (code == 0)


def test_plain_values_logits_to_keep_may_differ_between_batches(tmp_path: Path) -> None:
    """The same two requests in one step, and in two."""
    rows, logits = [RowSpan("a", 0, 3, 0, 0), RowSpan("b", 0, 2, 0, 3)], np.eye(2, 4, dtype=np.float32)
    with RunFactory(tmp_path / "together") as run:
        run.step(grid=(5,), rows=rows, token_ids=[1, 2, 3, 4, 5])
        run.put(":in[logits_to_keep]", np.array([2, 4]), dims="t", rows=[(2, 1), (4, 1)])
        run.put(":out[logits]", logits, dims="t v", rows=[(2, 1), (4, 1)])
    with RunFactory(tmp_path / "alone") as run:
        for index, span in enumerate(rows):
            run.step(
                grid=(span.count,),
                rows=[RowSpan(span.request, 0, span.count, 0, 0)],
                token_ids=[[1, 2, 3], [4, 5]][index],
            )
            run.put(":in[logits_to_keep]", np.array([span.count - 1]), dims="t", rows=[(span.count - 1, 1)])
            run.put(":out[logits]", logits[index : index + 1], dims="t v", rows=[(span.count - 1, 1)])
    report = diff(tmp_path / "together", tmp_path / "alone")
    assert report.exit_code == 0, str(report)
    found = next(finding for finding in report.findings if "logits_to_keep" in finding.site)
    assert found.verdict is Verdict.CLOSE
