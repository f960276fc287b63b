"""Helpers for tests of the C++ library; without a compiler it is not built, and numpy is the backend."""

import pytest

from tapscope.kernels.native import backend

needs_library = pytest.mark.skipif(backend()[0] != "c++", reason=f"needs the C++ library: {backend()[1]}")
BACKENDS = ["numpy", pytest.param("c++", marks=needs_library)]
