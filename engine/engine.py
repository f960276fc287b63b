"""Engine: schedules requests and computes their tokens on one or several ranks. Runners detokenize the outputs."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tapscope.core.errors import OutputError, RecorderError, UsageError
from tapscope.core.observe import ObserverFactory, StepsAheadObserver
from tapscope.core.wire import Message
from tapscope.engine.adapter_control import AdapterControl
from tapscope.engine.distributed.heartbeat import Heartbeat
from tapscope.engine.execution.draft_runner import check_draft
from tapscope.engine.execution.launched_step import LaunchedStep
from tapscope.engine.execution.model_runner import ModelRunner
from tapscope.engine.execution.rank_group import RankGroup
from tapscope.engine.execution.rank_worker import trace_file
from tapscope.engine.execution.resolved_settings import DTYPES, resolve_length, resolve_lora_rank
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.output import Output
from tapscope.engine.requests.per_token_outputs import collect_step_outputs
from tapscope.engine.requests.pooling import pool_step
from tapscope.engine.requests.request import Request, check_request
from tapscope.engine.requests.step_plan import StepPlan
from tapscope.engine.sampling.sampled_step import NanCheck, SampledStep
from tapscope.engine.sampling.sampler import Sampler
from tapscope.engine.scheduling.scheduler import Scheduler
from tapscope.engine.scheduling.scheduler_config import SchedulerConfig
from tapscope.engine.speculative.make_speculator import make_speculator
from tapscope.engine.structured_output.grammar import Grammars
from tapscope.engine.weight_control import WeightControl

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
PauseMode = Literal["abort", "retract", "in_place"]
"""How :meth:`Engine.pause_generation` treats live requests."""

_NAN_WARNING_S = 10.0
"""Minimum number of seconds between two NaN warnings. Every request with NaN is counted, warned about or not."""


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A step that was launched but whose results were not collected yet."""

    plan: StepPlan
    requests: list[Request]
    """The scheduled requests, in the order of ``plan.scheduled``."""
    sampled: SampledStep
    launched: LaunchedStep


