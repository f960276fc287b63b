"""The calling thread's CUDA stream capture mode, which determines the calls that invalidate a graph capture."""

import ctypes

THREAD_LOCAL = 1
"""cudaStreamCaptureModeThreadLocal: unsafe calls of this thread invalidate only captures of this thread."""
RELAXED = 2
"""cudaStreamCaptureModeRelaxed: no call of this thread invalidates a capture."""


def exchange_capture_mode(mode: int) -> int | None:
    """Set the capture mode of the calling thread; returns the previous mode, or None without a CUDA driver."""
    value = ctypes.c_int(mode)
    try:
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    except (OSError, AttributeError):
        return None
    return value.value
