"""Kernels for torch CPU tensors, implemented in C++ (:mod:`tapscope.kernels.native`) where supported."""

from tapscope.kernels.cpu.linear import grouped_linear, linear
from tapscope.kernels.cpu.paged import paged_attention, paged_reference

__all__ = ["grouped_linear", "linear", "paged_attention", "paged_reference"]