class Engine:
    """A loaded model with its KV cache and request queue. Not thread-safe: one thread at a time may use the engine."""

    def __init__(
        self, config: EngineConfig, observer: ObserverFactory | None, heartbeat: Heartbeat | None = None
    ) -> None:
        """Start all ranks and load the model on each.

        ``heartbeat`` belongs to this process, if another process monitors it. Raises ConfigError, UsageError,
        CheckpointError, RankLostError.
        """
        self.config = config
        self.model_config = resolve_length(config, ModelConfig.read(Path(config.model)))
        self.model_config.check_split(config.tp)
        check_draft(config, self.model_config)
        if config.has_lora:
            resolve_lora_rank(config)  # raises for an unreadable adapter before the model is loaded
        self._rank_group = RankGroup(config, self.model_config, observer, heartbeat or Heartbeat())
        self._epoch = 0
        self.async_scheduling = config.async_scheduling and self.runner.device.type == "cuda"
        """Whether a step may be launched before the tokens of the previous step are known."""
        self._in_flight: list[_InFlightStep] = []
        """Launched steps, oldest first: at most one, or two with async scheduling."""
        self._finished_step = -1
        """Number of the last step for which the runner's ``finish`` was called; -1: none."""
        self._undelivered: list[Output] = []
        """Outputs of steps collected outside :meth:`step`, which the next :meth:`step` returns."""
        self._live: dict[str, Request] = {}
        self.is_paused = False
        """Whether generation is paused, see :meth:`pause_generation`; :meth:`step` then computes nothing."""
        self._num_corrupted = 0
        """Number of requests with NaN in their logits so far."""
        self._nan_warned_s: float | None = None
        self._nan_checks: list[NanCheck] = []
        """Pending NaN checks of collected steps, oldest first."""
        cache = self.runner.cache_config
        scheduler_config = SchedulerConfig.build(
            config,
            num_pages=cache.num_pages,
            max_tokens=self.runner.max_tokens,
            eos_token_ids=self.model_config.eos_token_ids,
            window=cache.window,
            windowed_pools=cache.windowed_pools,
            num_state_slots=cache.num_state_slots,
            shareable=self.model_config.is_prefix_shareable,
        )
        tokenizer = Path(config.model) / "tokenizer.json"
        vocab, eos = self.model_config.vocab_size, self.model_config.eos_token_ids
        self._grammars = Grammars(tokenizer, vocab, eos)
        self.sampler = Sampler(vocab, eos, config.replica_seed(), self.runner.device, self._grammars)
        if self.runner.has_graphs:
            with self.runner.startup_timer.stage("sampler"):
                self.sampler.compile_kernels(DTYPES[self.runner.dtype])
        self.scheduler = Scheduler(scheduler_config)
        self.speculator = make_speculator(
            config,
            self._rank_group.draft_runner,
            self.sampler,
            self._compute_draft,
            self.scheduler.kv_cache_manager,
            vocab,
        )
        """Proposer of draft tokens, with counts of accepted ones in ``speculator.stats``; None without speculation."""
        self.weights = WeightControl(
            config,
            self.model_config,
            self._rank_group,
            self.scheduler,
            drain=self._keep_outputs,
            is_paused=lambda: self.is_paused,
        )
        """Weight updates from a checkpoint or a trainer."""
        self.adapters = AdapterControl(config, self._rank_group, self.scheduler)
        """Loaded LoRA adapters, which requests select by name."""
        try:
            for name, folder in config.adapters:
                self.load_adapter(name, Path(folder))
        except BaseException:
            self.close()
            raise

    def _compute_draft(self, plan: StepPlan, sample: "Callable[[Tensor], Tensor]") -> list[int]:
        """Run one step of the draft model and return the sampled tokens; an observed step has its own number."""
        draft_runner = self._rank_group.draft_runner
        assert draft_runner is not None, "draft steps need a draft model"
        if draft_runner.observer is not None:
            plan = replace(plan, step=self.scheduler.claim_step(), epoch=draft_runner.observer.epoch)
        launched = self._rank_group.launch(plan, sample)
        samples = any(item.samples for item in plan.scheduled)
        tokens = self._rank_group.collect(launched) if samples else []  # without sampling there is no result to await
        draft_runner.finish(plan)
        return tokens

    @property
    def runner(self) -> ModelRunner:
        """Model runner of rank 0."""
        return self._rank_group.runner

    @property
    def draft_runner(self) -> ModelRunner | None:
        """Model runner of the draft model or draft head on rank 0; None if the engine has neither."""
        return self._rank_group.draft_runner

    @property
    def rank_pids(self) -> dict[int, int | None]:
        """Process ids of ranks 1 and up."""
        return self._rank_group.pids

    @property
    def rank_sentinels(self) -> list[int]:
        """File descriptors that become readable when a rank's process ends."""
        return self._rank_group.sentinels

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self.scheduler.waiting)

    @property
    def num_in_flight(self) -> int:
        """Number of launched but uncollected steps: at most one between two calls of :meth:`step`."""
        return len(self._in_flight)

    def check_ranks(self) -> None:
        """Raise RankLostError if a rank has failed or exited; every later call on the engine then raises it too."""
        self._rank_group.check()

    def prepare(self, request: Request) -> "Future[Any] | None":
        """Start compiling the request's grammar; return a future to await before :meth:`submit`, or None.

        Also validates the request: raises the errors of :meth:`submit`, except those of the grammar.
        """
        self._check(request)
        return self._grammars.prepare(request.params)

    def submit(self, request: Request) -> None:
        """Queue ``request``. Raises UsageError if it can never run, RankLostError once the engine has stopped."""
        self._check(request)
        self.adapters.acquire(request)
        self.sampler.add_request(request)
        self.scheduler.add(request)
        self._live[request.id] = request

    def _check(self, request: Request) -> None:
        self._rank_group.require_usable()
        if not self.is_paused:
            self.weights.require_memory()
        check_request(request, self.model_config, is_observed=self.runner.observer is not None)
        self.scheduler.validate(request)
        self.adapters.check(request)

    def step(self) -> list[Output]:
        """Compute one step over all running requests and return their new outputs; empty if no request is live.

        While generation is paused, no step is computed and only undelivered outputs are returned.

        Raises RankLostError; every later call then raises it too. Raises OutOfMemoryError, after which a single-rank
        engine stays usable: if the step had already sampled its tokens, its requests are aborted, otherwise the next
        call retries the step.
        """
        self._rank_group.require_usable()
        outputs, self._undelivered = self._undelivered, []
        if self.is_paused:
            return outputs
        outputs += [self._output(request) for request in self.scheduler.expire()]
        if not self.scheduler.has_work:
            return outputs + self._drain()
        if outputs:
            return outputs
        begin = time.perf_counter()
        if not self._in_flight:
            observer = self.runner.observer
            epoch = None if observer is None else observer.epoch
            self._launch(self.scheduler.plan(all_logits=self._wants_all_logits(), epoch=epoch, drafts=self._propose()))
        if self._drafts_next():
            self._draft_ahead()
        elif self._may_launch_ahead():
            self._catch_up()
            if (ahead := self.scheduler.plan_ahead(self._in_flight[0].plan.epoch)) is not None:
                self._finish(self._in_flight[0].plan)  # fully launched: no further hook fires in this step
                self._launch(ahead)
        plan = self._in_flight[0].plan
        outputs = self._collect()
        if self.speculator is not None and not self._is_recording:
            self.speculator.record_time(plan, time.perf_counter() - begin)
        return outputs if self.scheduler.has_work else outputs + self._drain()

    def _propose(self) -> dict[str, Drafts] | None:
        """Return the draft tokens for the next step by request id; None without speculation."""
        if self.speculator is None:
            return None
        return self.speculator.propose(self.scheduler.running, is_recorded=self._is_recording)

    def _drafts_next(self) -> bool:
        """Return whether the step after the one in flight may verify drafts.

        If so, it must not be planned until the tokens of the step in flight are known.
        """
        if self.speculator is None:
            return False
        if self._is_recording or not self.runner.has_graphs:
            return True  # never launch ahead
        return self.speculator.drafts_next(self.scheduler.running)

    def _draft_ahead(self) -> None:
        """Start drafting from the step in flight if the device can do so before the host knows that step's tokens."""
        assert self.speculator is not None, "the caller checked that drafts come next"
        last = self._in_flight[0]
        if not self._is_recording and last.launched.sampled is not None:
            num_steps = self.speculator.draft_ahead(last.plan, last.requests, last.launched.sampled)
            if self.runner.observer is not None:  # with an observer, draft steps have step numbers of their own
                for _ in range(num_steps):
                    self.scheduler.claim_step()

    def _catch_up(self) -> None:
        """Let a draft model that lags far behind compute the tokens it skipped, between two steps without drafts."""
        plan = self._in_flight[0].plan
        if self.speculator is not None and plan.is_decode and self.speculator.is_behind(self.scheduler.running):
            self._finish(plan)  # the draft model's steps are not part of this step
            self.speculator.catch_up(self.scheduler.running)

    @property
    def _is_recording(self) -> bool:
        """Whether an observer may record the next step."""
        observer = self.runner.observer
        return observer is not None and (observer.armed or any(request.capture for request in self.scheduler.running))

    def _may_launch_ahead(self) -> bool:
        """Return whether the next step may be launched before the tokens of the step in flight are known."""
        observer = self.runner.observer
        in_flight = self._in_flight[0].plan
        if not self.async_scheduling:
            return False
        if self._rank_group.num_ranks > 1 and not (self.runner.overlaps_steps and in_flight.greedy):
            return False  # only rank 0 knows randomly sampled tokens
        if observer is not None and observer.epoch != in_flight.epoch:
            return False
        if observer is not None and observer.armed and not isinstance(observer, StepsAheadObserver):
            return False
        return self.config.logits != "all"

    def _launch(self, plan: StepPlan) -> None:
        requests = [self._live[item.request] for item in plan.scheduled]
        try:
            with self.runner.computing(plan):
                sampled = SampledStep(self.sampler, plan, requests)
                launched = self._rank_group.launch(plan, sampled)
        except BaseException:
            self.scheduler.discard_last_plan()
            raise
        self._in_flight.append(_InFlightStep(plan, requests, sampled, launched))

    def _collect(self) -> list[Output]:
        """Wait for the oldest launched step, update its requests and return their outputs."""
        oldest = self._in_flight.pop(0)
        plan, requests = oldest.plan, oldest.requests
        tokens = self._rank_group.collect(oldest.launched)
        if self.speculator is not None and any(item.has_pending_drafts for item in plan.scheduled):
            drafts = self.speculator.read_ahead()
            plan = plan.with_drafts(drafts)
            self.scheduler.set_drafts(drafts)
            self.runner.set_drafts(oldest.launched, plan)
        if (check := oldest.sampled.check_nan(tokens)) is not None:
            self._nan_checks.append(check)
        self._report_nan(wait=not self._in_flight)
        finished = self.scheduler.commit(tokens)
        accepted: dict[str, Sequence[int]] | None = None
        try:
            with self.runner.computing(plan):
                if kept := self.scheduler.take_kept_rows():
                    rows = [each.plain() for each in kept]
                    self._rank_group.run_command(Message("keep_rows", {"kept": rows}), UsageError)
                oldest.sampled.record_logprobs()
                self._collect_values(plan, requests)
            accepted = self._record_drafts(plan, requests)
        except BaseException:
            self._give_up(requests)
            raise
        finally:
            self._finish(plan, accepted)
            for ahead in self._in_flight:
                tokens_of = [None if request.finish_reason else request.tokens[-1] for request in ahead.requests]
                self.runner.set_tokens(ahead.launched, tokens_of)
        return self._outputs([item.request for item in plan.scheduled], finished)

    def _report_nan(self, *, wait: bool) -> None:
        """Count requests with NaN logits, drop their cached prefixes, and warn at most every ``_NAN_WARNING_S``.

        Without ``wait``, checks whose results have not arrived from the device stay pending for a later step.
        """
        while self._nan_checks and (corrupted := self._nan_checks[0].found(wait=wait)) is not None:
            self._nan_checks.pop(0)
            new = {request.id: request for request in corrupted if not request.has_nan}
            for request in new.values():
                self.scheduler.mark_nan(request)
            self._num_corrupted += len(new)
            now = time.monotonic()
            if new and (self._nan_warned_s is None or now - self._nan_warned_s >= _NAN_WARNING_S):
                self._nan_warned_s = now
                _log.warning(
                    "request %r: its logits contain NaN, so its tokens are meaningless (requests with NaN so far: %d); "
                    "record it with tapscope dump, and `tapscope ls RUN --anomalies` lists where NaN begins",
                    next(iter(new)), self._num_corrupted,
                )  # fmt: skip

    def _give_up(self, requests: Sequence[Request]) -> None:
        """Abort the requests of a step whose tokens were committed but whose other outputs could not be collected."""
        for request in requests:
            if self._live.get(request.id) is request:
                self.scheduler.abort(request.id)
                self._output(request)

    def _finish(self, plan: StepPlan, accepted: Mapping[str, Sequence[int]] | None = None) -> None:
        """Call :meth:`ModelRunner.finish` once per step: no effect if launching the next step already finished it."""
        if self._finished_step != plan.step:
            self._finished_step = plan.step
            self.runner.finish(plan, accepted)

    def _collect_values(self, plan: StepPlan, requests: Sequence[Request]) -> None:
        """Store the values other than tokens that requests return: embeddings, routed experts, hidden states."""
        if not any(request.returns_values for request in requests):
            return
        accepted = [request.accepted_drafts for request in requests]
        if any(request.pooling for request in requests):
            pool_step(plan, requests, self.runner.last_hidden_state)
        if any(request.params.routed_experts for request in requests):
            routed = (request.routed for request in requests)
            collect_step_outputs(plan, routed, accepted, self.runner.routed_experts)
        if any(request.params.hidden_states for request in requests):
            hidden = (request.hidden for request in requests)
            collect_step_outputs(plan, hidden, accepted, self.runner.last_hidden_state.float().cpu())

    def _record_drafts(self, plan: StepPlan, requests: Sequence[Request]) -> dict[str, Sequence[int]]:
        """Count the drafts that the step verified; return {request id: indices of its accepted drafts}."""
        accepted: dict[str, Sequence[int]] = {}
        for item, request in zip(plan.scheduled, requests, strict=True):
            if item.num_drafts:
                if self.speculator is not None:
                    self.speculator.record(request, item)
                request.draft_counts = request.draft_counts.verified(item.num_drafts, request.num_accepted)
                accepted[request.id] = request.accepted_drafts
        return accepted

    def _drain(self) -> list[Output]:
        """Collect every launched step and return the outputs."""
        outputs: list[Output] = []
        while self._in_flight:
            outputs += self._collect()
        return outputs

    def _wants_all_logits(self) -> bool:
        """Return whether lm_head must compute the logits of every row of the next step, for an observer to capture.

        Call exactly once per planned step: if the epoch changed since the last call, the observer may become armed.
        """
        observer = self.runner.observer
        if self.config.logits != "observed" or observer is None:
            return self.config.logits == "all"
        previous, self._epoch = self._epoch, observer.epoch
        is_requested = any(request.capture for request in self.scheduler.live())
        return observer.armed or is_requested or self._epoch != previous

    def abort(self, request_id: str) -> Output | None:
        """Abort a live request between two steps; return its last output, or None if no live request has this id."""
        request = self.scheduler.abort(request_id)
        if request is None:
            return None
        output = self._output(request)
        if not self.scheduler.has_work:  # no later step() would collect the launched steps
            self._keep_outputs()
        return output

    def pause_generation(self, mode: PauseMode) -> int:
        """Stop computing steps until :meth:`continue_generation`; return the number of live requests, which wait.

        New requests may still be submitted; they wait too. ``mode`` has SGLang's meaning: ``abort`` ends live requests
        with the tokens generated so far, ``retract`` preempts running requests and frees their pages, and ``in_place``
        leaves them unchanged. The next :meth:`step` returns the pending outputs.
        """
        self._rank_group.require_usable()
        self._keep_outputs()
        self.is_paused = True
        if mode == "abort":
            for request in list(self.scheduler.live()):
                self.scheduler.abort(request.id)
                self._undelivered.append(self._output(request))
        elif mode == "retract":
            self.scheduler.retract()
        return len(list(self.scheduler.live()))

    def continue_generation(self) -> int:
        """Resume generation after :meth:`pause_generation`; return the number of live requests.

        Raises LiveError while the memory of the weights or the KV cache is released.
        """
        self._rank_group.require_usable()
        self.weights.require_memory()
        self.is_paused = False
        return len(list(self.scheduler.live()))

    def update_weights(self, folder: Path | None, *, partial: bool = False) -> None:
        """See :meth:`WeightControl.update`."""
        self.weights.update(folder, partial=partial)

    def _keep_outputs(self) -> None:
        """Collect all launched steps and keep their outputs for the next :meth:`step`."""
        self._undelivered += self._drain()

    def load_adapter(self, name: str, folder: Path) -> None:
        """See :meth:`AdapterControl.load`."""
        self.adapters.load(name, folder)

    def unload_adapter(self, name: str) -> int:
        """See :meth:`AdapterControl.unload`."""
        return self.adapters.unload(name)

    def reopen(self, run: Path) -> None:
        """Switch the observers of all ranks to the run directory ``run``; raises RecorderError if one fails to."""
        self._rank_group.require_usable()
        self._keep_outputs()
        self._rank_group.run_command_rank_0_first(Message("reopen", {"run": str(run)}), RecorderError)

    def start_profile(self) -> None:
        """Start recording all ranks with ``torch.profiler``.

        Raises UsageError without ``profile_dir`` or if a profile is already being recorded.
        """
        self._rank_group.require_usable()
        if self.config.profile_dir is None:
            raise UsageError("this engine has no directory for profiles; start it with profile_dir=DIR")
        if self.runner.profiler.is_running:
            raise UsageError("a profile is being recorded; stop it first")
        self._keep_outputs()
        self._rank_group.run_command(Message("profile", {"folder": None}), OutputError)

    def stop_profile(self, name: str | None = None) -> list[str]:
        """Stop profiling, write one trace per rank to a new directory, and return the trace paths.

        ``name`` is the directory's name below ``profile_dir``; the default is the current time. Raises UsageError if no
        profile is being recorded, OutputError if a trace cannot be written.
        """
        self._rank_group.require_usable()
        if not self.runner.profiler.is_running:
            raise UsageError("no profile is being recorded; start one first")
        self._keep_outputs()
        folder = Path(str(self.config.profile_dir)).absolute() / (name or time.strftime("%Y%m%d-%H%M%S"))
        first = self.config.dp_rank * self.config.tp
        self._rank_group.run_command(Message("profile", {"folder": str(folder), "first_rank": first}), OutputError)
        return [str(trace_file(folder, first + rank)) for rank in range(self.config.tp)]

    def state(self) -> dict[str, Any]:
        """Return the engine's settings and load as JSON values, for a status page."""
        config, scheduler, cache = self.config, self.scheduler, self.runner.cache_config
        return {
            "model": config.model,
            "architecture": self.model_config.architecture,
            "dtype": self.runner.dtype,
            "dp": config.dp,
            "tp": config.tp,
            "ep": config.ep,
            "max_positions": min(self.model_config.max_positions, scheduler.config.num_pages * config.page_size),
            "page_size": config.page_size,
            "max_num_seqs": config.max_num_seqs,
            "max_running": config.max_num_seqs,  # deprecated name, kept for one release
            "logits": config.logits,
            "kv_cache_dtype": cache.dtype,
            "kv_bytes_per_token": cache.position_bytes,
            "kv_bytes_total": sum(cache.group_bytes),
            "kv_pages_total": scheduler.kv_cache_manager.num_pages,
            "kv_pages_used": scheduler.kv_cache_manager.num_used,
            "kv_pages_cached": scheduler.kv_cache_manager.num_cached,
            "kv_pages_evicted": scheduler.kv_cache_manager.num_evicted,
            "kv_groups": [
                {
                    "window": group.window,
                    "pages_total": group.pages.num_pages,
                    "pages_used": group.num_used,
                    "bytes_total": size,
                }
                for group, size in zip(scheduler.kv_cache_manager.groups, cache.group_bytes, strict=True)
            ],
            "adapters": [adapter.plain() for adapter in self.adapters],
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "is_paused": self.is_paused,
            "num_grammars_compiling": self._grammars.num_compiling,
            "num_steps": scheduler.num_steps,
            "corrupted_requests": self._num_corrupted,
            "startup_s": self.runner.startup_timer.seconds,
            "startup_bytes": self.runner.startup_timer.grown_bytes,
            **asdict(scheduler.stats),
            **({} if self.speculator is None else {"speculation": self.speculator.state()}),
        }

    def close(self) -> None:
        """Close the observers and end the other ranks; safe to call twice."""
        if self._in_flight:
            self._finish(self._in_flight[-1].plan)
        self._in_flight = []
        self._grammars.close()
        self._rank_group.close()

    def _outputs(self, computed: Sequence[str], finished: Sequence[Request]) -> list[Output]:
        """Return an output for each request that gained a token or ended; a partially prefilled request has none."""
        live = self._live
        touched = [live[name] for name in computed if name in live]
        if finished:
            names = set(computed)
            touched += [request for request in finished if request.id not in names]
        return [
            self._output(request)
            for request in touched
            if request.finish_reason or len(request.tokens) > len(request.prompt_ids) + request.num_emitted
        ]

    def _output(self, request: Request) -> Output:
        """Build the output of ``request`` since the previous output, and release its resources if it has ended."""
        first = request.num_emitted
        new = tuple(request.tokens[len(request.prompt_ids) + first :])
        request.num_emitted += len(new)
        if request.finish_reason:
            self._live.pop(request.id, None)
            self.sampler.remove_request(request)
            self.adapters.release(request)
            if self.speculator is not None:
                self.speculator.forget(request)
        if not (request.finish_reason or request.returns_values):  # fast path: setting fewer fields is cheaper
            return Output(
                request=request.id,
                token_ids=new,
                prompt_tokens=len(request.prompt_ids),
                cached_tokens=request.cached_tokens,
                queue_time_s=None if first else request.queue_time_s,
                draft_counts=request.draft_counts,
                dp_rank=self.config.dp_rank,
            )
        return Output(
            request=request.id,
            token_ids=new,
            finish_reason=request.finish_reason,
            matched=request.matched,
            reason=request.reason,
            logprobs=tuple(request.logprobs[first:]) if request.params.wants_logprobs else None,
            prompt_logprobs=tuple(request.prompt_logprobs) if request.prompt_logprobs and not first else None,
            embedding=request.embedding,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=request.cached_tokens,
            queue_time_s=None if first else request.queue_time_s,
            draft_counts=request.draft_counts,
            routed_experts=None if request.routed is None else request.routed.take(),
            hidden_states=None if request.hidden is None else request.hidden.take(),
            dp_rank=self.config.dp_rank,
        )
