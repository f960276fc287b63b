"""DecodeGraphs: decode steps as CUDA graphs, one per bucket of batch sizes.

A step in which every request has one row is padded to the next *bucket* of rows. Its inputs are in static memory
(:class:`InputBuffers`, the KV cache, the weights), so that a graph captured once per bucket computes any step of this
kind. The graph contains the embedding, the layers and the final norm. lm_head and the sampler are not captured: they
are launched as ordinary kernels while the graph runs, and their logits need no static memory.

With speculative decoding a request may have several rows: its last tokens and a chain of drafts. The same graphs
compute these as single rows, each attending up to its own position, because a layer stores the keys and values of all
rows before any row attends. The attention kernel detects adjacent rows of one request, and reads their keys and values
once.

Collectives of tensor-parallel ranks are part of the graph. Every rank runs a given step with the same number of rows,
with or without a graph, so that the collectives match. All ranks capture the same buckets together at startup.

While an observer's taps are attached, separate graphs are used (:meth:`DecodeGraphs.tapped`), which are captured with
the taps; the rest of the model is called as in any step. Each rank decides for itself whether it has taps and whether
to capture: neither a capture nor the warm-up before it communicates with other ranks. A step has the same collectives
in a graph with taps, in a graph without taps, and in eager execution.
"""

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tapscope.core.errors import ConfigError, RankLostError
from tapscope.core.gc_control import gc_paused
from tapscope.core.observe import GraphObserver
from tapscope.engine.execution.input_buffers import InputBuffers, StepInputs
from tapscope.engine.layers.experts import Experts, excluding_padding
from tapscope.engine.layers.grouped_linear import in_one_launch
from tapscope.engine.models.decoder import CausalLM, ModelOutput
from tapscope.engine.models.draft_head import DraftHead
from tapscope.engine.requests.step_plan import StepPlan

MAX_TAP_SETS = 3
"""Number of tap sets whose graphs are kept."""
_MEASURED = 4
"""Number of graphs captured to estimate the memory of all graphs."""
_log = logging.getLogger(__name__)
_MAX_LOGIT_ROWS = 256
"""Largest number of rows for which :meth:`DecodeGraphs.compile_kernels` runs the output head."""
cuda: Any = torch.cuda  # parts of it have no type hints


