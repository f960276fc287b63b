"""Expert choices with a bias and groups: rounding may change a choice, a bug in the router may not."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import Finding, Report, Verdict
from tapscope.comparator.detectors.expert_choices import rule_of
from tapscope.core.observe import RowSpan

ROWS, WIDTH, EXPERTS, GROUPS, ADMITTED, TOP = 400, 32, 8, 4, 2, 3
_RNG = np.random.default_rng(5)
HIDDEN = _RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)
ROUTER = (_RNG.standard_normal((EXPERTS, WIDTH)) * 2 / np.sqrt(WIDTH)).astype(np.float32)
BIAS = (_RNG.standard_normal(EXPERTS) * 0.2).astype(np.float32)
CONFIG = {"n_group": GROUPS, "topk_group": ADMITTED}


def chosen(logits: np.ndarray, bias: np.ndarray, groups: int = GROUPS, best: int = 2) -> np.ndarray:
    """Return DeepSeek-V3's choices [rows, k], computed token by token."""
    found = []
    for row in 1 / (1 + np.exp(-logits.astype(np.float64))) + bias:
        parts = np.split(np.arange(EXPERTS), groups)
        worth = [np.sort(row[part])[-best:].sum() for part in parts]
        admitted = np.concatenate([parts[g] for g in np.argsort(worth)[-min(ADMITTED, groups) :]])
        found.append(admitted[np.argsort(-row[admitted], kind="stable")][:TOP])
    return np.array(found)


HELD = "buffer[bias]"
"""Site of the bias if the router owns it, as in DeepSeek-V3; ``GIVEN`` if the router receives it, as in MiniMax-M2."""
GIVEN = "in[e_score_correction_bias]"


def write(path: Path, dtype: str, *, recorded: str = HELD, bias: np.ndarray = BIAS, groups: int = GROUPS) -> None:
    """Write one router over all rows; `bias` and `groups` are used by the computation, BIAS is that of the
    checkpoint."""
    hidden = HIDDEN.astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else HIDDEN
    logits = hidden.astype(np.float32) @ ROUTER.T
    with RunFactory(path, model_config=CONFIG, dtype=dtype) as run:
        run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=list(range(ROWS)))
        run.site("layers.0.mlp.gate:in[x]", "Router", {"weight": (EXPERTS, WIDTH)})
        run.put("layers.0.mlp.gate:in[x]", hidden, dims="t h")
        run.site("layers.0.mlp.gate:out[0]", "Router", {"weight": (EXPERTS, WIDTH)})
        run.put("layers.0.mlp.gate:out[0]", logits, dims="t e")
        run.put("layers.0.mlp.gate:out[2]", chosen(logits, bias, groups), dims="t k")
        if recorded:
            run.put(f"layers.0.mlp.gate:{recorded}", BIAS)


def choices_of(report: Report) -> Finding:
    """Return the finding on the router's expert choices."""
    return next(f for f in report.findings if f.site.endswith("gate:out[2]"))


@pytest.mark.parametrize("recorded", [HELD, GIVEN])
def test_expert_choices_changed_by_rounding_follow_their_own_scores(tmp_path: Path, recorded: str) -> None:
    write(tmp_path / "b", "float32", recorded=recorded)
    write(tmp_path / "t", "bfloat16", recorded=recorded)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = choices_of(report)
    assert found.verdict is Verdict.CLOSE
    assert found.metrics is not None
    assert found.metrics.num_equal < found.metrics.num_elements
    assert "sigmoid of the scores plus the recorded bias among the 2 groups of 4 with the two best" in found.notes[0]
    assert report.exit_code == 0


@pytest.mark.parametrize("fault", [{"bias": 0 * BIAS}, {"groups": 1}, {"recorded": ""}], ids=str)
def test_expert_choices_by_a_different_rule_differ(tmp_path: Path, fault: dict[str, object]) -> None:
    write(tmp_path / "b", "float32", recorded="" if "recorded" in fault else HELD)
    write(tmp_path / "t", "bfloat16", **fault)  # type: ignore[arg-type]
    report = diff(tmp_path / "b", tmp_path / "t")
    found = choices_of(report)
    assert found.verdict is Verdict.DIFFERS
    assert report.first_divergence is not None
    assert report.first_divergence.module == "layers.0.mlp.gate"


@pytest.mark.parametrize(("groups", "best", "bias"), [(4, 2, BIAS), (4, 1, BIAS), (1, 1, BIAS), (1, 1, 0 * BIAS)])
def test_expert_choices_rule_is_inferred_from_the_choices(groups: int, best: int, bias: np.ndarray) -> None:
    logits = HIDDEN @ ROUTER.T
    made = chosen(logits, bias, groups, best)
    rule = rule_of(made, logits.astype(np.float64), bias.astype(np.float64) if bias.any() else None, CONFIG)
    assert rule is not None
    assert (rule.groups, rule.bias) == (groups, bool(bias.any()))
    assert np.array_equal(np.sort(made), np.sort(np.argsort(-rule.merits(logits, bias), axis=1)[:, :TOP]))
    assert rule_of(_RNG.permuted(made, axis=0), logits, bias, CONFIG) is None
