"""Tuned constants of the noise floor, with their sources.

``derived`` constants follow from the arithmetic in their docstring. ``fitted`` constants were chosen such that the
benign cases of the verdict bench and of the floor sweep pass, and their bugs are detected. ``benchmarks/RESULTS.md``
has the ablation of every effect that uses them.
"""

import math

# Rounding of one value and of one sum

ULP_SHARE = 0.72
"""Mean size of an ulp relative to epsilon times the value (derived: mantissas distributed uniformly in the
logarithm)."""
ROUND_TO_NEAREST = 0.2
"""Root mean square error of one rounding, in epsilons: 0.29 ulp (uniform over ± ulp / 2) times :data:`ULP_SHARE`
(derived)."""
TWO_SIDES = math.sqrt(2.0)
"""Factor for two independent roundings: of the outputs of both sides or, relative to a wider dtype, of the weights and
the output of the narrow side (derived: variances add)."""
FLOAT32_STEP = 2.0**-23
"""Epsilon of the dtype in which sums are accumulated (derived: every framework accumulates 16-bit and float32 products
in float32)."""
FLOAT64_STEP = 2.0**-52
"""Epsilon of the dtype in which sums of float64 tensors are accumulated."""
DEFAULT_REDUCTION = 4096
"""Reduction length if neither run recorded the shape of any parameter (fitted)."""
LARGEST_OF_MILLION = 6.0
"""Maximum of a million independent normal errors, in standard deviations: 5.4, rounded up (derived)."""

MEDIAN_SAMPLING = math.sqrt(math.pi / 2.0)
"""Standard error of the median of n normal values, in standard deviations / sqrt(n) (derived)."""

# Distribution over token rows, one number per quantile of error_distribution.QUANTILES

QUANTILE_WIDENING = (1.0, 2.0, 3.0, 5.0)
"""Rounding error at each quantile over rows relative to the median row, because rows differ in size (fitted)."""
CONDITION_WIDENING = (1.0, 1.2, 1.4, 1.6)
"""Condition of the rows at each quantile relative to that of the median row (fitted)."""
NARROW_ROW_WIDTH = 5
"""Row width below which rows vary like a few normal numbers. Error and size of a row of w elements are sums of w
squares each, so their ratio is distributed as the root of F(w, w). Relative to the median row, with rows counted as at
least a quarter of the typical size, its 98 % quantile is 9.5, 5.5 and 3.3 and the largest of 400,000 is 25, 16 and 10
for w = 1, 2, 4, where :data:`QUANTILE_WIDENING` has 3 and 5 (derived).

If token rows share a direction with a share s of their energy, the typical row of a product with w random rows of a
weight also varies between layers. For s = 0.85, it amplifies errors by 1.1 in the median, and by 3.5, 2.9 and 2.4 in
one layer of 500 for w = 1, 2, 4 (derived). :data:`DEFAULT_CONDITION` covers that, 2.5 times the median does not.
"""
NARROW_PATH_WIDTH = 20
"""Row width below which the tail of the error along a path is wider. A row passes several modules of its width, whose
factors multiply. With four of them, each distributed as the root of F(w, w), the largest of a thousand rows is 5.0, 6.7
and 10.9 times the median for w = 16, 12 and 8, where :data:`QUANTILE_WIDENING` has 5 (derived, rounded up).
"""
MAX_ROW_ERROR = 0.5
"""Maximum error of a row relative to its size, however noisy its inputs; for a gradient, only of the typical row
(fitted)."""

# Condition: the factor by which a module amplifies the error of its inputs

