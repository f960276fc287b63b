"""Triton and C++ kernels, each with a reference implementation in plain PyTorch or NumPy."""
