"""CUDAGraphManager: the CUDA graphs of one model, and which of them computes a step."""

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
    """Why no step on a GPU can run as a CUDA graph; None if decoding steps can."""
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
    """Whether decoding steps on ``device`` can run as CUDA graphs.

    Logs why not, unless ``device`` is a CPU or ``cuda_graphs='off'``.
    """
    if device.type != "cuda" or config.cuda_graphs == "off":
        return False
    obstacle = why_no_graphs(config, model, cache)
    if obstacle is not None:
        _log.warning("CUDA graphs are off, steps run eagerly: %s", obstacle)
    return obstacle is None


class CUDAGraphManager:
    """The graphs of decoding steps and, where they are wanted and possible, of steps with prompts.

    Any other step runs eagerly. Every rank has graphs of the same buckets, and dispatches a step in the same way.
    """

    def __init__(self, tp: TensorParallel, decode: DecodeGraphs, prefill: PrefillGraphs | None = None) -> None:
        self._tp = tp
        self.decode = decode
        """Of decoding steps, and of those that verify chains of drafts."""
        self.prefill = prefill
        """Of steps with prompts; None: these run eagerly."""
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
        """Graphs of the steps in ``buffers``; none is captured yet.

        ``max_rows``: rows of a step of single rows; ``max_request_rows``: rows of a request in one; ``max_tokens``:
        rows of a step with prompts; ``extra_widths``: widths of further arguments [rows, width] of the model in
        ``dtype``, by name; ``numerics``, ``stream``: see :class:`.DecodeGraphs`; ``is_observed``: graphs may be
        captured with taps.
        """
        device = cache.device
        extra = {name: torch.zeros(max_rows, width, dtype=dtype, device=device) for name, width in extra_widths.items()}
        how: dict[str, Any] = {"numerics": numerics, "stream": stream}
        decode = DecodeGraphs(model, buffers, buckets(max_rows), max_request_rows=max_request_rows, extra=extra, **how)
        prefill: PrefillGraphs | None = None
        if config.cuda_graphs == "all" and why_no_prefill_graphs(model, cache, extra_widths) is None:
            most = min(max_prefill_tokens(model), max_tokens, model.config.max_positions)
            prefill = PrefillGraphs(model, buffers, prefill_buckets(most), **how)
        if config.tp > 1:
            model.tp.capture_collectives(apart=is_observed or prefill is not None)
        return cls(model.tp, decode, prefill)

    def compile_kernels(self, device: torch.device, observer: GraphObserver | None = None) -> None:
        """Compile the kernels of all buckets in parallel, where the first steps would do so one after the other.

        With ``observer``, those of decoding steps while all of its taps are in place: modules that hooks watch are not
        fused with others, which takes other kernels. Those of the smallest and the largest bucket come first: if they
        were compiled in an earlier start, so were the others. Ranks share the work.
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
        """Bytes that all graphs will take, also those captured later and with ``num_tap_sets`` sets of taps.

        See :meth:`.DecodeGraphs.measure`. Raises RankLostError.
        """
        prefill = 0 if self.prefill is None else self.prefill.measure()
        return prefill + self.decode.measure(num_tap_sets)

    def capture(self) -> None:
        """Capture the graphs; the ranks do so together, and destroy them before they disconnect. Raises ConfigError."""
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
        """Destroy the graphs; later steps have none."""
        self.decode.release()
        if self.prefill is not None:
            self.prefill.release()

    def dispatch(self, plan: StepPlan) -> DecodeGraphs | None:
        """The graphs that compute ``plan``, if they have one of its size; None: it runs eagerly."""
        if self.why_eager(plan) is not None:
            return None
        return self.prefill if self.decode.bucket_of(plan) is None else self.decode

    def padded_size(self, plan: StepPlan) -> int | None:
        """Rows of ``plan`` in a graph, to which it is also padded where it runs eagerly but must have the same shapes;
        None for no padding. Equal on all ranks.
        """
        if self.why_eager(plan) is not None:
            return None
        size = self.decode.bucket_of(plan)
        return self.prefill.bucket_of(plan) if size is None and self.prefill is not None else size

    def why_eager(self, plan: StepPlan) -> str | None:
        """What in the requests of ``plan`` keeps it from running as a graph; None if nothing does."""
        if plan.has_adapters:
            return "requests have LoRA adapters"
        return "requests have recorded experts" if plan.has_experts else None

    def warn_of_eager(self, reason: str) -> None:
        """Warn once for each reason that graphs are not used."""
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("%s: steps run eagerly, without CUDA graphs", reason)
