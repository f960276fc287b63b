"""`python -m benchmarks.floor_ablation`: the effect of disabling one part of the comparator on known pairs of runs."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from bench_packages import package
from comparator_toy import Toy, damaged, prompts, weights

package()
ablation: Any = importlib.import_module("benchmarks.floor_ablation")
lines, outcomes, weigh = ablation.lines, ablation.outcomes, ablation.weigh
TABLES = weights(layers=3)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    spoiled = damaged(TABLES, "model.layers.1.mlp.up_proj", "scaled")
    for name, toy in {
        "base": Toy(TABLES),
        "ranks": Toy(TABLES, dtype="bfloat16", tp=2),
        "bad": Toy(spoiled, dtype="bfloat16"),
    }.items():
        toy.write(tmp_path / name, prompts((13, 9))).close()
    return tmp_path


def entry(target: str, expect: str = "") -> dict[str, object]:
    sides = {"baseline": "base", "target": target}
    return {"kind": "sweep", "name": target, "is_bug": bool(expect), "expect": expect, **sides}


def test_ablation_switches_off_only_parts_that_apply(cache: Path) -> None:
    _, found = outcomes(cache, entry("ranks"))
    assert found[""] == "good"
    assert "rank_sum" in found
    assert not {"loss_gradient", "optimizer_updates", "exclude_rerouted_rows"} & set(found)


def test_ablation_counts_a_named_bug_as_good(cache: Path) -> None:
    assert outcomes(cache, entry("bad", "model.layers.1.mlp.up_proj"))[1][""] == "good"
    assert outcomes(cache, entry("bad", "model.layers.0.mlp.up_proj"))[1][""] == "bad"
    assert outcomes(cache, entry("ranks", "model.norm"))[1][""] == "pass"


def test_ablation_table_counts_lost_and_gained() -> None:
    results = [
        {"name": "a", "is_bug": True, "outcomes": {"": "good", "path_bound": "pass", "rank_sum": "good"}},
        {"name": "b", "is_bug": True, "outcomes": {"": "bad", "path_bound": "good"}},
        {"name": "c", "is_bug": False, "outcomes": {"": "good", "rank_sum": "bad"}},
    ]
    totals, worth = weigh(json.loads(json.dumps(results)))
    assert (worth["path_bound"].lost, worth["path_bound"].missed, worth["path_bound"].found) == (["a"], ["a"], ["b"])
    assert worth["rank_sum"].alarms == ["c"]
    table = list(lines(totals, worth))
    assert "| effect `rank_sum` | 2 | 0 (0) | 0 | 1 (0) |" in table
    assert "| effect `path_bound` | 2 | 1 (1) | 1 | 0 (0) |" in table
