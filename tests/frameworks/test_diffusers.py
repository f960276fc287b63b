"""A tiny random diffusers pipeline, executed: which parts are recorded, and how an incorrect schedule is reported.

Skipped without diffusers; benchmarks.frameworks.pairs prints the whole table.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest
from bench_packages import package

pytest.importorskip("diffusers")

from tapscope.comparator import compare
from tapscope.core.errors import ConfigError
from tapscope.frameworks.diffusers import capture
from tapscope.sources import open_run

package()
script: Any = importlib.import_module("benchmarks.frameworks.diffusers_cpu")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers"),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run: Path = script.captured(tmp_path_factory.mktemp("diffusers") / "reference", "float32", "clean")
    return run


def test_capture_has_every_part_of_the_pipeline(reference: Path) -> None:
    with open_run(reference) as run:
        steps = {record.key.model: set[int]() for record in run.records}
        for record in run.records:
            steps[record.key.model].add(record.key.step)
        assert steps == {"text_encoder": {0, 1}, "scheduler": {2, 4, 6, 8}, "unet": {3, 5, 7}, "vae": {9}}
        assert run.ledger().outside_step == 0
        assert run.manifest["framework"] == "diffusers"


@pytest.mark.parametrize(("dtype", "bug"), [("bfloat16", "clean"), ("bfloat16", "sigma schedule")])
def test_capture_diff_of_pipelines(reference: Path, tmp_path: Path, dtype: str, bug: str) -> None:
    report = compare(reference, script.captured(tmp_path / "run", dtype, bug))
    assert report.coverage.num_sites_only_baseline == report.coverage.num_sites_only_target == 0
    assert report.exit_code == int(bug != "clean"), str(report)
    if (divergence := report.first_divergence) is not None:
        assert divergence.module == "scheduler.schedule"
        assert divergence.inputs == "none"


def test_capture_of_another_object_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dict has no components"), capture({}, tmp_path / "run"):
        pass
