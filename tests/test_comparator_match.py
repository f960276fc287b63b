"""Sites meet by name, in passes; each pair remembers the pass that made it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import RunFactory

from tapscope.comparator import CompareOptions, Finding, Report, Verdict, compare
from tapscope.errors import ConfigError, NothingInCommonError, RuleError
from tapscope.observe import RowRun
from tapscope.run import open_run

ONES = np.ones((3, 4), np.float32)


def write(path: Path, sites: Mapping[str, Any], steps: int = 1) -> Path:
    with RunFactory(path) as run:
        for step in range(steps):
            run.step(grid=(3,), rows=[RowRun("a", 3 * step, 3, 0, 0)], token_ids=[1, 2, 3])
            for site, value in sites.items():
                run.put(site, value)
    return path


def diff(tmp_path: Path, left: Any, right: Any, **options: Any) -> Report:
    left, right = (side if isinstance(side, dict) else dict.fromkeys(side, ONES) for side in (left, right))
    with open_run(write(tmp_path / "b", left)) as one, open_run(write(tmp_path / "t", right)) as two:
        return compare(one, two, CompareOptions(**options))


def pairs(report: Report) -> list[tuple[str | None, str | None, str]]:
    def name(side: Any) -> str | None:
        return side.site if side else None

    return [(name(f.baseline), name(f.target), f.matched_by) for f in report.findings]


def only(report: Report) -> Finding:
    (finding,) = report.findings
    return finding


def test_equal_names_match_exactly(tmp_path: Path) -> None:
    assert pairs(diff(tmp_path, ["norm:out"], ["norm:out"])) == [("norm:out", "norm:out", "exact")]


@pytest.mark.parametrize(
    ("left", "right", "how"),
    [
        ("model.layers.0.self_attn:out[0]", "model.layers.0.self_attn:out", "hf port"),
        ("model.layers.0.mlp:out", "layers.0.mlp:out", "hf root"),
        ("model.language_model.layers.0:out[0]", "model.layers.0:out", "hf root"),
        ("model:out[last_hidden_state]", ":out[last_hidden_state]", "hf root"),
        ("layers.0.mlp:in[x]", "layers.0.mlp:in[hidden_states]", "only input"),
    ],
)
def test_frameworks_spell_one_module_differently(tmp_path: Path, left: str, right: str, how: str) -> None:
    assert pairs(diff(tmp_path, [left], [right])) == [(left, right, how)]
    assert pairs(diff(tmp_path / "turned", [right], [left])) == [(right, left, how)]


def test_a_spelling_that_two_sites_share_matches_neither(tmp_path: Path) -> None:
    report = diff(tmp_path, ["norm:out", "model.layers.0:out", "layers.0:out"], ["norm:out", "x.y:out"])
    assert pairs(report)[0] == ("norm:out", "norm:out", "exact")
    assert [f.verdict for f in report.findings].count(Verdict.ONLY_BASELINE) == 2


def test_a_module_with_two_inputs_is_not_guessed(tmp_path: Path) -> None:
    report = diff(tmp_path, ["n:out", "n:in[a]", "n:in[b]"], ["n:out", "n:in[c]"])
    assert sorted(f.verdict for f in report.findings) == ["only-baseline", "only-baseline", "only-target", "same"]


def test_summands_of_one_side_meet_the_other_sides_sum_beside_its_own_pair(tmp_path: Path) -> None:
    report = diff(tmp_path, ["mlp.down:out"], ["mlp.down.partial:out", "mlp.down:out"])
    assert pairs(report) == [
        ("mlp.down:out", "mlp.down.partial:out", "partial sum"),
        ("mlp.down:out", "mlp.down:out", "exact"),
    ]
    assert [f.site for f in report.findings] == ["mlp.down.partial:out", "mlp.down:out"]


def test_findings_come_in_the_targets_execution_order(tmp_path: Path) -> None:
    report = diff(tmp_path, ["a:out", "z:out", "b:out", "c:out"], ["c:out", "x:out", "b:out", "a:out"])
    assert [f.site for f in report.findings] == ["c:out", "x:out", "b:out", "a:out", "z:out"]
    assert [f.order for f in report.findings] == [0, 1, 2, 3, 4]


def test_a_selection_applies_to_both_sides(tmp_path: Path) -> None:
    names = ["model.layers.0:out", "model.layers.1:out", "model.layers.1:in[x]", "model.norm:out"]
    report = diff(tmp_path, names, names, layers=frozenset({1}), skip=("*:in[x]",))
    assert [f.site for f in report.findings] == ["model.layers.1:out"]
    report = diff(tmp_path / "glob", names, names, sites=("norm", "layers.0"))
    assert [f.site for f in report.findings] == ["model.layers.0:out", "model.norm:out"]


def test_a_step_selection_applies_to_both_sides(tmp_path: Path) -> None:
    sites = {"norm:out": ONES}
    with (
        open_run(write(tmp_path / "b", sites, steps=3)) as one,
        open_run(write(tmp_path / "t", sites, steps=3)) as two,
    ):
        report = compare(one, two, CompareOptions(steps=frozenset({1, 2})))
    assert only(report).rows.compared == 6
    assert report.coverage.is_complete


def test_a_glob_that_matches_nothing_is_an_error_that_says_what_would(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"no site matches 'layers\.9' in .*; layers run 0"):
        diff(tmp_path, ["layers.0:out"], ["layers.0:out"], sites=("layers.9",))


def test_no_site_in_common_is_an_error_that_names_examples(tmp_path: Path) -> None:
    with pytest.raises(NothingInCommonError, match=r"e\.g\. alpha:out against beta:out"):
        diff(tmp_path, ["alpha:out"], ["beta:out"])


@pytest.mark.parametrize("bad", [{"rtol": -1.0}, {"atol": float("nan")}])
def test_a_tolerance_that_cannot_be_meant_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="is no tolerance"):
        CompareOptions(**bad)  # type: ignore[arg-type]


def test_a_whole_layer_that_one_run_lacks_is_partial_data(tmp_path: Path) -> None:
    report = diff(tmp_path, ["layers.0:out", "layers.1:out"], ["layers.0:out"])
    assert report.coverage.partial == ("layer 1 is only in b",)
    assert report.exit_code == 1


def test_partial_data_may_be_allowed(tmp_path: Path) -> None:
    report = diff(tmp_path, ["layers.0:out", "layers.1:out"], ["layers.0:out"], allow_partial=True)
    assert not report.coverage.is_complete
    assert report.exit_code == 0