DEFAULT_CONDITION = 4.0
"""Condition if no other layer has the same module: sqrt(2) where two operands carry the error, 2 where a sum loses half
its length, and both again for a function that was not captured (fitted)."""
CONDITION_RANGE = (2.5, 6.0)
"""Minimum and maximum of a learned condition (fitted)."""
LEARNED_CONDITION_MARGIN = 2.5
"""Ratio of a learned condition to the median amplification in the other layers (fitted)."""
PARAMETER_CONDITION = 1.5
"""Condition of a parameter or a row of an embedding table, which is copied, possibly into another dtype (fitted)."""
PATH_CONDITION = 4.0
"""Bound of the error along the path, relative to the quadrature sum of all local errors upstream: twice a typical
condition of 2, because modules differ (fitted)."""
ELEMENT_CONDITION = 3.0
"""Condition of one element of one row relative to the typical row: the weights of a norm scale single channels to
several times the others (fitted)."""
UNOBSERVED_ELEMENT_CONDITION = LARGEST_OF_MILLION
"""Condition of one element if the operation was not captured: a product with another activation scales an element by at
most the largest of a million normal values (derived)."""
CHANNEL_CONDITION = 4.0
"""Systematic error of a module's output channel relative to that of its inputs (fitted)."""
MULTIPLICATIVE_CONDITION = 2.0
"""Additional factor for a function that was not captured in a module with parameters of its own: a state space model
multiplies its step, its decay and both gates, all computed from one row, where attention multiplies two (derived)."""
OFFSET_WEIGHT_ROUNDING = 4.0
"""Rounding of a channel's factor 1 + w in Gemma's norms, in epsilons. The weight w is rounded by up to half an epsilon
of its own size. If 1 + w is an eighth, w is nearly -1 and its channel differs by 3.5 epsilons in every row (derived).
"""
STORAGE_EPSILON = 2.0**-4
"""Epsilon from which a format only stores values (FP8): they are computed in 16 bits or more and rounded to the format
once, by half a step on each side (derived)."""
REDIRECTED_ROW_ERROR = 2.0
"""Maximum error of a row that was computed from a different value: the distance to a vector of equal size in the
opposite direction (derived)."""
REDIRECTED_SMALL_ROW_ERROR = 5.0
"""Maximum error of a small redirected row, which counts as at least a quarter of the typical row: the distance to a
vector of typical size in the opposite direction (derived)."""

# Dataflow where inputs were not captured

INPUT_WINDOW = 8
"""Number of preceding sites that stand in for inputs that were not captured (fitted)."""
OPS_PER_LAYER = 8
"""Number of sequential roundings in a decoder layer without captured submodules (derived: norm, projection, attention,
projection, add, and the same for the MLP)."""
OPS_POINTWISE = 6
"""Number of sequential roundings in a pointwise function: ``x * 0.5 * (1 + tanh(a * (x + b * x**3)))`` (derived)."""

# Gradients

RELU_ZERO_SHARE = 0.05
"""Minimum fraction of zeros in the gradient of a ReLU whose class is unknown (fitted)."""
NORMAL_DENSITY_AT_ZERO = math.sqrt(2.0 / math.pi)
"""Fraction of normal values within e standard deviations of 0, divided by e, for small e: 0.8 (derived)."""
MIN_KINK_CROSSINGS = 10
"""Number of elements that may change sides of a ReLU's kink however small the errors are: the number is a Poisson
variable, and values in one sum are not independent (fitted)."""
KINK_CROSSING_MARGIN = 4.0
"""Maximum number of kink crossings relative to the expected number, since values may be denser near 0 than normal
values (fitted)."""
MATRIX_NDIM = 2
"""Number of dimensions of a linear map's weight; weights of experts have one more."""

# Other formats

KV_CACHE_STEP_SHARE = ULP_SHARE * math.sqrt(2.0 / math.pi)
"""Mean step of a number format, in epsilons, times the ratio of a normal error's mean magnitude to its root mean square
(derived)."""
ROPE_ROUNDING = ROUND_TO_NEAREST * TWO_SIDES * 2.0**-24
"""Rounding of a rotary angle in float32 on both sides, relative to the angle; frameworks compute angles in float32
regardless of the model's dtype (derived)."""
