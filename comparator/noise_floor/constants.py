"""Tuned constants of the noise floor, with their sources.

``derived`` constants follow from the arithmetic that their docstring states. ``fitted`` ones were chosen so that the
benign cases of the verdict bench and of the floor sweep pass and their bugs are found; ``benchmarks/RESULTS.md`` has
the ablation of every effect that uses them.
"""

import math

# Rounding of one value and of one sum

ULP_SHARE = 0.72
"""Mean size of an ulp relative to epsilon times the value (derived: mantissas uniform in the logarithm)."""
ROUND_TO_NEAREST = 0.2
"""Root mean square of one rounding, in epsilons: 0.29 ulp (uniform over ± ulp / 2) times :data:`ULP_SHARE`
(derived)."""
TWO_SIDES = math.sqrt(2.0)
"""It happens twice: to the outputs of both sides, or, relative to a wider dtype, to the weights and the output of the
narrow side (derived: variances add)."""
FLOAT32_STEP = 2.0**-23
"""Epsilon in which sums are accumulated (derived: every framework accumulates 16-bit and float32 products in
float32)."""
FLOAT64_STEP = 2.0**-52
"""The same for float64 tensors."""
DEFAULT_REDUCTION = 4096
"""Reduction length where neither run recorded the shape of any parameter (fitted)."""
LARGEST_OF_MILLION = 6.0
"""The largest of a million independent normal errors, in standard deviations: 5.4, rounded up (derived)."""

MEDIAN_SAMPLING = math.sqrt(math.pi / 2.0)
"""Standard error of the median of n normal values, in standard deviations / sqrt(n) (derived)."""

# Distribution over token rows, one number at each of spread.QUANTILES

QUANTILE_WIDENING = (1.0, 2.0, 3.0, 5.0)
"""Rounding error at each quantile over rows relative to the median row, since rows differ in size (fitted)."""
CONDITION_WIDENING = (1.0, 1.2, 1.4, 1.6)
"""Condition of the rows at each quantile relative to the median row (fitted)."""
NARROW_ROW_WIDTH = 5
"""Rows of fewer elements are as unlike each other as a few normal numbers. Error and size of a row of w elements are
sums of w squares each, so that their ratio is distributed as the root of F(w, w). Relative to the median row, with rows
counted as a quarter of the typical size at least, its 98 % quantile is 9.5, 5.5 and 3.3 and the largest of 400,000 is
25, 16 and 10 for w = 1, 2, 4, where :data:`QUANTILE_WIDENING` has 3 and 5 (derived).

Where token rows share a direction that holds s of their energy, the typical row of a product with w random rows of a
weight is as unlike that of another layer. For s = 0.85 it amplifies errors by 1.1 in the median, and by 3.5, 2.9 and
2.4 in one layer of 500 for w = 1, 2, 4 (derived). :data:`DEFAULT_CONDITION` covers that, 2.5 times the median does
not."""
NARROW_PATH_WIDTH = 20
"""The same for the error along a path: a row passes several modules of its width, whose factors multiply. With four of
them, each distributed as the root of F(w, w), the largest of a thousand rows is 5.0, 6.7 and 10.9 times the median for
w = 16, 12 and 8, where :data:`QUANTILE_WIDENING` has 5 (derived, rounded up)."""
MAX_ROW_ERROR = 0.5
"""A row may not differ by more than this share of itself, however noisy its inputs; of a gradient this holds for the
typical row only (fitted)."""

# Condition: how much a module amplifies the error of its inputs

DEFAULT_CONDITION = 4.0
"""Where no other layer has the same module: sqrt(2) where two operands carry the error, 2 where a sum loses half its
length, and both again for a function that was not captured (fitted)."""
CONDITION_RANGE = (2.5, 6.0)
"""A learned condition stays within this range (fitted)."""
LEARNED_CONDITION_MARGIN = 2.5
"""A learned condition is this times the median of what the other layers show (fitted)."""
PARAMETER_CONDITION = 1.5
"""Of a parameter or a row of an embedding table: it is copied, perhaps into another dtype (fitted)."""
PATH_CONDITION = 4.0
"""Bound of the error along the path, in the quadrature sum of all local errors upstream: twice a typical condition of
2, because modules differ (fitted)."""
ELEMENT_CONDITION = 3.0
"""Condition of one element of one row relative to the typical row: the weights of a norm scale single channels to
several times the rest (fitted)."""
UNOBSERVED_ELEMENT_CONDITION = LARGEST_OF_MILLION
"""The same where the operation was not captured: a product with another activation scales an element by as much as the
largest of a million normal values (derived)."""
CHANNEL_CONDITION = 4.0
"""Systematic error of a module's output channel relative to its inputs (fitted)."""
MULTIPLICATIVE_CONDITION = 2.0
"""Further factor for a function that was not captured in a module with parameters of its own: a state space model
multiplies its step, its decay and both gates, all made of one row, where attention multiplies two (derived)."""
OFFSET_WEIGHT_ROUNDING = 4.0
"""Gemma's norms multiply by 1 + w, and w is rounded by up to half an epsilon of its own size. Where 1 + w is an eighth,
w is nearly -1 and its channel differs by 3.5 epsilons in every row (derived)."""
STORAGE_EPSILON = 2.0**-4
"""From this epsilon on a format stores values only (FP8): they are computed in 16 bits or more and rounded to it once,
by half a step on each side (derived)."""
REDIRECTED_ROW_ERROR = 2.0
"""Largest error of a row that was computed from another value: the distance to a vector of its size that points the
other way (derived)."""
REDIRECTED_SMALL_ROW_ERROR = 5.0
"""The same of a small row, which counts as a quarter of the typical row at least: the distance to a vector of typical
size that points the other way (derived)."""

# Dataflow where inputs were not captured

INPUT_WINDOW = 8
"""Sites that fired before stand in for inputs that were not captured (fitted)."""
OPS_PER_LAYER = 8
"""Roundings in sequence in one decoder layer whose inside was not captured (derived: norm, projection, attention,
projection, add, and the same for the MLP)."""
OPS_POINTWISE = 6
"""Roundings in sequence in a pointwise function: ``x * 0.5 * (1 + tanh(a * (x + b * x**3)))`` (derived)."""

# Gradients

RELU_ZERO_SHARE = 0.05
"""Least share of zeros in the gradient of a ReLU whose class is not known (fitted)."""
NORMAL_DENSITY_AT_ZERO = math.sqrt(2.0 / math.pi)
"""Share of normal values that are within e standard deviations of 0, divided by e, for small e: 0.8 (derived)."""
MIN_KINK_CROSSINGS = 10
"""Elements that may change sides of a ReLU's kink however small the errors are: their number is a Poisson variable, and
values in one sum are not independent (fitted)."""
KINK_CROSSING_MARGIN = 4.0
"""Times their expected number, since values may be denser near 0 than normal ones (fitted)."""
MATRIX_NDIM = 2
"""Dimensions of the weight of one linear map; weights of experts have one more."""

# Other formats

KV_CACHE_STEP_SHARE = ULP_SHARE * math.sqrt(2.0 / math.pi)
"""Mean step of a number format, in epsilons, times the mean size of a normal error relative to its root mean square
(derived)."""
ROPE_ROUNDING = ROUND_TO_NEAREST * TWO_SIDES * 2.0**-24
"""Rounding of a rotary angle in float32 on both sides, relative to the angle; frameworks compute angles in float32
whatever the dtype of the model (derived)."""
