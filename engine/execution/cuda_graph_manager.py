"""CUDAGraphManager: the CUDA graphs of one model, and the dispatch of steps to them."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch

from tapscope.core.observe import GraphObserver
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution.batch_invariant import what_needs_host
from tapscope.engine.execution.decode_graphs import DecodeGraphs, buckets
from tapscope.engine.execution.input_buffers import InputBuffers
from tapscope.engine.execution.prefill_graphs import (
    PrefillGraphs,
    max_prefill_tokens,
    prefill_buckets,
    why_no_prefill_graphs,
)
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.layers.experts import Experts
from tapscope.engine.layers.paged_attention import why_not_paged
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.requests.step_plan import StepPlan
from tapscope.kernels import triton

_log = logging.getLogger(__name__)


def why_no_graphs(config: EngineConfig, model: CausalLM, cache: KVCache) -> str | None:
    """Return why no step on a GPU can run as a CUDA graph; None if decode steps can."""
    waiting = what_needs_host(model) if config.batch_invariant else None
    reasons = {
        "cuda_graphs='off'": config.cuda_graphs == "off",
        f"batch_invariant=True with {waiting} cannot be captured": waiting is not None,
        "experts whose products wait for the host cannot be captured": any(
            isinstance(module, Experts) and module.waits_for_host for module in model.modules()
        ),
    }
    return next((what for what, holds in reasons.items() if holds), why_not_paged(cache))


def can_capture_graphs(config: EngineConfig, model: CausalLM, cache: KVCache, device: torch.device) -> bool:
    """Return whether decode steps on ``device`` can run as CUDA graphs.

    Logs the reason if not, unless ``device`` is a CPU or ``cuda_graphs='off'``.
    """
    if device.type != "cuda" or config.cuda_graphs == "off":
        return False
    obstacle = why_no_graphs(config, model, cache)
    if obstacle is not None:
        _log.warning("CUDA graphs are off, steps run eagerly: %s", obstacle)
    return obstacle is None


class CUDAGraphManager:
    """CUDA graphs of decode steps and, if requested and possible, of steps with prompts.

    All other steps run eagerly. Every rank has graphs for the same buckets, and dispatches a step in the same way.
    """

    def __init__(self, tp: TensorParallel, decode: DecodeGraphs, prefill: PrefillGraphs | None = None) -> None:
        self._tp = tp
        self.decode = decode
        """Graphs of decode steps, and of steps that verify chains of drafts."""
        self.prefill = prefill
        """Graphs of steps with prompts; None if these steps run eagerly."""
        self._warned: set[str] = set()

    @classmethod
    def make(
        cls,
        model: CausalLM,
        buffers: InputBuffers,
        config: EngineConfig,
        *,
        cache: KVCache,
        dtype: torch.dtype,
        max_rows: int,
        max_request_rows: int,
        max_tokens: int,
        extra_widths: Mapping[str, int],
        numerics: Callable[[], AbstractContextManager[Any]],
        stream: torch.cuda.Stream,
        is_observed: bool,
    ) -> Self:
        """Create the graphs of steps in ``buffers``, without capturing any.

        ``max_rows``: rows of a step of single rows; ``max_request_rows``: rows per request in that step;
        ``max_tokens``: rows of a step with prompts; ``extra_widths``: widths of additional model arguments [rows,
        width] in ``dtype``, by name; ``numerics``, ``stream``: see :class:`.DecodeGraphs`; ``is_observed``: graphs may
        be captured with taps.
        """
        device = cache.device
        extra = {name: torch.zeros(max_rows, width, dtype=dtype, device=device) for name, width in extra_widths.items()}
        shared: dict[str, Any] = {"numerics": numerics, "stream": stream}
        decode = DecodeGraphs(
            model, buffers, buckets(max_rows), max_request_rows=max_request_rows, extra=extra, **shared
        )
        prefill: PrefillGraphs | None = None
        if config.cuda_graphs == "all" and why_no_prefill_graphs(model, cache, extra_widths) is None:
            most = min(max_prefill_tokens(model), max_tokens, model.config.max_positions)
            prefill = PrefillGraphs(model, buffers, prefill_buckets(most), **shared)
        if config.tp > 1:
            model.tp.capture_collectives(apart=is_observed or prefill is not None)
        return cls(model.tp, decode, prefill)

    def compile_kernels(self, device: torch.device, observer: GraphObserver | None = None) -> None:
        """Compile the kernels of all buckets in parallel; otherwise the first steps would compile them sequentially.

        With ``observer``, compile those of decode steps with all of its taps in place: modules with hooks are not
        fused, so that other kernels run. The smallest and the largest bucket come first: if their kernels were compiled
        by an earlier start, so were all others. Ranks share the work.
        """
        began, names, tp = time.perf_counter(), [], self._tp
        kinds = [self.decode] if self.prefill is None or observer is not None else [self.decode, self.prefill]
        with nullcontext() if observer is None else observer.all_taps():
            for ends in (True, False):
                with triton.compiled_ahead(device, tp.rank, tp.size) as compiled:
                    for each in kinds if compiled is not None else ():
                        sizes = {each.sizes[0], each.sizes[-1]} if ends else each.sizes[1:-1]
                        each.compile_kernels(sizes, observer)
                if compiled is None or not compiled.names:
                    break
                names += compiled.names
        if names:
            what = "" if observer is None else " of steps with taps"
            _log.info("compiled %d Triton kernels%s in %.1f s", len(names), what, time.perf_counter() - began)

    def measure(self, num_tap_sets: int) -> int:
        """Return the bytes that all graphs will take, including later captures and ``num_tap_sets`` sets of taps.

        See :meth:`.DecodeGraphs.measure`. Raises RankLostError.
        """
        prefill = 0 if self.prefill is None else self.prefill.measure()
        return prefill + self.decode.measure(num_tap_sets)

    def capture(self) -> None:
        """Capture the graphs, on all ranks together; ranks destroy them before they disconnect. Raises ConfigError."""
        for graphs in (self.prefill, self.decode):
            if graphs is not None:
                self._tp.release_first(graphs.release)
                graphs.capture()

    def recapture(self) -> None:
        """Capture the graphs again. Raises ConfigError."""
        if self.prefill is not None:
            self.prefill.capture()
        self.decode.capture()

    def release(self) -> None:
        """Destroy the graphs; later steps run eagerly."""
        self.decode.release()
        if self.prefill is not None:
            self.prefill.release()

    def dispatch(self, plan: StepPlan) -> DecodeGraphs | None:
        """Return the graphs that compute ``plan``, or None if the step must run eagerly."""
        if self.why_eager(plan) is not None:
            return None
        return self.prefill if self.decode.bucket_of(plan) is None else self.decode

    def padded_size(self, plan: StepPlan) -> int | None:
        """Return the number of rows of ``plan`` in a graph, equal on all ranks; None for no padding.

        A step that runs eagerly but must have the same shapes as a graph is padded to this size, too.
        """
        if self.why_eager(plan) is not None:
            return None
        size = self.decode.bucket_of(plan)
        return self.prefill.bucket_of(plan) if size is None and self.prefill is not None else size

    def why_eager(self, plan: StepPlan) -> str | None:
        """Return the property of ``plan``'s requests that prevents a CUDA graph, or None."""
        if plan.has_adapters:
            return "requests have LoRA adapters"
        return "requests have recorded experts" if plan.has_experts else None

    def warn_of_eager(self, reason: str) -> None:
        """Log, once per ``reason``, that steps run without CUDA graphs."""
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("%s: steps run eagerly, without CUDA graphs", reason)
