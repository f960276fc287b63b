"""Kernels on a CPU's torch tensors: C++ of :mod:`tapscope.kernels.native` where it serves."""

from tapscope.kernels.cpu.linear import linear
from tapscope.kernels.cpu.paged import paged_attention, paged_reference

__all__ = ["linear", "paged_attention", "paged_reference"]
