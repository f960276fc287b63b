"""Device-to-host copies started through the CUDA driver directly, in a third of the time that torch takes."""

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tapscope.kernels.native import library

if TYPE_CHECKING:
    from tapscope.kernels.triton.launch import DriverLaunch

_cuda: Any = torch._C


def packed_copies(copies: Sequence[tuple[int, int, int]]) -> bytes:
    """Pack (destination address, source address, nbytes) triples for :func:`start_copies`.

    Host memory must be page-locked.
    """
    return b"".join(struct.pack("3q", *copy) for copy in copies)


def start_copies(
    device: torch.device,
    event: torch.cuda.Event,
    copies: bytes,
    *,
    stream: int | None = None,
    merge: "tuple[DriverLaunch, int, int] | None" = None,
    aside: tuple[torch.cuda.Stream, bytes] | None = None,
) -> bool:
    """Start ``copies`` on ``stream`` (None: the current stream of ``device``) and record ``event`` after them.

    ``merge``, if given, is launched first: (launch of :func:`tapscope.kernels.triton.tap.merge`, number of rows, their
    address). ``aside`` is (stream, copies) to run after all of ``copies``; ``event`` is then recorded on that stream.
    Returns False, so that the caller must use torch, if ``device`` is not the current device, ``event`` was never
    recorded, or the C++ library is missing. Raises RuntimeError when the device has failed.
    """
    functions, handle = library.functions(), event.cuda_event
    if functions is None or not handle or device.index is None:
        return False
    if stream is None:
        stream = _cuda._cuda_getCurrentRawStream(device.index)
    launch = None
    if merge is not None:
        kernel, count, rows = merge
        launch = kernel.function, count, kernel.threads, kernel.shared, kernel.overlaps, rows
    aside_copies = None if aside is None else (aside[0].cuda_stream, aside[1])
    return functions.copy_async(device.index, stream, handle, copies, launch, aside_copies)
