"""CPU kernels for tensor statistics, hashes and comparison: C++ or, where no compiler was available, numpy.

Both backends return bit-identical counts, extremes and digests; sums agree to about 1e-6, the precision of a float32
block.
"""

from tapscope.kernels.native.aggregate import Overview, Overviews, overview, overviews
from tapscope.kernels.native.channels import channel_sums
from tapscope.kernels.native.compare import Compared, compare_rows, compare_strips
from tapscope.kernels.native.deviation import Deviation, deviation
from tapscope.kernels.native.fill_stats import fill, filled
from tapscope.kernels.native.library import backend, use_backend
from tapscope.kernels.native.measure import Measure, RowMeasures, relative_l2
from tapscope.kernels.native.reference import Summary
from tapscope.kernels.native.row_blocks import Strip
from tapscope.kernels.native.summary import digest_of, summarize, summarize_array, take

__all__ = [
    "Compared",
    "Deviation",
    "Measure",
    "Overview",
    "Overviews",
    "RowMeasures",
    "Strip",
    "Summary",
    "backend",
    "channel_sums",
    "compare_rows",
    "compare_strips",
    "deviation",
    "digest_of",
    "fill",
    "filled",
    "overview",
    "overviews",
    "relative_l2",
    "summarize",
    "summarize_array",
    "take",
    "use_backend",
]
