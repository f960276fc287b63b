"""ModelRunner: one rank's model, KV cache and observer, and the execution of plans."""

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from tapscope.core.observe import (
    DraftObserver,
    GraphObserver,
    ObserverFactory,
    RankInfo,
    StepInfo,
    StepObserver,
    StepsAheadObserver,
)
from tapscope.engine.checkpoint.received_weights import ReceivedWeights, WeightSource
from tapscope.engine.checkpoint.startup_timer import StartupTimer
from tapscope.engine.checkpoint.weight_loader import deferred_linear_weights
from tapscope.engine.distributed.heartbeat import Activity, Heartbeat
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.distributed.weight_group import WeightGroup
from tapscope.engine.execution.allocation import allocating, computing, keep_freed_memory
from tapscope.engine.execution.batch_invariant import BatchInvariant, make_batch_invariant
from tapscope.engine.execution.cuda_graph_manager import CUDAGraphManager, can_capture_graphs, why_no_graphs
from tapscope.engine.execution.decode_graphs import MAX_TAP_SETS, CapturedGraph, free_memory
from tapscope.engine.execution.input_buffers import InputBuffers
from tapscope.engine.execution.kv_cache_config import KVCacheConfig
from tapscope.engine.execution.kv_cache_scales import KVCacheScales
from tapscope.engine.execution.launched_step import LaunchedStep
from tapscope.engine.execution.lora_adapters import LoraAdapters
from tapscope.engine.execution.memory_budget import DraftMemory, MemoryBudget
from tapscope.engine.execution.memory_occupation import MemoryOccupation
from tapscope.engine.execution.model_weights import ModelWeights
from tapscope.engine.execution.prefill_graphs import why_no_prefill_graphs
from tapscope.engine.execution.profiler import Profiler
from tapscope.engine.execution.resolved_settings import (
    DTYPES,
    resolve_device,
    resolve_dtype,
    resolve_lora_rank,
)
from tapscope.engine.execution.routing_replay import RoutingReplay
from tapscope.engine.execution.step_metrics import StepMetrics
from tapscope.engine.execution.step_mode import StepMode, StepModes
from tapscope.engine.execution.streams import current_stream
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.layers.experts import Experts, excluding_padding
from tapscope.engine.layers.paged_attention import without_cudnn_attention
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.models.registry import build_model
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.requests.kept_rows import KeptRows
from tapscope.engine.requests.state_table import SLOTS_PER_REQUEST
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan
from tapscope.engine.sampling.sampler import greedy

_log = logging.getLogger(__name__)
_FOREIGN_HOOK = "a module has a forward hook that is not the observer's"
_MAX_GRAPH_ROWS = 256
"""Rows of the largest CUDA graph, unless there are more requests: larger steps rarely wait for the host."""
cuda: Any = torch.cuda  # parts of it have no type hints


