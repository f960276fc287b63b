"""Statistics, hash and comparison of tensor bytes, in C++ through ctypes or, without a compiler, in numpy.

Both backends give the same counts and hashes bit for bit; sums agree to float32 block precision (about 1e-6).
"""

from tapscope.kernels.native.compare import compare_rows
from tapscope.kernels.native.library import backend, use_backend
from tapscope.kernels.native.measure import Measure, RowMeasures
from tapscope.kernels.native.summary import Summary, summarize, summarize_array

__all__ = [
    "Measure",
    "RowMeasures",
    "Summary",
    "backend",
    "compare_rows",
    "summarize",
    "summarize_array",
    "use_backend",
]
