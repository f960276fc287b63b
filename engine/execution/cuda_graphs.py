"""DecodeGraphs: steps of single rows as CUDA graphs, one for each size of batch out of a few.

A step in which every request has one row is padded to the next *bucket* of rows. All it reads lies in static memory
(:class:`InputBuffers`, the KV cache, the weights), so that the decoder's kernels, recorded once for a bucket, compute
any such step. The embedding, the layers and the last norm are recorded; lm_head and the sampler are not: they follow
as ordinary kernels while the graph runs, and their logits need no static memory.

While an observer's taps are in place, the graphs are others (:meth:`DecodeGraphs.tapped`), recorded with the modules
called and the taps in them; the rest of the model is called as in any step.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tapscope.core.observe import GraphObserver
from tapscope.engine.execution.input_buffers import InputBuffers, StepInputs
from tapscope.engine.models.decoder import CausalLM, ModelOutput
from tapscope.engine.requests.step_plan import StepPlan

_MAX_TAP_SETS = 3
_log = logging.getLogger(__name__)
cuda: Any = torch.cuda  # parts of it have no type hints


def buckets(max_rows: int) -> list[int]:
    """Rows that steps are padded to, ascending: 1, 2, 4, then every 8 to 256, then every 32; the last is max_rows."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_rows, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def bucket_of(plan: StepPlan, sizes: list[int]) -> int | None:
    """The fewest of ``sizes`` that hold ``plan``; None unless every request has one row, whose logits are computed."""
    if len(plan.logit_rows) != len(plan.scheduled) or plan.num_tokens != len(plan.scheduled):
        return None
    place = bisect_left(sizes, len(plan.scheduled))
    return sizes[place] if place < len(sizes) else None


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    """Kept, since the graph reads their memory."""
    hidden: Tensor
    """[rows, hidden], written by every replay."""
    chosen: tuple[Tensor | None, ...]
    """What each router left in its ``chosen``."""


def _replayed(recorded: _Recorded, *args: Any, **kwargs: Any) -> ModelOutput:
    recorded.graph.replay()
    return ModelOutput(recorded.hidden)


class DecodeGraphs:
    """The recorded steps of one model on one GPU."""

    def __init__(self, model: CausalLM, buffers: InputBuffers, sizes: list[int]) -> None:
        self._model, self._buffers, self._sizes = model, buffers, sizes
        self._recorded: dict[int, _Recorded] = {}
        self._tapped: dict[str, dict[int, _Recorded | None]] = {}  # tap set -> rows -> graph, the latest last
        self._pool: Any = None
        self._routers: list[Any] = [module for module in model.modules() if hasattr(module, "chosen")]
        self.num_bytes = 0
        """Device memory that the graphs take."""

    @torch.no_grad()
    def record(self) -> None:
        """Record every bucket, the largest first, so that the others find room in its memory.

        A bucket whose recording runs out of memory is left out, with those not recorded yet; steps that it would have
        held run as ordinary kernels.
        """
        self._recorded.clear()
        self._tapped.clear()
        self._pool = cuda.graph_pool_handle()
        free, _ = torch.cuda.mem_get_info()
        for size in reversed(self._sizes):
            try:
                self._recorded[size] = self._record(size)
            except torch.cuda.OutOfMemoryError:
                _log.warning(
                    "out of memory while recording the CUDA graph of %d rows: such steps run without a graph; "
                    "lower kv_cache_memory_bytes, or set cuda_graphs='off'",
                    size,
                )
                break
        self.num_bytes = max(0, free - torch.cuda.mem_get_info()[0])
        _log.info("CUDA graphs of %d batch sizes, %.1f MiB", len(self._recorded), self.num_bytes / 2**20)

    def _record(self, size: int, rehearsal: Callable[[], AbstractContextManager[None]] = nullcontext) -> _Recorded:
        self._buffers.load_padding(size)
        stream: torch.cuda.Stream = cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # Kernels are compiled, and libraries choose theirs, outside the recording.
        with torch.cuda.stream(stream), rehearsal():
            self._decode(self._buffers.single_rows(size))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            inputs = self._buffers.single_rows(size)
            hidden = self._decode(inputs)
        return _Recorded(graph, inputs, hidden, tuple(router.chosen for router in self._routers))

    def _decode(self, inputs: StepInputs) -> Tensor:
        output: Tensor = self._model.model(
            inputs.input_ids, position_ids=inputs.position_ids, past_key_values=inputs.cache
        ).last_hidden_state
        return output

    def run(self, plan: StepPlan) -> Tensor | None:
        """Last hidden states [requests, hidden], valid until the next step; None where no graph computes ``plan``."""
        size = bucket_of(plan, self._sizes)
        recorded = None if size is None else self._recorded.get(size)
        if recorded is None:
            return None
        self._buffers.fill(plan, size)
        recorded.graph.replay()
        count = len(plan.scheduled)
        for router, chosen in zip(self._routers, recorded.chosen, strict=True):
            router.chosen = None if chosen is None else chosen[:count]
        return recorded.hidden[:count]

    def tapped(self, size: int, observer: GraphObserver) -> Callable[..., ModelOutput] | None:
        """What stands in for the decoder in a step of ``size`` rows, loaded already, and fires the observer's taps.

        A graph is recorded for the taps in place when a step of this size first needs it. None where its memory is not
        there. Of the tap sets, the graphs of the last few are kept.
        """
        state = observer.tap_state
        graphs = self._tapped.pop(state, {})
        self._tapped[state] = graphs
        while len(self._tapped) > _MAX_TAP_SETS:
            del self._tapped[next(iter(self._tapped))]
        if size not in graphs:
            graphs[size] = self._record_tapped(size, observer)
        recorded = graphs[size]
        return None if recorded is None else partial(_replayed, recorded)

    @torch.no_grad()
    def _record_tapped(self, size: int, observer: GraphObserver) -> _Recorded | None:
        try:
            return self._record(size, observer.rehearsal)
        except torch.cuda.OutOfMemoryError:
            _log.warning(
                "out of memory while recording the CUDA graph of %d rows with taps: such steps run kernel by kernel; "
                "select fewer sites, keep statistics, or lower kv_bytes",
                size,
            )
            return None
