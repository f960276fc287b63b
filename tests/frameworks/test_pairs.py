"""All pairs of benchmarks/frameworks except vLLM, which needs a separate environment: soak.

The default tests of each framework are in the other files of this directory and in tests/comparator/test_megatron.py.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_packages import ROOT, package

package()
pair: Any = importlib.import_module("benchmarks.frameworks.pair")
pairs: Any = importlib.import_module("benchmarks.frameworks.pairs")
transformers_cpu: Any = importlib.import_module("benchmarks.frameworks.transformers_cpu")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def test_pairs_answer_that_names_another_module_is_wrong(tmp_path: Path) -> None:
    transformers_cpu.see(tmp_path / "right", "float32", "clean")
    transformers_cpu.see(tmp_path / "wrong", "float32", "merger scaled")
    about = {"suite": "", "dtype": "float32", "baseline": tmp_path / "right", "target": tmp_path / "wrong"}
    for bug, culprit, is_right in (
        ("merger scaled", "model.visual.merger", True),
        ("merger scaled", "model.visual.blocks", False),
        ("clean", "", False),
    ):
        assert pair.answer(pair.Pair(bug=bug, culprit=culprit, **about)).is_right is is_right


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("suite", [suite.name for suite in pairs.suites(None)])
def test_pairs_of_every_installed_framework_are_answered(
    tmp_path: Path, suite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])  # inherited by ranks, which import `benchmarks`
    (found,) = (one for one in pairs.suites(None) if one.name == suite)
    for name in found.packages:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"needs {name}")
    wrong = [
        (one.dtype, one.bug) for one in found.pairs(tmp_path, ["float32", "bfloat16"]) if not pair.answer(one).is_right
    ]
    assert wrong == []
