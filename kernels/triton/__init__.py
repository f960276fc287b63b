"""Triton kernels for CUDA tensors: one kernel family per module, each with its plain PyTorch reference implementation.

Import the module you need (``paged_decode``, ``norm``, ``rope``, ...); every module imports Triton. The engine does not
call ``hadamard`` and ``page_transfer`` yet.

:func:`why_not` checks device support without importing Triton; callers fall back to PyTorch on unsupported devices.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

_log = logging.getLogger(__name__)


def why_not(device: torch.device) -> str | None:
    """Return why the kernels do not run on ``device``, worded as the end of a sentence, or None if the kernels run.

    With TRITON_INTERPRET=1, Triton's interpreter runs the kernels on the CPU for tests: slowly, and without bfloat16.
    """
    if not _is_installed():
        return "Triton is not installed (pip install triton, in the version that torch asks for)"
    if is_interpreted():
        return None if device.type == "cpu" else f"TRITON_INTERPRET=1 runs kernels on a CPU, not on {device}"
    if device.type != "cuda":
        return f"Triton compiles for CUDA, not for {device}"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= (8, 0) else f"{device} has compute capability {capability}; 8.0 is the least"


@contextmanager
def compiled_ahead(device: torch.device, rank: int = 0, size: int = 1) -> Iterator[Any]:
    """Context manager: compile the kernels launched inside in parallel, see :func:`.compile_ahead.compiled_ahead`.

    Yields None, and launches run as usual, if ``device`` is unsupported or this Triton cannot compile in threads.
    The other ranks are expected to launch the same kernels. An exception inside the context ends it early and is
    logged; the remaining kernels are compiled at their first launch.
    """
    if device.type != "cuda" or why_not(device) is not None:
        yield None
        return
    from tapscope.kernels.triton import compile_ahead  # imports Triton

    if not compile_ahead.is_available():
        yield None
        return
    try:
        with compile_ahead.compiled_ahead(rank, size) as compiled:
            yield compiled
    except Exception as error:  # noqa: BLE001 - compiling ahead is only an optimization
        _log.info("some Triton kernels are compiled at their first launch, not ahead in parallel: %r", error)


def is_interpreted() -> bool:
    """Return whether TRITON_INTERPRET enables Triton's interpreter; Triton reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "True", "on")


def _is_installed() -> bool:
    try:
        return find_spec("triton") is not None
    except ModuleNotFoundError:
        return False
