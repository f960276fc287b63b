"""Megatron-core's experts on two expert-parallel ranks against one rank, forward and backward."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from compare_runs import diff

if importlib.util.find_spec("megatron") is None:
    pytest.skip("needs megatron-core (the dev extra has it)", allow_module_level=True)

pytestmark = pytest.mark.soak
SCRIPT = Path(__file__).resolve().parents[1] / "support/megatron_moe.py"
CULPRIT = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    for name, words in {"one": ["1"], "two": ["2"], "bug": ["2", "bug"]}.items():
        command = [sys.executable, str(SCRIPT), words[0], str(path / name), *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return path


@pytest.mark.timeout(600)
def test_megatron_expert_parallel_ranks_agree_with_one_rank(runs: Path) -> None:
    found = diff(runs / "one", runs / "two")
    assert (found.exit_code, found.num_bad) == (0, 0)
    sites = {finding.site for finding in found.findings}
    assert {"decoder.layers.1.mlp:out[0]", "decoder.layers.0.mlp.router:out[0]", f"{CULPRIT}:out[0]"} <= sites
    assert any("rows of experts that are on other ranks" in warning for warning in found.coverage.warnings)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("baseline", ["one", "two"])
def test_megatron_bug_in_an_expert_is_named(runs: Path, baseline: str) -> None:
    first = diff(runs / baseline, runs / "bug").first_divergence
    assert first is not None
    assert (first.module, first.site) == (CULPRIT, f"{CULPRIT}:out[0]")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["saved", "ranks"])  # distributed, and one file a rank
def test_checkpoint_of_experts_on_two_ranks_is_read(runs: Path, how: str) -> None:
    report = diff(runs / f"one-{how}", runs / f"two-{how}")
    assert (report.exit_code, report.coverage.num_sites_matched) == (0, len(report.findings))
    report = diff(runs / f"one-{how}", runs / f"bug-{how}")
    assert [finding.site for finding in report.findings if finding.verdict.is_bad] == [f"{CULPRIT}:param[weight]"]
