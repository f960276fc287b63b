"""The driver's stream capture mode of this thread: which calls invalidate the capture of a CUDA graph."""

import ctypes

THREAD_LOCAL = 1
"""Calls of this thread are checked against its own captures only: cudaStreamCaptureModeThreadLocal."""
RELAXED = 2
"""No call of this thread is checked: cudaStreamCaptureModeRelaxed."""


def exchange_capture_mode(mode: int) -> int | None:
    """Set the mode; returns the previous one, or None without a CUDA driver."""
    value = ctypes.c_int(mode)
    try:
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    except (OSError, AttributeError):
        return None
    return value.value
