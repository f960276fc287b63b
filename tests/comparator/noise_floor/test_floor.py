"""The standards by which sites are judged: rules, a noise run, and the formulas of the rounding model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparator_toy import Toy, damaged, prompts, weights
from compare_runs import diff
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tapscope.cli import main
from tapscope.comparator import Report, Verdict
from tapscope.comparator.metrics.error_columns import ErrorColumns, LargestErrors
from tapscope.comparator.metrics.error_distribution import NO_ERROR, ErrorDistribution
from tapscope.comparator.noise_floor.bounds import SiteTerms, local_bound, path_bound
from tapscope.comparator.noise_floor.conditions import learned_conditions
from tapscope.comparator.noise_floor.constants import (
    CONDITION_RANGE,
    DEFAULT_CONDITION,
    LEARNED_CONDITION_MARGIN,
    OFFSET_WEIGHT_ROUNDING,
)
from tapscope.comparator.noise_floor.floor_table import TESTS
from tapscope.comparator.noise_floor.local_rounding import rounding_error
from tapscope.comparator.noise_floor.reduction_length import reduction_of
from tapscope.comparator.verdict.rules import MEASURES, compile_rules, parse_rule
from tapscope.core.errors import ConfigError, RuleError
from tapscope.kernels.native import channel_sums
from tapscope.kernels.native.channels import MIN_ROWS, find_channel

TABLES = weights(layers=2)
PROMPTS = prompts((23, 17))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    spoiled = damaged(TABLES, "model.layers.1.mlp.up_proj", "scaled")
    for name, toy in {
        "base": Toy(TABLES),
        "again": Toy(TABLES),
        "twin": Toy(TABLES, dtype="bfloat16"),
        "tp2": Toy(TABLES, dtype="bfloat16", tp=2),
        "bad": Toy(spoiled, dtype="bfloat16", tp=2),
    }.items():
        toy.write(root / name, PROMPTS).close()
    return root


def diff_base(runs: Path, target: str, *rules: str, **options: Any) -> Report:
    return diff(runs / "base", runs / target, rules=tuple(map(parse_rule, rules)), **options)


def test_floor_noise_run_is_tighter_than_the_model(runs: Path) -> None:
    report = diff_base(runs, "tp2", noise_run=runs / "twin")
    assert report.exit_code == 0
    assert {f.judged_by for f in report.findings} == {"noise_run", "equality"}
    report = diff_base(runs, "bad", noise_run=runs / "twin")
    assert report.first_divergence is not None
    assert report.first_divergence.module == "model.layers.1.mlp.up_proj"
    assert len([f for f in report.findings if f.verdict.is_bad]) >= len(
        [f for f in diff_base(runs, "bad").findings if f.verdict.is_bad]
    )


def test_floor_bit_equal_noise_run_keeps_the_model(runs: Path) -> None:
    report = diff_base(runs, "tp2", noise_run=runs / "again")
    assert report.exit_code == 0
    assert {f.judged_by for f in report.findings} == {"rounding", "equality"}


@pytest.mark.parametrize("tp", [1, 2])
def test_floor_embedding_row_is_copied(runs: Path, tmp_path: Path, tp: int) -> None:
    """A looked-up row is on one rank, and no operation amplifies its error: 20 roundings exceed the floor."""
    table = TABLES["model.embed_tokens"].copy()
    table[PROMPTS["0"][7]] += 0.04
    Toy(TABLES | {"model.embed_tokens": table}, dtype="bfloat16", tp=tp).write(tmp_path / "row", PROMPTS).close()
    report = diff(runs / "base", tmp_path / "row")
    assert report.first_divergence is not None
    assert report.first_divergence.module == "model.embed_tokens"


def test_floor_noise_run_must_not_be_a_compared_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("base", "tp2"):
        assert main(["diff", str(runs / "base"), str(runs / "tp2"), "--noise-run", str(runs / name)]) == 2
        assert "give a repeat of the baseline" in capsys.readouterr().err
    assert main(["diff", str(runs / "base"), str(runs / "tp2"), "--noise-run", str(runs / "none")]) == 3


def test_floor_first_matching_rule_decides(runs: Path) -> None:
    report = diff_base(
        runs, "tp2", r"lm_head:out=rel < 1e-12", r"lm_head=rel < 1", r"mlp=cosine > 0.99 and equal <= count"
    )
    found = {f.site: f for f in report.findings}
    assert found["lm_head:out"].verdict is Verdict.DIFFERS
    assert found["lm_head:out"].judged_by == "rule lm_head:out=rel < 1e-12"
    assert "breaks the rule" in found["lm_head:out"].notes[0]
    assert found["lm_head:in[input]"].verdict is Verdict.CLOSE
    assert found["model.layers.0.mlp:out"].judged_by == "rule mlp=cosine > 0.99 and equal <= count"
    assert found["model.norm:out"].judged_by == "rounding"
    assert report.first_divergence is not None
    assert report.first_divergence.module == "lm_head"


def test_floor_rule_accepts_a_known_difference(runs: Path) -> None:
    assert diff_base(runs, "bad", r"layers\.1\.|norm|lm_head|logits=rel < 0.1").exit_code == 0


@pytest.mark.parametrize(
    ("rule", "error", "said"),
    [
        ("nosuch=rel < 1", RuleError, "matches no site that both runs have"),
        ("lm_head=size < 1", ConfigError, "names are rel"),
        ("lm_head=__import__('os')", ConfigError, "__import__"),
        ("(=rel < 1", ConfigError, "invalid regular expression"),
        ("lm_head", ConfigError, "expected REGEX=EXPRESSION"),
        ("lm_head=", ConfigError, "expected REGEX=EXPRESSION"),
        ("lm_head=rel + 'x' > 1", RuleError, "measures are numbers"),
    ],
)
def test_floor_invalid_rule_is_an_error_at_start(runs: Path, rule: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        diff_base(runs, "tp2", rule)


def test_floor_shadowed_rule_is_an_error(runs: Path) -> None:
    with pytest.raises(RuleError, match="has no effect"):
        diff_base(runs, "tp2", "lm_head=rel < 1", "lm_head:out=rel < 1")


def test_floor_rule_pattern_may_contain_a_look_ahead() -> None:
    entry = parse_rule(r"^(?=.*mlp)(?<=x)y=max_abs <= 0.5")
    assert (entry.site, entry.require) == (r"^(?=.*mlp)(?<=x)y", "max_abs <= 0.5")
    assert set(compile_rules([parse_rule("x=" + " and ".join(f"{m} >= 0" for m in MEASURES))])[0].require.names) == set(
        MEASURES
    )


# ---- the model


@given(st.sampled_from(["float32", "bfloat16", "float16"]), st.integers(1, 20000), st.integers(1, 20000))
def test_floor_rounding_unit_grows_with_reduction_length_and_dtype(dtype: str, short: int, long: int) -> None:
    short, long = sorted((short, long))
    assert rounding_error("float32", dtype, short) <= rounding_error("float32", dtype, long)
    assert rounding_error("float32", "float32", short) <= rounding_error("float32", dtype, short)
    assert rounding_error("float32", dtype, short) == rounding_error(dtype, "float32", short)
    assert rounding_error("float64", "float64", short) < 1e-12


@pytest.mark.parametrize(
    ("cls", "shape", "length"),
    [
        ("Linear", (48, 64), 64),
        ("Conv1D", (48, 64), 48),
        ("Conv2d", (16, 8, 3, 3), 72),
        ("Conv1d", (16, 8, 3), 24),
        ("MixtralExperts", (8, 256, 64), 256),
        ("Embedding", (1000, 64), 1),
    ],
)
def test_floor_reduction_length_is_that_of_one_sum(cls: str, shape: tuple[int, ...], length: int) -> None:
    """Stacked experts sum over one axis of their matrices, not over both."""
    assert reduction_of(cls, {"weight": shape}) == length
    if cls == "MixtralExperts":
        assert reduction_of(cls, {"weight": shape}, has_gradients=True) == 256 * 64


def spread(error: float) -> ErrorDistribution:
    return ErrorDistribution(64, (error, 1.5 * error, 2 * error, 3 * error), 4 * error, 0.0, 0.0, 5 * error)


@given(st.floats(0, 0.1), st.floats(0, 0.1), st.floats(1e-8, 1e-2))
def test_floor_rises_with_input_error_and_towards_the_worst_row(a: float, b: float, base: float) -> None:
    terms = SiteTerms(ErrorColumns.of([spread(base)] * 2), np.full(2, base), np.full(2, 1e-7))
    given = LargestErrors.of([[spread(error)] for error in sorted((a, b))])
    floors, path = local_bound(given, terms, 2.5), path_bound(np.full(2, base), terms)
    assert (floors.errors[:, 0] <= floors.errors[:, 1]).all()
    for each in (floors, path):
        assert (np.diff(each.errors, axis=0) >= 0).all()
        assert (each.limits > 0).all()
    assert not floors.worst(ErrorColumns.of([NO_ERROR] * 2).tests).errors.any()


def floors_of(num_rows: int, went_in: float, *, offset: float = 1.0) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Return the local and path limits of row errors, and both limits of a channel gain, for a local error of 0.001."""
    spreads = ErrorColumns.of([structs.replace(spread(0.0), num_rows=num_rows)])
    terms = SiteTerms(spreads, np.full(1, 1e-3), np.full(1, 1e-2), weight_rounding=offset)
    each = local_bound(LargestErrors.of([[spread(went_in)]]), terms, 2.5), path_bound(np.full(1, 1e-3), terms)
    channels = [float(floors.limits[TESTS.index("channel"), 0]) for floors in each]
    return each[0].errors[:, 0], each[1].errors[:, 0], channels[0], channels[1]


