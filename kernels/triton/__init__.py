"""Triton kernels for torch tensors on a CUDA device: one family a file, the plain torch reference before the kernel.

``paged_decode``, ``norm``, ``rope``, ``activation``: import the module that is needed, since each imports Triton.
:func:`why_not` tells, without importing Triton, whether a device is served; callers use torch where it is not.
"""

import os
from importlib.util import find_spec

import torch


def why_not(device: torch.device) -> str | None:
    """Why the kernels do not run on ``device``, as the end of a sentence; None where they do.

    With TRITON_INTERPRET=1 Triton's interpreter runs them on a CPU, for tests: slowly, and not in bfloat16.
    """
    if not _is_installed():
        return "Triton is not installed (pip install triton, in the version that torch asks for)"
    if is_interpreted():
        return None if device.type == "cpu" else f"TRITON_INTERPRET=1 runs kernels on a CPU, not on {device}"
    if device.type != "cuda":
        return f"Triton compiles for CUDA, not for {device}"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= (8, 0) else f"{device} has compute capability {capability}; 8.0 is the least"


def is_interpreted() -> bool:
    """Whether Triton's interpreter is asked for; settled when Triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "True", "on")


def _is_installed() -> bool:
    try:
        return find_spec("triton") is not None
    except ModuleNotFoundError:
        return False
