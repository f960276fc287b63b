"""What has no token rows meets by step; what meets nowhere is said."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.cli import main
from tapscope.comparator import CompareOptions, Verdict
from tapscope.core.errors import RuleError
from tapscope.core.observe import RowSpan
from tapscope.run_format.run import Run
from tapscope.sources import open_run

RNG = np.random.default_rng(0)
MASKS = RNG.standard_normal((9, 4, 4)).astype(np.float32)


def rowless(path: Path, steps: Mapping[int, int]) -> Run:
    """Step -> which of the masks it holds; nobody says what rows a step has."""
    with RunFactory(path) as run:
        for number in range(max(steps) + 1):
            run.step(phase="train")
            if number in steps:
                run.put("loss:out", MASKS[steps[number]])
    return open_run(path)


def with_rows(path: Path, batches: Sequence[Sequence[int]], values: Sequence[np.ndarray], site: str) -> Run:
    """Steps of one token each of the given requests."""
    with RunFactory(path) as run:
        for batch, value in zip(batches, values, strict=True):
            rows = [RowSpan(f"r{i}", 0, 1, 0, slot) for slot, i in enumerate(batch)]
            run.step(grid=(len(batch),), rows=rows, token_ids=batch)
            run.put("norm:out", np.asarray(batch, np.float32)[:, None] * np.ones((1, 5), np.float32), dims="t h")
            run.put(site, value)
    return open_run(path)


def test_align_steps_by_number_without_row_tables(tmp_path: Path) -> None:
    baseline, target = rowless(tmp_path / "b", {0: 0, 1: 1, 2: 2}), rowless(tmp_path / "t", {1: 1, 2: 2})
    report = diff(baseline, target)
    assert report.findings[0].verdict is Verdict.SAME
    assert "the target (t) lacks records that the baseline has, at loss:out" in report.coverage.partial
    swapped = diff(open_run(target.path), open_run(baseline.path))
    assert "the baseline (t) lacks records that the target has, at loss:out" in swapped.coverage.partial


def test_align_names_the_run_that_lacks_records_also_if_both_do(tmp_path: Path) -> None:
    sites = {"b": ({"x", "y"}, {"x", "y"}, {"y", "z"}), "t": ({"x", "y"}, {"z"}, {"x", "y", "z"})}
    for name, steps in sites.items():
        with RunFactory(tmp_path / name) as run:
            for each in steps:
                run.step(phase="train")
                for site in sorted(each):
                    run.put(f"{site}:out", MASKS[0])
    report = diff(tmp_path / "b", tmp_path / "t")
    assert list(report.coverage.partial) == [
        "the baseline (b) lacks records that the target has, at 2 sites, first x:out",
        "the target (t) lacks records that the baseline has, at 2 sites, first x:out",
    ]
    allowed = diff(tmp_path / "b", tmp_path / "t", CompareOptions(allow_missing=("x:out", "z:out")))
    assert list(allowed.coverage.partial) == ["the target (t) lacks records that the baseline has, at y:out"]
    assert "2 sites allowed to be missing, e.g. x:out" in allowed.coverage.warnings


def test_align_steps_in_order_without_a_common_number(tmp_path: Path) -> None:
    report = diff(rowless(tmp_path / "b", {0: 0, 1: 1}), rowless(tmp_path / "t", {4: 0, 5: 1}))
    assert report.findings[0].verdict is Verdict.SAME
    assert "no step number is in both runs: steps are matched in order, 0 with 4 and so on" in report.coverage.warnings


def test_align_shift_steps_corrects_a_constant_offset(tmp_path: Path) -> None:
    one, two = rowless(tmp_path / "b", {0: 0, 1: 1, 2: 2}), rowless(tmp_path / "t", {1: 0, 2: 1, 3: 2})
    assert diff(one, two).findings[0].verdict is Verdict.DIFFERS
    report = diff(open_run(one.path), open_run(two.path), CompareOptions(shift_steps=1))
    assert (report.findings[0].verdict, report.exit_code) == (Verdict.SAME, 0)
    chosen = CompareOptions(shift_steps=1, steps=frozenset({1}))
    assert [
        f.target and f.target.num_records for f in diff(open_run(one.path), open_run(two.path), chosen).findings
    ] == [1]


def test_align_shift_steps_with_row_tables_applies_to_sites_without_rows(tmp_path: Path) -> None:
    one, two = (with_rows(tmp_path / name, [[0, 1], [2]], [np.ones(1)] * 2, ":tap[x]") for name in "bt")
    report = diff(one, two, CompareOptions(shift_steps=1, skip=(":tap[x]",)))
    assert report.findings[0].verdict is Verdict.SAME
    assert any(note.startswith("--shift-steps 1: token rows are matched") for note in report.coverage.warnings)


def test_align_shift_steps_without_a_match_lists_the_steps(tmp_path: Path) -> None:
    one, two = rowless(tmp_path / "b", {0: 0, 1: 1}), rowless(tmp_path / "t", {0: 0, 1: 1})
    report = diff(one, two, CompareOptions(shift_steps=7))
    assert report.exit_code == 3
    assert "no step in common here: 0-1 against 0-1; see --shift-steps" in report.findings[0].notes[0]


def test_align_selected_step_must_exist_in_both_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = rowless(tmp_path / "b", {0: 0, 1: 1, 2: 2}), rowless(tmp_path / "t", {0: 0, 1: 1})
    with pytest.raises(RuleError, match=r"no step 2 in .*t; steps are 0-1"):
        diff(one, two, CompareOptions(steps=frozenset({2})))
    assert main(["diff", str(one.path), str(two.path), "--steps", "2"]) == 2
    assert "no step 2 in" in capsys.readouterr().err


def test_align_batch_level_values_of_equal_batches(tmp_path: Path) -> None:
    one = with_rows(tmp_path / "b", [[1, 2], [3, 4]], MASKS[:2], "mask:out")
    two = with_rows(tmp_path / "t", [[3, 4], [1, 2]], MASKS[1::-1], "mask:out")
    report = diff(one, two)
    assert [f.verdict for f in report.findings] == [Verdict.SAME, Verdict.SAME]


def test_align_batch_level_value_ignores_the_order_of_requests(tmp_path: Path) -> None:
    losses = [np.float32([0.5]), np.float32([0.25])]
    one = with_rows(tmp_path / "b", [[1, 2], [3, 4]], losses, "loss:out")
    two = with_rows(tmp_path / "t", [[4, 3], [2, 1]], losses[::-1], "loss:out")
    assert [f.verdict for f in diff(one, two).findings] == [Verdict.SAME, Verdict.SAME]


def test_align_reports_batch_level_values_without_an_equal_batch(tmp_path: Path) -> None:
    one = with_rows(tmp_path / "b", [[1, 2], [3, 4]], MASKS[:2], "mask:out")
    two = with_rows(tmp_path / "t", [[1], [2, 3, 4]], MASKS[2:4], "mask:out")
    report = diff(one, two)
    assert [f.site for f in report.findings] == ["norm:out"]
    said = "1 site not compared, e.g. mask:out: no token axis, and no two steps of the runs hold the same rows"
    assert said in report.coverage.warnings
    assert report.exit_code == 0


def test_align_reports_masks_of_different_batches(tmp_path: Path) -> None:
    """The key axis has the batch's padded length; decoding, the length so far."""
    one = with_rows(tmp_path / "b", [[1, 2, 3, 4]], [np.ones((4, 1, 1, 1), np.int64)], ":in[attention_mask]")
    two = with_rows(tmp_path / "t", [[1, 2], [3, 4]], [np.ones((2, 5), np.int64)] * 2, ":in[attention_mask]")
    report = diff(one, two)
    assert [f.site for f in report.findings] == ["norm:out"]
    assert any("attention_mask]: an attention mask" in warning for warning in report.coverage.warnings)
    assert report.exit_code == 0


