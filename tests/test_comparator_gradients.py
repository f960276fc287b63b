"""Why gradients round worse than values: each reason against gradients that were really rounded."""

import numpy as np
import pytest

from tapscope.comparator.floor import unit
from tapscope.comparator.gradients import cancellation, spilled, stretch, underflow
from tapscope.comparator.spread import Spread, sizes_of, spread_of
from tapscope.kernels.native import overview
from tapscope.kernels.native.compare import compare_rows

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
RNG = np.random.default_rng(0)


def spread(baseline: Array, target: Array) -> Spread:
    """As of a gradient that was examined."""
    rows = compare_rows(baseline.astype(np.float64), target.astype(np.float64))
    at_worst = baseline[np.arange(len(baseline)), rows.argmax]
    return spread_of(overview(rows, at_worst), sizes=sizes_of(rows.sum_sq_baseline, rows.width))


@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-6])
def test_float16_has_no_room_for_small_gradients(size: float) -> None:
    values = RNG.standard_normal((200, 64)) * size
    found = spread(values, values.astype(np.float16).astype(np.float64))
    explained = np.hypot(unit("float16", "float16", 1), underflow(("float16",), found))
    assert 0.5 < explained / found.errors[0] < 4.0
    assert underflow(("bfloat16",), found) < 1e-20


def test_a_sum_that_cancels_is_worse_conditioned_by_as_much() -> None:
    tokens = RNG.standard_normal((64, 32))
    tokens -= 0.99 * tokens.mean(0)  # what is left of the sum is a hundredth
    noisy = tokens * (1 + 0.01 * RNG.standard_normal(tokens.shape))
    given, total = spread(tokens, noisy), spread(tokens.sum(0)[None], noisy.sum(0)[None])
    cancels = cancellation(float(np.linalg.norm(tokens.sum(0))), [float(np.linalg.norm(tokens))])
    explained = cancels * given.errors[0]
    assert 50 < cancels < 200
    assert 0.3 < explained / total.errors[0] < 3.0


def test_the_error_of_a_large_row_lands_on_a_small_one() -> None:
    rows = RNG.standard_normal((40, 32))
    rows[::4] *= 0.25
    noisy = rows + 0.01 * np.linalg.norm(rows, axis=1).max() * RNG.standard_normal(rows.shape) / np.sqrt(32)
    mixed = spread(rows, noisy)
    before = Spread(40, (0.01, 0.011, 0.012, 0.012), 0.01, 0.0, 0.0, 0.03)
    assert spilled(before).errors[-1] == pytest.approx(0.04)
    assert before.errors[-1] < mixed.errors[-1] < 2 * spilled(before).errors[-1]


def test_an_error_may_be_enlarged_as_much_as_the_row_that_was_enlarged_most() -> None:
    weight = RNG.standard_normal((64, 32))
    weight[0] *= 30.0  # one label
    logits = RNG.standard_normal((100, 64))
    logits[:, 0] = 0.0
    logits[0] = 0.0
    logits[0, 0] = 8.0
    noisy = logits.copy()
    noisy[50, 0] += 0.3  # 4 % of a row that has nothing of that label
    given, made = spread(logits, noisy), spread(logits @ weight, noisy @ weight)
    grown = made.errors[-1] / given.errors[-1]
    assert grown > 10.0
    assert grown / 3 < stretch(made, [given]) < grown * 3
