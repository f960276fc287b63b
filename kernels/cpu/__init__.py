"""Kernels on a CPU's torch tensors: C++ of :mod:`tapscope.kernels.native` where it serves, and torch otherwise.

Each function is named and called as torch's, which is its plain reference.
"""

from tapscope.kernels.cpu.linear import linear

__all__ = ["linear"]