def test_align_mask_of_the_other_padding_side_differs(tmp_path: Path) -> None:
    for name, slot in (("b", 0), ("t", 1)):
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(2, 3), rows=[RowSpan("a", 0, 3, 0, 0), RowSpan("b", 0, 2, 0, 3 + slot)], token_ids=range(5))
            mask = np.ones((2, 1, 3, 3), bool)
            mask[1, :, :, 2 - 2 * slot] = False
            run.put("model:in[attention_mask]", mask)
            tensor = np.full((2, 3, 4), slot, np.float32)
            tensor[0], tensor[1, slot : slot + 2] = 7, 8
            run.put("norm:out", tensor, dims="b s h")
    report = diff(open_run(tmp_path / "b"), open_run(tmp_path / "t"))
    assert [(f.site, f.verdict) for f in report.findings] == [("norm:out", Verdict.SAME)]
    assert report.exit_code == 0


def test_align_parameters_regardless_of_rows(tmp_path: Path) -> None:
    weight = [MASKS[0]] * 2
    one = with_rows(tmp_path / "b", [[1, 2], [3, 4]], weight, "norm:param[weight]")
    two = with_rows(tmp_path / "t", [[1], [2, 3, 4]], [MASKS[0], MASKS[1]], "norm:param[weight]")
    verdicts = {f.site: f.verdict for f in diff(one, two).findings}
    assert verdicts["norm:param[weight]"] is Verdict.DIFFERS
