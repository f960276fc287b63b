"""Triton and C++ kernels, each next to its plain reference."""
