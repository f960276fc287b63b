"""PrefillGraphs: steps with prompts as CUDA graphs, one per bucket of token counts.

A step is padded to the next bucket of rows; the padding rows form a request of their own, which writes only to the
dummy page. The number of requests is that of the buffers; kernel programs of requests without rows end immediately.
Lengths, row offsets, positions, slots and page tables are thus all read from static memory, and one graph computes any
mixture of prompts, chunks and decode requests that fits.

Steps of small models and short prompts are bound by the host, where a replay saves most of the step. A step of more
tokens than the largest bucket (:func:`max_prefill_tokens`) keeps the device busy by itself and runs eagerly.

The largest bucket is captured at startup, because the others reuse its memory. The others are captured when a step
first needs them, which delays that step by one eager step and one capture. With several ranks, each rank captures
independently, as for graphs with taps; a rank without a graph for a step computes the step with the same number of
rows.
"""

import logging
from bisect import bisect_left
from collections.abc import Mapping

import torch
from torch import Tensor

from tapscope.core.errors import ConfigError
from tapscope.engine.execution.decode_graphs import CapturedGraph, DecodeGraphs, free_memory
from tapscope.engine.execution.input_buffers import StepInputs
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.layers.experts import Experts
from tapscope.engine.layers.paged_attention import MAX_HEAD_DIM
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.requests.step_plan import StepPlan

_log = logging.getLogger(__name__)
_SIZES = (16, 32, 64, 96, *range(128, 1024, 64), *range(1024, 2049, 128))
_LAYER_FLOPS = 2e11
"""Operations per layer that take an H200 about as long as the host needs to launch the layer's kernels, 0.4 ms."""


def prefill_buckets(max_tokens: int) -> list[int]:
    """Return the token counts to pad steps with prompts to; the last is ``max_tokens``, at most 2048."""
    max_tokens = min(max_tokens, _SIZES[-1])
    return [size for size in _SIZES if size < max_tokens] + [max_tokens]


def max_prefill_tokens(model: CausalLM) -> int:
    """Return the number of tokens above which a step is bound by the device, not the host; a multiple of 64."""
    moe, layers = model.config.moe, model.decoder.layers
    is_of_experts = {id(p) for module in layers.modules() if isinstance(module, Experts) for p in module.parameters()}
    share = 1.0 if moe is None else moe.top_k / moe.num_experts
    weights = sum(p.numel() * (share if id(p) in is_of_experts else 1.0) for p in layers.parameters())
    return max(64, int(_LAYER_FLOPS * len(layers) / (2 * max(weights, 1.0))) // 64 * 64)


def why_no_prefill_graphs(model: CausalLM, cache: KVCache, extra_widths: Mapping[str, int]) -> str | None:
    """Return why steps with prompts cannot run as CUDA graphs although decode steps can; None if they can too."""
    config = model.config
    head_dim = max(config.of_layer(layer).head_dim for layer in range(config.num_layers))
    reasons = {
        "a recurrent state": cache.states is not None,
        "latent attention (MLA)": config.mla is not None,
        "attention within chunks": any(map(config.chunk, range(config.num_layers))),
        f"heads of {head_dim} features": head_dim > MAX_HEAD_DIM,
        "the hidden states of another model": bool(extra_widths),
    }
    return next((what for what, holds in reasons.items() if holds), None)


class PrefillGraphs(DecodeGraphs):
    """CUDA graphs of one model's steps with prompts, on one GPU."""

    @torch.no_grad()
    def capture(self) -> None:
        """Capture the largest bucket for which memory suffices.

        All ranks capture together: one of several ranks cannot skip a bucket, so that running out of memory raises
        ConfigError.
        """
        self._graphs.clear()
        self._without_memory.clear()
        self._is_released = False
        self._start_pool()
        free = free_memory()
        largest = next((size for size in reversed(self._sizes) if self._graph_of(size, is_alone=False)), None)
        self.num_bytes = max(0, free - free_memory())
        if largest is not None:
            _log.info("CUDA graphs of up to %d tokens with prompts, %.1f MiB", largest, self.num_bytes / 2**20)

    def bucket_of(self, plan: StepPlan) -> int | None:
        """Return the bucket as in :class:`DecodeGraphs`, for any number of rows per request; None for draft trees."""
        index = bisect_left(self._sizes, plan.num_tokens)
        return None if index == len(self._sizes) or any(item.tree for item in plan.scheduled) else self._sizes[index]

    def run(
        self, plan: StepPlan, extra: Mapping[str, Tensor] | None = None, tokens: Tensor | None = None
    ) -> Tensor | None:
        """Compute a step as :meth:`DecodeGraphs.run`; the first step of a bucket captures its graph."""
        size = self.bucket_of(plan)
        if size is None or (captured := self._graph_of(size, is_alone=True)) is None:
            return None
        self._buffers.fill(plan, size, by_request=True)
        return self._replay_plan(plan, captured)

    def _graph_of(self, size: int, *, is_alone: bool) -> CapturedGraph | None:
        """Return the graph of a bucket, captured if missing; None, from then on, if memory does not suffice.

        Raises ConfigError, RankLostError.
        """
        if size in self._graphs or size in self._without_memory:
            return self._graphs.get(size)
        tp = self._model.tp
        tp.check()
        try:
            self._keep(self._graphs, size, self._capture(size, is_alone=is_alone))
        except torch.cuda.OutOfMemoryError as error:
            remedy = "lower kv_cache_memory_bytes, or set cuda_graphs='decode'"
            what = f"out of memory while capturing the CUDA graph of {size} tokens with prompts"
            if tp.size > 1 and not is_alone:
                raise ConfigError(f"rank {tp.rank}: {what}; {remedy}") from error
            _log.warning("%s: steps of this size run without a graph; %s", what, remedy)
            self._without_memory.add(size)
        except RuntimeError:
            tp.check()
            raise
        return self._graphs.get(size)

    def _load_padding(self, size: int) -> None:
        self._buffers.fill(StepPlan(step=0, phase="", scheduled=(), kv_pages_used=0), size, by_request=True)

    def _inputs(self, size: int) -> StepInputs:
        return self._buffers.request_rows(size)