class ModelRunner:
    """Executes plans; every rank has one runner, and all runners receive the same plans in the same order."""

    @torch.inference_mode(False)  # weights and caches outlive the caller's mode, and other threads fill them
    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tp: TensorParallel,
        observer: ObserverFactory | None,
        *,
        build: Callable[[ModelConfig, TensorParallel, torch.dtype], CausalLM] = build_model,
        page_tables: Sequence[Tensor] | None = None,
        max_request_rows: int | None = None,
        extra_widths: Mapping[str, int] | None = None,
        measure_draft: Callable[["ModelRunner"], DraftMemory | None] = lambda target: None,
    ) -> None:
        """``build`` creates the model. ``page_tables``: page tables of another runner with as many pages, to be shared.
        ``max_request_rows``: rows per request in a step that a CUDA graph computes; by default the rows that verify its
        drafts. ``extra_widths``: widths of additional model arguments [rows, width], by name. ``measure_draft``:
        returns the memory of this target's draft; called before the KV cache takes the remaining memory.
        """
        self.dtype = resolve_dtype(config, model_config)
        dtype = DTYPES[self.dtype]
        tp.ep = config.ep
        self.device = tp.device or resolve_device(config, tp.rank)
        if self.device.index:  # code that does not name a device must not create a context on GPU 0
            torch.cuda.set_device(self.device)
        self.profiler = Profiler(self.device)
        self.startup_timer = StartupTimer()
        self._load_model(config, lambda: build(model_config, tp, dtype), tp)
        self.max_tokens = config.step_tokens(self.device.type)
        self._max_pages = -(-model_config.max_positions // config.page_size)
        self._max_request_rows = max_request_rows or 1 + config.num_drafts
        # A recurrent state passes from row to row, so rows of a request cannot be computed side by side.
        if model_config.linear_layers:
            self._max_request_rows = 1
        self._max_requests = max_rows = config.max_num_seqs
        self._max_graph_rows = max(max_rows, min(_MAX_GRAPH_ROWS, max_rows * self._max_request_rows))
        self._extra_widths, self._speculates = dict(extra_widths or {}), config.num_drafts > 0
        self.extra_inputs: Callable[[StepPlan], dict[str, Tensor]] = lambda plan: {}
        """Returns additional model arguments for a step."""
        self.after_forward: Callable[[StepPlan], None] = lambda plan: None
        """Called after the forward of a plan."""
        self.after_keep_rows: Callable[[KeptRows], None] = lambda kept: None
        """Called after the rows of an accepted branch were moved."""
        self.after_recapture: Callable[[], None] = lambda: None
        """Called after the CUDA graphs were captured again."""
        self.adapters: LoraAdapters | None = None
        """LoRA adapters; None in an engine without adapters."""
        if config.has_lora:
            rank = resolve_lora_rank(config)
            self.adapters = LoraAdapters(self.model, config.max_loras_per_batch, rank, dtype)
        self._modes = StepModes(self.model)
        self._numerics: Callable[[], AbstractContextManager[Any]] = nullcontext
        if config.batch_invariant:
            self._numerics = BatchInvariant
            make_batch_invariant(self.model)
        self._experts = [module for module in self.model.modules() if isinstance(module, Experts)]
        self._routing_replay = RoutingReplay(self.model, self.device)
        self.graphs: CUDAGraphManager | None = None
        """CUDA graphs of steps; None if all steps run eagerly."""
        self._capture_stream: Any = None
        self.observer: StepObserver | None = None
        if self._fills_free_memory(config):
            config = self._fit_cache(config, dtype, measure_draft, is_observed=observer is not None)
        self._allocate_cache(config, dtype, tp, page_tables)
        self._remedy = (
            f"lower max_num_batched_tokens ({self.max_tokens}), max_num_seqs ({config.max_num_seqs}) "
            f"or num_pages ({self.cache_config.num_pages})"
        )
        self.memory = MemoryOccupation(self.model, self.kv_cache)
        self.weight_groups: dict[str, WeightGroup] = {}
        """Process groups in which trainers send weights, by name."""
        self.received: ReceivedWeights | None = None
        """Weights that a trainer has sent and that are not loaded yet."""
        if self.device.type == "cpu":
            keep_freed_memory()
        if can_capture_graphs(config, self.model, self.kv_cache, self.device):
            self._capture_graphs(config, is_observed=observer is not None)
        self._metrics = StepMetrics(sum(self.cache_config.group_pages))
        if observer is not None:
            self._attach_observer(observer, self.rank_info(config, model_config))

    def _attach_observer(self, observer: ObserverFactory, info: RankInfo) -> None:
        """Create the observer, and compile the kernels of steps with its taps."""
        with self.startup_timer.stage("observer"):
            self.observer = observer(self.model, info)
            if self.graphs is not None and isinstance(self.observer, GraphObserver):
                self.graphs.compile_kernels(self.device, self.observer)

    def _load_model(self, config: EngineConfig, build: Callable[[], CausalLM], tp: TensorParallel) -> None:
        remedy = "use more ranks (tp), a smaller dtype, or quantized weights"
        model_fits = partial(allocating, f"the model in {self.dtype}", self.device, remedy)
        with self.startup_timer.stage("model"), model_fits(), self.device, deferred_linear_weights():
            self.model = build().eval()
        self._weights = ModelWeights(self.model, config)
        tp.heartbeat.set_activity(Activity.LOADING)
        with self.startup_timer.stage("weights"), model_fits():
            self._weights.load(self.device)

    def _fills_free_memory(self, config: EngineConfig) -> bool:
        """Return whether the KV cache takes all remaining GPU memory, instead of a given number of pages."""
        return self.device.type == "cuda" and config.num_pages is None

    @torch.no_grad()
    def _fit_cache(
        self,
        config: EngineConfig,
        dtype: torch.dtype,
        measure_draft: Callable[["ModelRunner"], DraftMemory | None],
        *,
        is_observed: bool,
    ) -> EngineConfig:
        """Return ``config`` with a KV cache size that fits on all ranks next to CUDA graphs, a step and a draft.

        Their memory is measured with a cache of one page. Raises ConfigError.
        """
        needed, remedy = "the largest step with the CUDA graphs", "lower max_num_batched_tokens or max_num_seqs"
        with self.startup_timer.stage("memory"), allocating(needed, self.device, remedy):
            num_slots = SLOTS_PER_REQUEST if self.model.config.linear_layers else None
            self._make_cache(replace(config, num_pages=1, num_state_slots=num_slots), dtype)
            if why_no_graphs(config, self.model, self.kv_cache) is not None:
                step, graphs = self._measure_step(config), 0
            else:
                measured = self._make_graphs(config, is_observed=is_observed)
                measured.compile_kernels(self.device)
                step = self._measure_step(config)
                graphs = measured.measure(MAX_TAP_SETS if is_observed else 0)
                del measured
            draft, page = measure_draft(self) or DraftMemory(0, 0), self.cache_config.group_bytes[0]
            del self.kv_cache, self._buffers, self.cache_config
            gc.collect()
            budget = MemoryBudget(
                total=torch.cuda.mem_get_info()[1],
                free=free_memory(),
                step=step,
                graphs=graphs,
                draft=draft.fixed,
                cache_share=page / (page + draft.page) if page else 1.0,
            )
        tp = self.model.tp
        least = int(tp.all_gather(torch.tensor([[budget.for_cache]]), tp.size).min())
        return replace(config, kv_cache_memory_bytes=budget.limit(config.kv_cache_memory_bytes, least))

    def _measure_step(self, config: EngineConfig) -> int:
        """Return the peak bytes of a step with as many tokens as possible, which reads and writes dummy pages."""
        longest = min(self.max_tokens, self.model.config.max_positions)
        counts = [longest] * min(self.max_tokens // longest, config.max_num_seqs)
        num_logits = longest if config.logits == "all" else -(-config.max_num_seqs // len(counts))
        scheduled = [
            ScheduledRequest(
                request=str(row), row=row, position=0, visits=((count, 0),), tokens=(0,) * count, pages=(),
                num_logits=min(count, num_logits), prompt_length=count,
            )
            for row, count in enumerate(counts)
        ]  # fmt: skip
        free_memory()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        self.forward(StepPlan(step=0, phase="prefill", scheduled=tuple(scheduled), kv_pages_used=0))
        self.model.last_hidden_state = None
        return torch.cuda.max_memory_reserved() - before

    def _make_cache(
        self, config: EngineConfig, dtype: torch.dtype, page_tables: Sequence[Tensor] | None = None
    ) -> None:
        """Create the KV cache and the input buffers, which use ``page_tables`` or new ones."""
        self.cache_config = KVCacheConfig.resolve(config, self.model, self.dtype, dtype, self.max_tokens)
        self.kv_cache = self.cache_config.allocate(self.model, self.device)
        """Keys, values and recurrent states on this rank."""
        self._buffers = InputBuffers(
            self.kv_cache,
            self.max_tokens,
            config.max_num_seqs,
            self._max_pages,
            page_tables,
            max_single_rows=self._max_graph_rows,
            num_drafts=config.num_drafts,
        )

    def _allocate_cache(
        self, config: EngineConfig, dtype: torch.dtype, tp: TensorParallel, page_tables: Sequence[Tensor] | None
    ) -> None:
        remedy = "lower num_pages, kv_cache_memory_bytes, max_num_seqs or max_num_batched_tokens"
        with self.startup_timer.stage("cache"), allocating("the KV cache", self.device, remedy):
            self._make_cache(config, dtype, page_tables)
            self._scales = KVCacheScales(config, self.kv_cache, self.cache_config.dtype, tp)
            self._scales.load_initial()
        self.cache_config.log()

    def rank_info(self, config: EngineConfig, model_config: ModelConfig) -> RankInfo:
        """Return the description of this rank for observers."""
        tp = self.model.tp
        has_replicas = config.dp > 1
        return RankInfo(
            rank=config.dp_rank * tp.size + tp.rank,
            world_size=config.dp * tp.size,
            mesh={"dp": config.dp, "tp": tp.size} if has_replicas else {"tp": tp.size},
            coords={"dp": config.dp_rank, "tp": tp.rank} if has_replicas else {"tp": tp.rank},
            own_steps=("dp",) if has_replicas else (),
            framework="tapscope",
            model=config.model,
            dtype=self.dtype,
            kv_cache_dtype=self.cache_config.dtype,
            model_config=model_config.facts(),
        )

    def _capture_graphs(self, config: EngineConfig, *, is_observed: bool) -> None:
        with self.startup_timer.stage("graphs"):
            self.graphs = self._make_graphs(config, is_observed=is_observed)
            if not self._fills_free_memory(config):  # otherwise compiled before the graphs were measured
                self.graphs.compile_kernels(self.device)
            if config.has_draft_trees or (self._speculates and self.kv_cache.states is not None):
                what = "of trees" if config.has_draft_trees else "of a model with a recurrent state"
                _log.warning("drafts %s are verified without CUDA graphs", what)
            if config.cuda_graphs == "all" and self.graphs.prefill is None:
                obstacle = why_no_prefill_graphs(self.model, self.kv_cache, self._extra_widths)
                _log.info("steps with prompts run eagerly: those with %s cannot be captured", obstacle)
            self.graphs.capture()

    def _make_graphs(self, config: EngineConfig, *, is_observed: bool) -> CUDAGraphManager:
        """Create the CUDA graphs of steps with the current KV cache and buffers, without capturing any."""
        self._capture_stream = self._capture_stream or cuda.Stream()
        return CUDAGraphManager.make(
            self.model,
            self._buffers,
            config,
            cache=self.kv_cache,
            dtype=DTYPES[self.dtype],
            max_rows=self._max_graph_rows,
            max_request_rows=self._max_request_rows,
            max_tokens=self.max_tokens,
            extra_widths=self._extra_widths,
            numerics=self._numerics,
            stream=self._capture_stream,
            is_observed=is_observed,
        )

    def check_weights(self, source: WeightSource, *, partial: bool) -> None:
        """Raise the CheckpointError that :meth:`load_weights` would raise for ``source``, without changing weights."""
        self._weights.check(source, partial=partial)
        self._scales.read(source, partial=partial)

    def load_weights(self, source: WeightSource, *, partial: bool) -> None:
        """Replace the weights in place, between two steps; with ``partial`` only those in ``source``.

        Static input scales and KV cache scales are replaced too; dtypes stay.
        """
        self._weights.replace(source, partial=partial)
        self._scales.load(source, partial=partial)
        if self.kv_cache.kv_format.is_fp8 and not self.memory.released:  # the captured kernels use the old scales
            self.recapture_graphs()

    def recapture_graphs(self) -> None:
        """Capture the CUDA graphs again, if there are any, because scales or addresses have changed."""
        if self.adapters is not None:
            self.adapters.end()
        self._routing_replay.end()
        if self.graphs is not None:
            self.graphs.recapture()
        self.after_recapture()

    def execute(self, plan: StepPlan, sample: Callable[[Tensor], Tensor] | None = None) -> list[int]:
        """Run :meth:`launch` and :meth:`collect`; follow with :meth:`finish`."""
        return self.collect(self.launch(plan, sample))

    @torch.inference_mode(False)
    @torch.no_grad()
    def launch(self, plan: StepPlan, sample: Callable[[Tensor], Tensor] | None = None) -> LaunchedStep:
        """Notify the observer, then launch the model and the sampling of ``plan``, without waiting for a GPU.

        Uses no_grad rather than inference_mode, even if the caller uses inference_mode: taps need the version counters
        of tensors, and later steps write to some tensors.

        Rank 0 passes ``sample``, which maps logits [logit rows, vocab] to one token per row. Other ranks compute the
        argmax if the step is greedy; otherwise the next plan contains the tokens that rank 0 sampled.
        """
        self.heartbeat.start_step(plan.step)
        ahead = self._announce(plan)
        self._metrics.start()
        try:
            with self.computing(plan):
                launched = self._launch(plan, sample)
            return launched if ahead is None else replace(launched, set_info=ahead[0], info=ahead[1])
        except BaseException:
            self.finish(plan)  # do not leave the observer's step open
            raise

    def computing(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Raise OutOfMemoryError if the block, a part of the step ``plan``, runs out of memory."""
        return computing(plan, self.device, self._remedy)

    def _announce(self, plan: StepPlan) -> tuple[Callable[[StepInfo], None], StepInfo] | None:
        """Notify the observer of a step.

        If the step's tokens are not known yet, returns the function that receives them, and the step info without them.
        """
        if self.observer is None:
            return None
        info = plan.info(self._padded_size(plan))
        if plan.has_pending and isinstance(self.observer, StepsAheadObserver):
            return self.observer.before_step_ahead(info), info
        self.observer.before_step(info)
        return None

    def set_tokens(self, launched: LaunchedStep, tokens: Sequence[int | None]) -> None:
        """Pass the tokens of a step launched ahead to the observer: one per request, None if the request ended."""
        if (info := launched.info) is None or launched.set_info is None:
            return
        if None in tokens:  # the ended request's row was discarded, so it is not part of the step
            rows = tuple([row for row, token in zip(info.rows, tokens, strict=True) if token is not None])
            info = structs.replace(info, rows=rows)
        launched.set_info(structs.replace(info, token_ids=tuple([token for token in tokens if token is not None])))

    def set_drafts(self, launched: LaunchedStep, plan: StepPlan) -> None:
        """Pass the tokens of a step launched with placeholders for drafts to the observer, from ``plan``."""
        if launched.set_info is not None:
            launched.set_info(plan.info(self._padded_size(plan)))

    def collect(self, launched: LaunchedStep) -> list[int]:
        """Wait for a step and return one token per request that samples; a step's only copy of values to the host."""
        try:
            with self.computing(launched.plan):
                return self._collect(launched)
        except BaseException:
            self.finish(launched.plan)
            raise

    def _collect(self, launched: LaunchedStep) -> list[int]:
        if launched.tokens is None:
            return []
        if launched.copied is not None:
            if self.model.tp.size > 1:
                self.heartbeat.set_activity(Activity.WAITING)  # for the device, which runs the collectives
            launched.copied.synchronize()
            self.heartbeat.set_activity(Activity.WORKING)
        self.model.tp.check()
        tokens: list[int] = launched.tokens.tolist()
        return [tokens[row] for row in launched.plan.sampled_logits]

    def keep_rows(self, kept: KeptRows) -> None:
        """Move the rows of an accepted branch of a draft tree to their positions in every cache group."""
        for group, moves in enumerate(kept.slots):
            sources, targets = torch.tensor(moves, dtype=torch.int64, device=self.device).unbind(1)
            self.kv_cache.move(group, sources, targets)
        self.after_keep_rows(kept)

    def finish(self, plan: StepPlan, accepted: Mapping[str, Sequence[int]] | None = None) -> None:
        """Finish the step by passing its metrics to the observer. Rank 0 commits the tokens first.

        ``accepted``: request id -> indices of its accepted drafts, in a step that verifies drafts; known only on rank
        0.
        """
        if self.observer is None:
            return
        if accepted and isinstance(self.observer, DraftObserver):
            trees = {item.request for item in plan.scheduled if item.tree}
            branches = {name: drafts for name, drafts in accepted.items() if name in trees}
            self.observer.accept_drafts({name: len(drafts) for name, drafts in accepted.items()}, branches)
        self.observer.after_step(self._metrics.of(plan, accepted))

    def close(self) -> None:
        """Close the observer, leave the process group and destroy CUDA graphs; safe to call twice."""
        observer, self.observer = self.observer, None
        self.heartbeat.set_activity(Activity.CLOSING)
        try:
            if observer is not None:
                observer.close()
        finally:
            self.model.tp.disconnect()
            if self.model.tp.size == 1:  # else disconnect() did, unless a lost rank keeps graphs busy
                self.release_graphs()  # garbage collection must not, during a capture by the user
            self.memory.close()
            while self.weight_groups:
                self.weight_groups.popitem()[1].close()

    def release_graphs(self) -> None:
        """Destroy the CUDA graphs; later steps run eagerly."""
        if self.graphs is not None:
            self.graphs.release()

    def mode(self) -> StepMode:
        """Return the mode of the next step; equal on all ranks once the observer has applied the plan's epoch."""
        return self._modes.choose(self.observer)

    @property
    def has_graphs(self) -> bool:
        """Whether decode steps run as CUDA graphs."""
        return self.graphs is not None

    @property
    def overlaps_steps(self) -> bool:
        """Whether, with several ranks, a rank may launch a step before the previous step is complete."""
        return self.has_graphs and self.observer is None and not self._speculates

    @property
    def page_tables(self) -> Sequence[Tensor]:
        """Page table of each cache group: [rows, pages of a request] int32."""
        return self._buffers.page_tables

    @property
    def last_tokens(self) -> Tensor:
        """See :attr:`.InputBuffers.last_tokens`."""
        return self._buffers.last_tokens

    @property
    def heartbeat(self) -> Heartbeat:
        """Heartbeat of this rank."""
        return self.model.tp.heartbeat

    @property
    def last_hidden_state(self) -> Tensor:
        """Hidden states of the last step after the final norm, [rows, hidden], unsharded on every rank."""
        hidden = self.model.last_hidden_state
        assert hidden is not None, "no step was computed"
        return hidden

    @property
    def routed_experts(self) -> Tensor:
        """Expert ids of the last step on the host: [rows, layers, k] int32, -1 in layers without experts."""
        chosen = self.model.routed_experts()
        assert chosen is not None, "no step was computed, or the model has no experts"
        return chosen.transpose(0, 1).to("cpu", torch.int32)

    def _launch(self, plan: StepPlan, sample: Callable[[Tensor], Tensor] | None) -> LaunchedStep:
        logits = self.forward(plan)
        if sample is None and not plan.greedy:
            return LaunchedStep(plan, None, None)
        tokens = self.model.sampler(greedy(logits) if sample is None else sample(logits))
        if plan.is_decode:
            host = self._buffers.store_sampled_tokens(tokens)
        if not tokens.is_cuda:
            return LaunchedStep(plan, tokens, None, sampled=tokens)
        if not plan.is_decode:
            host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            host.copy_(tokens, non_blocking=True)
        copied = cuda.Event()
        copied.record(current_stream(tokens.get_device()))
        return LaunchedStep(plan, host, copied, sampled=tokens)

    def forward(self, plan: StepPlan) -> Tensor:
        """Compute the logits [logit rows, vocab] of ``plan``, in a CUDA graph or by calling the model."""
        mode, extra = self.mode(), self.extra_inputs(plan)
        if self.adapters is not None:
            self.adapters.begin(plan)
        self._routing_replay.begin(plan)
        self._warn_of_eager(plan, mode)
        logits = self._replay_graph(plan, extra) if mode is StepMode.CLEAN else None
        if logits is None:
            logits = self._call_model(plan, extra, mode)
        self.after_forward(plan)
        return logits

    def _replay_graph(self, plan: StepPlan, extra: dict[str, Tensor]) -> Tensor | None:
        """Run :meth:`forward` in a CUDA graph without taps; None if no graph computes ``plan``."""
        graphs = None if self.graphs is None else self.graphs.dispatch(plan)
        if graphs is None or (hidden := graphs.run(plan, self._graph_inputs(extra))) is None:
            return None
        with self._numerics():
            return self.model.head(hidden, self._buffers.logits_to_keep(plan, plan.num_tokens))

    def _call_model(self, plan: StepPlan, extra: dict[str, Tensor], mode: StepMode) -> Tensor:
        """Run :meth:`forward` by calling the model, whose decoder may run as a CUDA graph with taps.

        A tapped step that a graph could compute is padded like the graph, so that its GEMMs have the same shapes and
        its values the same bits. Other hooks see the step without padding, unless there are several ranks: other ranks
        may run the step as a graph, and collectives need equal numbers of rows.
        """
        size = self._padded_size(plan) if mode is StepMode.TAPPED or self.model.tp.size > 1 else None
        by_request = size is not None and not self._has_single_rows(plan)
        graph = self._tapped_graph(size) if mode is StepMode.TAPPED and not by_request else None
        is_padding: Tensor | None = None
        if graph is None or size is None or self.graphs is None:
            inputs = self._buffers.load(plan, size, by_request=by_request)
            if mode is StepMode.TAPPED and size is not None and self._experts:
                is_padding = self._buffers.is_padding(size)
        else:
            inputs = self._buffers.load_graph(plan, size, graph.inputs)
            self.model.decoder_graph = partial(self.graphs.decode.replay, graph)
        try:
            with without_cudnn_attention(), self._numerics(), excluding_padding(is_padding, self._experts):
                output = self.model(
                    inputs.input_ids,
                    position_ids=inputs.position_ids,
                    past_key_values=inputs.cache,
                    logits_to_keep=inputs.logits_to_keep,
                    **extra,
                )
        finally:
            self.model.decoder_graph = None
        logits: Tensor = output.logits
        return logits

    def _padded_size(self, plan: StepPlan) -> int | None:
        """Return the rows to pad a step to if it is observed or other ranks may run it as a graph; None: no padding."""
        return None if self.graphs is None else self.graphs.padded_size(plan)

    def _has_single_rows(self, plan: StepPlan) -> bool:
        """Return whether a graph computes each row of ``plan`` as a request of its own."""
        return self.graphs is not None and self.graphs.decode.bucket_of(plan) is not None

    def _graph_inputs(self, extra: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return :attr:`extra_inputs` in the form that CUDA graphs read."""
        return extra

    def _tapped_graph(self, size: int | None) -> CapturedGraph | None:
        """Return the CUDA graph that replaces the decoder in a tapped step of ``size`` rows; None if there is none.

        Must run before the step's inputs are loaded, because a capture overwrites the input buffers.
        """
        if self.graphs is None or size is None or not isinstance(self.observer, GraphObserver):
            return None
        if self._modes.has_foreign(self.observer.tap_state):
            self.graphs.warn_of_eager(_FOREIGN_HOOK)
            return None
        return self.graphs.decode.tapped(size, self.observer)

    def _warn_of_eager(self, plan: StepPlan, mode: StepMode) -> None:
        """Warn if ``plan`` or foreign hooks prevent a step from running as a CUDA graph."""
        if self.graphs is None:
            return
        if (reason := self.graphs.why_eager(plan)) is not None:
            self.graphs.warn_of_eager(reason)
        if mode is StepMode.EAGER:
            self.graphs.warn_of_eager(_FOREIGN_HOOK)
