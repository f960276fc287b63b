"""Expert choices as flags in one run and as scores in the other: only near ties are excused."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import Report
from tapscope.core.observe import RowSpan

ROWS, WIDTH, EXPERTS, COUNT, TIED = 48, 32, 8, 2, 11
Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
HIDDEN = RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)
ROUTER = RNG.standard_normal((EXPERTS, WIDTH)).astype(np.float32) / np.float32(WIDTH**0.5)
UP = RNG.standard_normal((EXPERTS, WIDTH, WIDTH)).astype(np.float32) / np.float32(WIDTH**0.5)
GRADIENT = RNG.standard_normal((EXPERTS, WIDTH)).astype(np.float32)


def scores_with_a_tie() -> Array:
    """Return scores of which the second and third of one row differ by a thousandth."""
    scores = HIDDEN @ ROUTER.T
    best = np.argsort(-scores[TIED])
    scores[TIED, best[2]] = scores[TIED, best[1]] - 1e-3
    return scores


SCORES = scores_with_a_tie()


def flags_of(scores: Array) -> Array:
    flags = np.zeros(scores.shape, bool)
    np.put_along_axis(flags, np.argsort(-scores, axis=1)[:, :COUNT], True, axis=1)
    return flags


def experts(flags: Array, up: Array = UP) -> Array:
    weights = np.where(flags, np.exp(SCORES), 0.0)
    weights /= weights.sum(1, keepdims=True)
    found: Array = np.einsum("re,rw,ewv->rv", weights, HIDDEN, up)
    return found.astype(np.float32)


def swapped(*rows: int, to: int = COUNT) -> Array:
    """Return flags in which ``rows`` have the expert ranked ``to`` instead of their last choice."""
    flags, order = flags_of(SCORES), np.argsort(-SCORES, axis=1)
    for row in rows:
        flags[row, order[row, COUNT - 1]], flags[row, order[row, to]] = False, True
    return flags


def write(path: Path, sites: dict[str, Array]) -> Path:
    with RunFactory(path) as run:
        run.step(grid=(1, ROWS), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=list(range(ROWS)))
        for site, values in sites.items():
            run.put(site, values)
    return path


def compared(tmp_path: Path, flags: Array, *, turned: bool = False, up: Array = UP) -> Report:
    scored = write(
        tmp_path / "scored",
        {
            "model.layers.0.mlp:in[hidden_states]": HIDDEN[None],
            "model.layers.0.mlp.gate:out[0]": SCORES,
            "model.layers.0.mlp:out": experts(flags_of(SCORES))[None],
            "model.layers.0.mlp.gate:param[weight].grad": GRADIENT,
        },
    )
    narrow = ml_dtypes.bfloat16
    flagged = write(
        tmp_path / "flagged",
        {
            "decoder.layers.0.mlp:in[hidden_states]": HIDDEN[None].astype(narrow),
            "decoder.layers.0.mlp.router:out[0]": np.where(flags, 0.5, 0.0).astype(narrow),
            "decoder.layers.0.mlp.router:out[1]": flags,
            "decoder.layers.0.mlp:out[0]": experts(flags, up)[None].astype(narrow),
            "decoder.layers.0.mlp.router:param[weight].grad": GRADIENT
            + 0.3 * (flags != flags_of(SCORES)).any(0)[:, None],
        },
    )
    return diff(flagged, scored) if turned else diff(scored, flagged)


@pytest.mark.parametrize("turned", [False, True])
def test_routing_maps_row_of_a_near_tie_is_left_out(tmp_path: Path, turned: bool) -> None:
    report = compared(tmp_path, swapped(TIED), turned=turned)
    assert report.exit_code == 0, str(report)
    assert any("1 token row left out that went to other experts" in each for each in report.coverage.warnings)
    assert any("it adds up token rows that went to other experts" in each for each in report.coverage.warnings)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(swapped(TIED, 20), id="a second row, whose scores are not close"),
        pytest.param(swapped(TIED, to=EXPERTS - 1), id="to an expert whose score is far off"),
        pytest.param(np.roll(flags_of(SCORES), 1, axis=1), id="the next expert, in every row"),
    ],
)
def test_routing_maps_other_choice_is_named(tmp_path: Path, flags: Array) -> None:
    report = compared(tmp_path, flags)
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.module == "model.layers.0.mlp"


def test_routing_maps_wrong_expert_is_named_beside_a_near_tie(tmp_path: Path) -> None:
    wrong = np.where(np.arange(EXPERTS) == 3, np.float32(1.5), np.float32(1.0))[:, None, None] * UP
    report = compared(tmp_path, swapped(TIED), up=wrong)
    assert report.exit_code == 1
    assert any("1 token row left out" in warning for warning in report.coverage.warnings)


def with_logits(
    path: Path, flags: Array, scores: Array | None, dtype: Any = np.float32, *, num_missing: int = 0
) -> Path:
    """Write a Megatron run: flags and weights of the chosen experts, optionally all scores, and the rows of each
    expert."""
    block = "decoder.layers.0.mlp"
    sites = {f"{block}:in[hidden_states]": HIDDEN[None].astype(dtype)}
    if scores is not None:
        sites[f"{block}.router:tap[logits]"] = scores[None].astype(dtype)
    sites[f"{block}.router:out[0]"] = np.where(flags, 0.5, 0.0).astype(dtype)
    sites[f"{block}.router:out[1]"] = flags
    for expert in range(EXPERTS):
        rows = HIDDEN[flags[:, expert]][: int(flags[:, expert].sum()) - num_missing * (expert == 0)]
        sites[f"{block}.experts.local_experts.{expert}:in[hidden_states]"] = rows.astype(dtype)
    return write(path, sites | {f"{block}:out[0]": experts(flags)[None].astype(dtype)})


def test_routing_near_tie_of_two_megatron_runs_needs_the_scores(tmp_path: Path) -> None:
    plain, narrow = flags_of(SCORES), ml_dtypes.bfloat16
    noisy = SCORES.copy()
    order = np.argsort(-SCORES[TIED])
    noisy[TIED, order[1]], noisy[TIED, order[2]] = SCORES[TIED, order[2]], SCORES[TIED, order[1]]
    tied, far = swapped(TIED), swapped(TIED, 20)

    def run(name: str, *about: Any, **more: Any) -> Path:
        return with_logits(tmp_path / name, *about, **more)

    baseline = run("baseline", plain, SCORES)
    report = diff(baseline, run("tied", tied, noisy, narrow))
    assert report.exit_code == 0, str(report)
    counts = [one.rows for one in report.findings if ".experts.local_experts." in one.site]
    assert sum(each.num_absent for each in counts) == 2  # at the token's former expert, and at the new one
    assert sum(each.num_compared for each in counts) == plain.sum() - 2  # nor at the token's unchanged expert
    assert diff(run("blind", plain, None), run("blind tied", tied, None, narrow)).exit_code == 1
    assert diff(baseline, run("far", far, noisy, narrow)).exit_code == 1
    assert diff(baseline, run("missing", tied, noisy, narrow, num_missing=3)).exit_code == 1
