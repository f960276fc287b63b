"""Cases in which SGLang's comparator is known to report a pass for runs that differ, none of which passes here."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from comparator_toy import Toy, prompts, weights
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import Report, compare
from tapscope.core.errors import NothingInCommonError
from tapscope.core.observe import RowSpan

TABLES = weights(layers=2)


def diff_prompts(tmp_path: Path, left: Mapping[str, Sequence[int]], right: Mapping[str, Sequence[int]]) -> Report:
    return diff(Toy(TABLES).write(tmp_path / "b", left), Toy(TABLES).write(tmp_path / "t", right))


def test_false_passes_no_common_sequence_fails(tmp_path: Path) -> None:
    with pytest.raises(NothingInCommonError, match="no token row in common"):
        diff_prompts(tmp_path, {"0": [1, 2, 3]}, {"0": [4, 5, 6]})


def test_false_passes_no_common_sequence_of_different_models_says_how_they_differ(tmp_path: Path) -> None:
    for name, token, size in (("b", 1, 64), ("t", 2, 96)):
        with RunFactory(tmp_path / name, model_config={"hidden_size": size, "vocab_size": 10 * size}) as run:
            run.step(grid=(1,), rows=[RowSpan("0", 0, 1, 0, 0)], token_ids=[token])
            run.put("model.norm:out", np.ones((1, size), np.float32))
    said = "of different models .hidden_size 64 against 96, vocab_size 640 against 960.*compare runs of one checkpoint"
    with pytest.raises(NothingInCommonError, match=said):
        compare(tmp_path / "b", tmp_path / "t")


def test_false_passes_half_of_the_batch_missing_fails(tmp_path: Path) -> None:
    report = diff_prompts(tmp_path, prompts((9, 7)), prompts((9,)))
    assert report.num_bad == 0
    assert report.exit_code == 1
    assert "request 1 is only in b" in report.coverage.partial


def test_false_passes_run_truncated_to_one_token_fails(tmp_path: Path) -> None:
    ids = prompts((101,))["0"]
    report = diff_prompts(tmp_path, {"0": ids}, {"0": ids[:1]})
    assert report.exit_code == 1
    assert report.coverage.num_rows_aligned == 1
    assert "100 token rows of b were never computed by t" in report.coverage.partial


def test_false_passes_mostly_unmatched_sites_fail(tmp_path: Path) -> None:
    report = diff(
        Toy(TABLES, prefix="one.").write(tmp_path / "b", prompts((5,))),
        Toy(TABLES, prefix="other.").write(tmp_path / "t", prompts((5,))),
    )
    assert report.num_bad == 0
    assert (
        report.coverage.num_sites_only_baseline
        == report.coverage.num_sites_only_target
        > report.coverage.num_sites_matched
    )
    assert report.exit_code == 1
    assert any("have a counterpart" in s for s in report.coverage.partial)


@pytest.mark.parametrize("fault", ["noise in one token", "one token zeroed", "4 % scale"])
def test_false_passes_fault_diluted_by_a_global_metric_fails(tmp_path: Path, fault: str) -> None:
    def break_it(x: np.ndarray) -> np.ndarray:
        if fault == "4 % scale":
            return x * 1.04
        x[100] = 0 if "zeroed" in fault else np.random.default_rng(0).standard_normal(x.shape[1])
        return x

    hooks = {"model.layers.1.mlp.down_proj:out": break_it}
    report = diff(
        Toy(TABLES).write(tmp_path / "b", prompts((400,))),
        Toy(TABLES, dtype="bfloat16", hooks=hooks).write(tmp_path / "t", prompts((400,))),
    )
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.module == "model.layers.1.mlp.down_proj"


def test_false_passes_record_missing_in_one_step_fails(tmp_path: Path) -> None:
    cut = tmp_path / "t"
    Toy(TABLES).write(cut, prompts((9,)), steps=(5,)).close()
    index = cut / "rank-00000" / "records.jsonl"
    lines = index.read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if '"lm_head:out"' in line and '"record"' in line)
    index.write_text("".join(lines[:last] + lines[last + 1 :]))
    report = diff(Toy(TABLES).write(tmp_path / "b", prompts((9,)), steps=(5,)), cut)
    assert report.num_bad == 0
    assert report.exit_code == 1
    assert any("lost between hook and disk" in s for s in report.coverage.partial)
    assert any("lacks records" in s for s in report.coverage.partial)
