"""PrefillGraphs: steps with prompts as CUDA graphs, one per bucket of token counts.

A step is padded to the next bucket of rows; the rows of padding are a request of their own, which writes only to the
dummy page. The number of requests is that of the buffers; programs of those without rows end immediately. So lengths,
row offsets, positions, slots and page tables are all read from static memory, and one graph computes any mixture of
prompts, chunks and decoding requests that fits.

Small models and short prompts wait for the host, and there a replay saves most of the step. A step of more tokens than
the largest bucket (:func:`max_prefill_tokens`) keeps the device busy by itself and runs eagerly.

The largest bucket is captured at start, since the others reuse its memory; they are captured when a step first needs
them, which delays that step by the time of one eager step and one capture.
"""

import logging
from bisect import bisect_left
from collections.abc import Mapping

import torch
from torch import Tensor

from tapscope.engine.execution.cuda_graphs import CapturedGraph, DecodeGraphs, cuda
from tapscope.engine.execution.input_buffers import StepInputs
from tapscope.engine.layers.experts import Experts
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.requests.step_plan import StepPlan

_log = logging.getLogger(__name__)
MAX_DECODE_LENGTH = 8192
"""Context of a decoding request in a graph, which reads it in few parts."""
_SIZES = (16, 32, 64, 96, *range(128, 1024, 64), *range(1024, 2049, 128))
_LAYER_FLOPS = 2e11
"""Operations of a layer that take an H200 about as long as the host needs to launch the layer's kernels, 0.4 ms."""


def prefill_buckets(max_tokens: int) -> list[int]:
    """Token counts that steps with prompts are padded to; the last is ``max_tokens``, or 2048 if that is less."""
    max_tokens = min(max_tokens, _SIZES[-1])
    return [size for size in _SIZES if size < max_tokens] + [max_tokens]


def max_prefill_tokens(model: CausalLM) -> int:
    """Tokens of a step above which the device, not the host, determines its time; a multiple of 64."""
    moe, layers = model.config.moe, model.decoder.layers
    is_of_experts = {id(p) for module in layers.modules() if isinstance(module, Experts) for p in module.parameters()}
    share = 1.0 if moe is None else moe.top_k / moe.num_experts
    weights = sum(p.numel() * (share if id(p) in is_of_experts else 1.0) for p in layers.parameters())
    return max(64, int(_LAYER_FLOPS * len(layers) / (2 * max(weights, 1.0))) // 64 * 64)


def prefill_bucket_of(plan: StepPlan, sizes: list[int]) -> int | None:
    """The smallest of ``sizes`` that fits the rows of ``plan``.

    None if none does, some rows are of a draft tree, or a decoding request has a context above
    :data:`MAX_DECODE_LENGTH`.
    """
    index = bisect_left(sizes, plan.num_tokens)
    if index == len(sizes):
        return None
    for item in plan.scheduled:
        if item.tree or (len(item.tokens) == 1 and item.position >= MAX_DECODE_LENGTH):
            return None
    return sizes[index]


class PrefillGraphs(DecodeGraphs):
    """The CUDA graphs of one model's steps with prompts, on one GPU."""

    @torch.no_grad()
    def record(self) -> None:
        """Capture the largest bucket; one for which memory does not suffice is left out, with a warning."""
        self._graphs.clear()
        self._pool = cuda.graph_pool_handle()
        self._stream = self._stream or cuda.Stream()  # cuBLAS keeps a workspace of 32 MiB for each stream
        free, _ = torch.cuda.mem_get_info()
        while self._sizes and self._recorded(self._sizes[-1]) is None:
            pass
        self.num_bytes = max(0, free - torch.cuda.mem_get_info()[0])
        if self._sizes:
            _log.info("CUDA graphs of up to %d tokens with prompts, %.1f MiB", self._sizes[-1], self.num_bytes / 2**20)

    def run(self, plan: StepPlan, extra: Mapping[str, Tensor] | None = None) -> Tensor | None:
        """As :meth:`DecodeGraphs.run`; captures the graph where this is the first step of its bucket."""
        while (size := prefill_bucket_of(plan, self._sizes)) is not None:
            if (recorded := self._recorded(size)) is not None:
                self._buffers.fill(plan, size, by_request=True)
                recorded.graph.replay()
                recorded.hold(plan.num_tokens)
                return recorded.hidden[: plan.num_tokens]
        return None

    def _recorded(self, size: int) -> CapturedGraph | None:
        """The graph of a bucket; None, and no such bucket from now on, if memory does not suffice."""
        if size not in self._graphs:
            try:
                self._graphs[size] = self._record(size)
            except torch.cuda.OutOfMemoryError:
                self._sizes.remove(size)
                _log.warning(
                    "out of memory while capturing the CUDA graph of %d tokens with prompts: there is none of this "
                    "size; lower kv_cache_memory_bytes, or set cuda_graphs='decode'",
                    size,
                )
                return None
        return self._graphs[size]

    def _load_padding(self, size: int) -> None:
        self._buffers.fill(StepPlan(step=0, phase="", scheduled=(), kv_pages_used=0), size, by_request=True)

    def _inputs(self, size: int) -> StepInputs:
        return self._buffers.request_rows(size)
