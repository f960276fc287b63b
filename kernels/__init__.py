"""Triton and C++ kernels, each beside its plain reference."""
