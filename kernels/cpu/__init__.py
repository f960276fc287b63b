"""Kernels on a CPU's torch tensors: C++ of :mod:`tapscope.kernels.native` where it serves."""

from tapscope.kernels.cpu.linear import grouped_linear, linear
from tapscope.kernels.cpu.paged import paged_attention, paged_reference

__all__ = ["grouped_linear", "linear", "paged_attention", "paged_reference"]
