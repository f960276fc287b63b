"""Ahead-of-time compilation of the Triton kernels that taps launch, in parallel.

Triton compiles a kernel at its first launch, which takes one to three seconds. Without this module, the first step with
taps would compile several kernels one after another.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tapscope.dumper.device.private_memory import is_pooled
from tapscope.kernels import triton

_log = logging.getLogger("tapscope")
_Kind = tuple[torch.device, torch.dtype, bool]
_compiled: set[_Kind] = set()
cuda: Any = torch.cuda  # parts of it have no type hints


def compile_ahead(models: Iterable[nn.Module], *, sketches: bool, rank: int = 0, world_size: int = 1) -> None:
    """Compile the statistics kernels for the given models, and with ``sketches`` also the sketch kernels.

    Each kernel is compiled once per process. The values of a model are expected to have the dtypes of its
    floating-point parameters, float32 or int64; kernels for other dtypes are compiled at their first launch. Does
    nothing for models without CUDA parameters. Ranks share the work if all of them call this function with models of
    the same dtypes.
    """
    if not cuda.is_initialized() or is_pooled() or cuda.is_current_stream_capturing():
        return  # allocations would come from the memory pool of a graph
    parameters = [each for model in models for each in model.parameters() if each.is_cuda]
    for device in {each.device for each in parameters}:
        found = {each.dtype for each in parameters if each.device == device and each.dtype.is_floating_point}
        dtypes = sorted({*found, torch.float32, torch.int64}, key=str)  # in one order on all ranks
        kinds = [(device, dtype, is_sketch) for is_sketch in sorted({False, sketches}) for dtype in dtypes]
        new = [kind for kind in kinds if kind not in _compiled]
        if new:
            _compiled.update(new)
            _compile(device, new, rank, world_size)


def _compile(device: torch.device, kinds: Iterable[_Kind], rank: int, world_size: int) -> None:
    began = time.perf_counter()
    with cuda.device(device), torch.inference_mode(False), triton.compiled_ahead(device, rank, world_size) as compiled:
        if compiled is not None:
            for _, dtype, is_sketch in kinds:
                launch_variants(device, dtype, is_sketch=is_sketch)
    if compiled is not None and compiled.names:
        _log.info("compiled %d Triton kernels of taps in %.1f s", len(compiled.names), time.perf_counter() - began)


def launch_variants(device: torch.device, dtype: torch.dtype, *, is_sketch: bool) -> None:
    """Launch all variants of the statistics kernels for ``dtype``, or with ``is_sketch`` of the sketch kernels."""
    from tapscope.kernels.triton import sketch, sketch_table, tap  # need Triton

    if is_sketch and dtype in sketch.TYPES:
        sketch_table.launch_variants(device, dtype)
        tap.launch_variants(device, dtype, after_sketch=True)
    elif not is_sketch and dtype in tap.FORMATS:
        tap.launch_variants(device, dtype)