def test_floor_p98_of_few_rows_is_the_worst_row() -> None:
    few, many = floors_of(40, 0.0), floors_of(4000, 0.0)
    for side in (0, 1):
        assert few[side][2] == few[side][3] == many[side][3] > many[side][2]
        assert few[side][1] == many[side][1], "of forty rows four lie beyond the 90 %"


def test_floor_single_row_may_have_the_condition_times_its_input_error() -> None:
    """A norm's weights may be large in the few channels in which its input differs."""
    assert floors_of(64, 0.01)[0][3] <= 0.5
    assert floors_of(64, 0.15)[0][3] == pytest.approx(2.5 * 3 * 0.15)
    assert floors_of(64, 0.15)[0][0] <= 0.5, "of single rows alone"


def test_floor_of_a_path_is_wider_for_single_narrow_rows() -> None:
    spreads = ErrorColumns.of([structs.replace(spread(0.0), width=width) for width in (64, 20, 8, 4)])
    terms = SiteTerms(spreads, np.full(4, 1e-3), np.full(4, 1e-2))
    path = path_bound(np.full(4, 1e-3), terms)
    assert path.errors[0].tolist() == [path.errors[0, 0]] * 4, "the typical row is not"
    assert (path.errors[3] / path.errors[3, 0]).tolist() == pytest.approx([1.0, 1.0, 2.5, 5.0])


