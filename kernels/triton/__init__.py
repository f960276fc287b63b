"""Triton kernels for torch tensors on a CUDA device: one family a file, the plain torch reference before the kernel.

``paged_decode``, ``norm``, ``rope``, ``activation``: import the module that is needed, since each imports Triton. The
engine does not call ``hadamard`` and ``page_transfer`` yet.

:func:`why_not` tells, without importing Triton, whether a device is served; callers use torch where it is not.
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


@contextmanager
def compiled_ahead(device: torch.device, rank: int = 0, size: int = 1) -> Iterator[Any]:
    """Compile in parallel what is launched inside, see :func:`.compile_ahead.compiled_ahead`; None where it is launched
    instead, since ``device`` has no kernels or Triton compiles in no threads. The other ranks launch the same.

    An exception inside ends it early and is logged; kernels that are not compiled then are so when they are launched.
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
    except Exception as error:  # noqa: BLE001 - nothing depends on it
        _log.info("some Triton kernels are compiled at their first launch, not ahead in parallel: %r", error)


def is_interpreted() -> bool:
    """Whether Triton's interpreter is asked for; settled when Triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "True", "on")


def _is_installed() -> bool:
    try:
        return find_spec("triton") is not None
    except ModuleNotFoundError:
        return False