def free_memory() -> int:
    """Return the free bytes of the current GPU after emptying torch's caching allocator."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def buckets(max_rows: int) -> list[int]:
    """Return the row counts to pad to: 1, 2, 4, multiples of 8 below 256, then every 32; the last is ``max_rows``."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_rows, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """CUDA graph of a step of one bucket."""

    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    """Kept alive because the graph reads its memory."""
    hidden: Tensor
    """[rows, hidden], written by every replay."""
    held: tuple[tuple[Any, str, Any], ...]
    """(module, attribute, value) of further outputs [rows, ...] that modules keep after a step."""

    def hold(self, count: int) -> None:
        """Set the kept outputs of modules to the first ``count`` rows of a replay, as after a call of the modules."""
        for module, name, value in self.held:
            held = [each[:count] for each in value] if isinstance(value, list) else value
            setattr(module, name, held[:count] if isinstance(held, Tensor) else held)


class DecodeGraphs:
    """CUDA graphs of one model on one GPU."""

    def __init__(
        self,
        model: CausalLM,
        buffers: InputBuffers,
        sizes: list[int],
        numerics: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        max_request_rows: int = 1,
        extra: Mapping[str, Tensor] | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """``numerics`` is entered during capture, for example the mode of batch-invariant functions. ``extra``: static
        memory [rows, ...] of further inputs, by argument name. ``stream``: stream of captures; None creates one. cuBLAS
        keeps 32 MiB per stream.
        """
        self._model, self._buffers, self._sizes, self._numerics = model, buffers, sizes, numerics
        self.max_request_rows = max_request_rows
        """Maximum number of rows per request in a step."""
        self._extra = dict(extra or {})
        self._graphs: dict[int, CapturedGraph] = {}
        self._tapped: dict[str, dict[int, CapturedGraph | None]] = {}  # by tap set in LRU order, then rows
        self._pool: Any = None
        self._stream: Any = stream
        self._without_memory: set[int] = set()  # buckets whose capture ran out of memory: not captured again
        self._in_use = threading.Lock()
        self._is_released = False
        names = "chosen", "aux_hidden_states"  # attributes of routers, and of decoders for EAGLE-3
        self._holders = [(module, name) for module in model.modules() for name in names if hasattr(module, name)]
        if isinstance(model, DraftHead):
            self._holders.append((model, "last_hidden_state"))
        self._experts = [module for module in model.modules() if isinstance(module, Experts)]
        self.num_bytes = 0
        """Device memory of the graphs."""

    @property
    def sizes(self) -> Sequence[int]:
        """Number of rows of each bucket, ascending."""
        return self._sizes

    @torch.no_grad()
    def capture(self) -> None:
        """Capture every bucket, the largest first, so that smaller ones reuse its memory.

        If a capture runs out of memory, that bucket and the smaller ones have no graph, and their steps run eagerly.
        With several ranks, one rank cannot decide this for the others: raises ConfigError.
        """
        self._graphs.clear()
        self._tapped.clear()
        self._is_released = False
        self._start_pool()
        free = free_memory()
        for size in reversed(self._sizes):
            try:
                self._keep(self._graphs, size, self._capture(size))
            except torch.cuda.OutOfMemoryError as error:
                if self._model.tp.size > 1:
                    raise ConfigError(
                        f"rank {self._model.tp.rank}: out of memory while capturing the CUDA graph of {size} rows; "
                        "lower kv_cache_memory_bytes, or set cuda_graphs='off'"
                    ) from error
                _log.warning(
                    "out of memory while capturing the CUDA graph of %d rows: steps of this size run without a graph; "
                    "lower kv_cache_memory_bytes, or set cuda_graphs='off'",
                    size,
                )
                break
        self.num_bytes = max(0, free - free_memory())
        _log.info("captured CUDA graphs of %d batch sizes, %.1f MiB", len(self._graphs), self.num_bytes / 2**20)

    def release(self) -> None:
        """Destroy the graphs, from any thread; later steps run without graphs."""
        with self._in_use:
            self._is_released = True
            kept = [*self._graphs.values()]
            kept += [each for graphs in self._tapped.values() for each in graphs.values() if each is not None]
            self._graphs, self._tapped = {}, {}
            for captured in kept:
                captured.graph.reset()

    @torch.no_grad()
    def measure(self, num_tap_sets: int = 0) -> int:
        """Return the bytes that all graphs will take, including later captures and ``num_tap_sets`` sets of taps.

        The largest buckets are captured and destroyed. The memory of the first is shared by all graphs; the increments
        of the others give the memory per graph. Other ranks must measure at the same time. Raises RankLostError.
        """
        self._start_pool()
        self._is_released = False
        sizes, free = self._sizes[::-1][:_MEASURED], [free_memory()]
        held = [(module, name, getattr(module, name)) for module, name in self._holders]
        with self._model.tp.releasing(self.release):
            try:
                for size in sizes:
                    self._keep(self._graphs, size, self._capture(size))
                    free.append(free_memory())
            finally:
                self.release()
                for module, name, value in held:  # release references to the graphs' memory
                    setattr(module, name, value)
        shared, others = free[0] - free[1], free[1] - free[-1]
        num_others = len(self._sizes) * (1 + num_tap_sets) - 1
        return max(0, shared) + max(0, others) * num_others // max(1, len(sizes) - 1)

    @torch.no_grad()
    def compile_kernels(self, sizes: Collection[int], observer: GraphObserver | None = None) -> None:
        """Compile the kernels of steps of ``sizes`` rows; call inside :func:`.compiled_ahead`, which skips launches.

        With ``observer``, its taps must be in place. A graph is captured and destroyed, so that the device computes
        nothing from missing inputs. Other ranks need not take part.
        """
        self._stream = self._stream or cuda.Stream()
        held = [(module, name, getattr(module, name)) for module, name in self._holders]
        with torch.cuda.stream(self._stream):  # allocates the stream's cuBLAS workspace outside the graph's pool
            square = torch.ones(16, 16, dtype=torch.bfloat16, device=self._buffers.page_tables[0].device)
            square @ square
        current = torch.cuda.current_stream()
        try:
            for size in sizes:
                self._load_padding(size)
                self._stream.wait_stream(current)
                graph = torch.cuda.CUDAGraph()
                # Each graph has its own pool: after all its graphs are destroyed, a pool cannot be captured into again.
                # Relaxed mode permits the calls that libraries make when they initialize.
                options: dict[str, Any] = {"stream": self._stream, "capture_error_mode": "relaxed"}
                with gc_paused(), self._model.tp.rehearsal(), torch.cuda.graph(graph, **options):
                    hidden = self._decode(self._inputs(size), observer)
                    with self._numerics():
                        self._model.head(hidden[:_MAX_LOGIT_ROWS])
                del hidden
                graph.reset()
        finally:
            torch.cuda.set_stream(current)  # a failed capture leaves its stream as the current one
            self._model.last_hidden_state = None
            for module, name, value in held:
                setattr(module, name, value)

    def _keep(self, graphs: dict[int, Any], size: int, captured: CapturedGraph | None) -> None:
        """Add a graph to ``graphs``, from which :meth:`release` destroys it.

        Raises RankLostError, and destroys the graph, if :meth:`release` already ran.
        """
        with self._in_use:
            if not self._is_released:
                graphs[size] = captured
                return
        if captured is not None:
            captured.graph.reset()
        raise RankLostError(f"rank {self._model.tp.rank} lost a peer")

    def _start_pool(self) -> None:
        """Create the memory pool that all graphs captured from now on share."""
        self._pool = cuda.graph_pool_handle()
        self._stream = self._stream or cuda.Stream()

    def _capture(self, size: int, observer: GraphObserver | None = None, *, is_alone: bool = False) -> CapturedGraph:
        """Capture a step of ``size`` rows, with the observer's taps; ``is_alone``: other ranks do not capture now."""
        self._load_padding(size)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        # Warm up before the capture: kernels are compiled, and libraries select theirs.
        with torch.cuda.stream(stream), ExitStack() as rehearsals:
            if observer is not None:
                rehearsals.enter_context(observer.rehearsal())
            if is_alone:
                rehearsals.enter_context(self._model.tp.rehearsal())
            self._decode(self._inputs(size), observer)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with (
            gc_paused(),  # a collection could free other engines' graphs, which CUDA forbids during a capture
            torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
        ):
            inputs = self._inputs(size)
            hidden = self._decode(inputs, observer)
        held = tuple((module, name, getattr(module, name)) for module, name in self._holders)
        return CapturedGraph(graph, inputs, hidden, held)

    def _load_padding(self, size: int) -> None:
        """Load a step of ``size`` padding rows."""
        self._buffers.load_padding(size)

    def _inputs(self, size: int) -> StepInputs:
        """Return the inputs of a step of ``size`` rows as views of static memory."""
        return self._buffers.single_rows(size, self.max_request_rows)

    def _decode(self, inputs: StepInputs, observer: GraphObserver | None) -> Tensor:
        extra = {name: values[: len(inputs.input_ids)] for name, values in self._extra.items()}
        is_tapped = observer is not None and self._experts
        is_padding = self._buffers.is_padding(len(inputs.input_ids)) if is_tapped else None
        with self._numerics(), excluding_padding(is_padding, self._experts), in_one_launch():
            output: Tensor = self._model.decoder(
                inputs.input_ids, position_ids=inputs.position_ids, past_key_values=inputs.cache, **extra
            ).last_hidden_state
        return output

    def bucket_of(self, plan: StepPlan) -> int | None:
        """Return the padded number of rows of ``plan``, the smallest of :attr:`sizes` that fits; equal on all ranks.

        None unless every request has at most :attr:`max_request_rows` rows, has logits for its last row, and has no
        rows of a draft tree.
        """
        is_plain = plan.is_decode and not plan.model  # avoids a check of each request
        if not is_plain and any(
            len(item.tokens) > self.max_request_rows or not item.num_logits or item.tree for item in plan.scheduled
        ):
            return None
        index = bisect_left(self._sizes, plan.num_tokens)
        return self._sizes[index] if index < len(self._sizes) else None

    def run(
        self, plan: StepPlan, extra: Mapping[str, Tensor] | None = None, tokens: Tensor | None = None
    ) -> Tensor | None:
        """Compute the last hidden states [rows of ``plan``, hidden], valid until the next step; None if no graph fits.

        ``extra``: further inputs of the model, by argument name; ``tokens`` [rows] int64 on the device replace the
        plan's.
        """
        size = self.bucket_of(plan)
        if size is None or (captured := self._graphs.get(size)) is None:
            return None
        self._buffers.fill(plan, size)
        if tokens is not None:
            self._buffers.set_tokens(tokens, size)
        for name, values in (extra or {}).items():
            self._extra[name][: len(values)].copy_(values)
        return self._replay_plan(plan, captured)

    def _replay_plan(self, plan: StepPlan, captured: CapturedGraph) -> Tensor | None:
        """Replay the graph of ``plan``, whose inputs are loaded; None if a rank is lost."""
        with self._in_use:
            if self._is_released:
                return None
            captured.graph.replay()
        captured.hold(plan.num_tokens)
        return captured.hidden[: plan.num_tokens]

    def tapped(self, size: int, observer: GraphObserver) -> CapturedGraph | None:
        """Return a graph with the observer's taps, to :meth:`replay` instead of the decoder in a step of ``size`` rows.

        The graph is captured when a step of this size first needs the current tap set; None if the capture runs out of
        memory. Graphs of the last :data:`MAX_TAP_SETS` tap sets are kept. Raises RankLostError.
        """
        self._model.tp.check()
        state = observer.tap_state
        graphs = self._tapped.pop(state, {})
        self._tapped[state] = graphs
        while len(self._tapped) > MAX_TAP_SETS:
            del self._tapped[next(iter(self._tapped))]
        if size not in graphs:
            self._keep(graphs, size, self._capture_tapped(size, observer))
        return graphs[size]

    @torch.no_grad()
    def _capture_tapped(self, size: int, observer: GraphObserver) -> CapturedGraph | None:
        try:
            return self._capture(size, observer, is_alone=True)
        except torch.cuda.OutOfMemoryError:
            _log.warning(
                "out of memory while capturing the CUDA graph of %d rows with taps: steps of this size run eagerly; "
                "select fewer sites, capture statistics only, or lower kv_cache_memory_bytes",
                size,
            )
            return None
        except RuntimeError:
            self._model.tp.check()
            raise

    def replay(self, captured: CapturedGraph, *args: Any, **kwargs: Any) -> ModelOutput:
        """Replay the step whose inputs are loaded, in place of a call of the decoder. Raises RankLostError."""
        with self._in_use:
            if self._is_released:
                raise RankLostError(f"rank {self._model.tp.rank} lost a peer")
            captured.graph.replay()
        captured.hold(len(captured.hidden))
        return ModelOutput(captured.hidden)