def test_floor_unit_offset_weight_may_scale_its_channel_by_several_epsilons() -> None:
    plain, offset = floors_of(64, 0.0), floors_of(64, 0.0, offset=OFFSET_WEIGHT_ROUNDING)
    assert offset[2:] == tuple(OFFSET_WEIGHT_ROUNDING * gain for gain in plain[2:])


@given(st.lists(st.floats(0.01, 10), max_size=9))
def test_floor_condition_is_learned_from_the_median_of_the_others(likes: list[float]) -> None:
    found = learned_conditions(likes)
    for i, condition in enumerate(found):
        others = sorted(likes[:i] + likes[i + 1 :])
        low, high = CONDITION_RANGE
        assert condition == (
            min(max(LEARNED_CONDITION_MARGIN * others[len(others) // 2], low), high)
            if len(others) > 1
            else DEFAULT_CONDITION
        )


@pytest.mark.parametrize("rows", [25, 100])
def test_floor_of_a_common_gain_allows_for_the_sampling_error_of_a_median(rows: int) -> None:
    """The gain is the median over rows, whose standard error is sqrt(pi / 2) times that of the mean."""
    rng = np.random.default_rng(rows)
    medians = np.median(rng.standard_normal((4000, rows)), axis=1)
    deviation = float(medians.std() * np.sqrt(rows))
    assert deviation == pytest.approx(np.sqrt(np.pi / 2), rel=0.05)
    spreads = ErrorColumns.of([structs.replace(spread(0.0), num_rows=rows, gain_sd=0.1)])
    terms = SiteTerms(spreads, np.zeros(1), np.zeros(1))
    assert float(terms.gain(np.zeros(1))[0]) == pytest.approx(3 * np.sqrt(np.pi / 2) * 0.1 / np.sqrt(rows))


def test_floor_of_a_common_gain_allows_for_the_second_order_of_input_errors() -> None:
    """A norm of rows with independent errors e shrinks them by e^2 / 2."""
    rng, error = np.random.default_rng(0), 0.2
    x = rng.standard_normal((2000, 128))
    y = x + error * rng.standard_normal(x.shape)
    one, two = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (x, y))
    gain = float(np.median((one * two).sum(axis=1))) - 1.0
    assert gain == pytest.approx(-(error**2) / 2, rel=0.1)
    spreads = ErrorColumns.of([structs.replace(spread(0.0), num_rows=2000, gain_sd=1e-4)])
    terms = SiteTerms(spreads, np.full(1, 1e-5), np.full(1, 1e-5))
    without, limit = (float(terms.gain(np.zeros(1), np.full(1, carried))[0]) for carried in (0.0, error))
    assert without < -gain < limit
    gradient = terms._replace(is_gradient=True)
    assert float(gradient.gain(np.zeros(1), np.full(1, error))[0]) < -gain, "linear in the gradients before it"


@given(st.integers(0, 2**32 - 1), st.integers(32, 64), st.integers(8, 96), st.floats(0.001, 0.005))
@settings(max_examples=30)
def test_floor_scaled_channel_exceeds_noise_but_noise_does_not(
    seed: int, rows: int, channels: int, noise: float
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.uniform(0.5, 1.5, (rows, channels)) * rng.choice((-1.0, 1.0), (rows, channels))
    other = values * (1 + noise * rng.standard_normal(values.shape))
    quiet = find_channel(channel_sums(values, other), rows)
    assert abs(quiet.gain) <= quiet.noise
    worst = seed % channels
    other[:, worst] *= 1.08
    found = find_channel(channel_sums(values, other), rows)
    assert found.index == worst
    assert 0.04 < found.gain < 0.1  # a channel below the median size is measured relative to the median channel
    assert found.gain > found.noise


def test_floor_channel_gain_needs_enough_rows() -> None:
    values = np.ones((MIN_ROWS - 1, 8))
    assert find_channel(channel_sums(values, values * 2), len(values)).gain == 0.0
