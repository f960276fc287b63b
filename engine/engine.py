"""Engine: schedules requests and computes their tokens, on one or several ranks. Runners add text to its outputs."""

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
"""What :meth:`Engine.pause_generation` does with live requests."""

_NAN_WARNING_S = 10.0
"""Seconds between two warnings of NaN; all requests are counted."""


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A step that was launched and not yet collected."""

    plan: StepPlan
    requests: list[Request]
    """One for each scheduled request."""
    sampled: SampledStep
    launched: LaunchedStep


class Engine:
    """A loaded model, its cache and its queue; one thread at a time may use it."""

    def __init__(
        self, config: EngineConfig, observer: ObserverFactory | None, heartbeat: Heartbeat | None = None
    ) -> None:
        """Load on every rank. ``heartbeat`` is that of this process, where another process watches it.

        Raises ConfigError, UsageError, CheckpointError, RankLostError.
        """
        self.config = config
        self.model_config = resolve_length(config, ModelConfig.read(Path(config.model)))
        self.model_config.check_split(config.tp)
        check_draft(config, self.model_config)
        if config.has_lora:
            resolve_lora_rank(config)  # reports an adapter that cannot be read before the model is loaded
        self._rank_group = RankGroup(config, self.model_config, observer, heartbeat or Heartbeat())
        self._epoch = 0
        self.async_scheduling = config.async_scheduling and self.runner.device.type == "cuda"
        """Whether the next step may be launched before the tokens of this one are known."""
        self._in_flight: list[_InFlightStep] = []
        """Launched steps: at most one, and with async scheduling the next."""
        self._finished_step = -1
        """The last step that was finished for the observer."""
        self._undelivered: list[Output] = []
        """Outputs of steps that were collected between two calls of :meth:`step`."""
        self._live: dict[str, Request] = {}
        self.is_paused = False
        """Whether :meth:`step` computes nothing, see :meth:`pause_generation`."""
        self._num_corrupted = 0
        """Requests with NaN in their logits."""
        self._nan_warned_s: float | None = None
        self._nan_checks: list[NanCheck] = []
        """Of collected steps, the oldest first."""
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
        """Proposes draft tokens and counts the accepted ones (``speculator.stats``); None without speculation."""
        self.weights = WeightControl(
            config,
            self.model_config,
            self._rank_group,
            self.scheduler,
            drain=self._keep_outputs,
            is_paused=lambda: self.is_paused,
        )
        """Updates of the weights, by a checkpoint or by a trainer."""
        self.adapters = AdapterControl(config, self._rank_group, self.scheduler)
        """LoRA adapters that requests may name."""
        try:
            for name, folder in config.adapters:
                self.load_adapter(name, Path(folder))
        except BaseException:
            self.close()
            raise

    def _compute_draft(self, plan: StepPlan, sample: "Callable[[Tensor], Tensor]") -> list[int]:
        """A step of the draft model; one that is recorded has a step number of its own."""
        draft_runner = self._rank_group.draft_runner
        assert draft_runner is not None, "only a draft model plans such steps"
        if draft_runner.observer is not None:
            plan = replace(plan, step=self.scheduler.claim_step(), epoch=draft_runner.observer.epoch)
        launched = self._rank_group.launch(plan, sample)
        samples = any(item.samples for item in plan.scheduled)
        tokens = self._rank_group.collect(launched) if samples else []  # nothing to wait for
        draft_runner.finish(plan)
        return tokens

    @property
    def runner(self) -> ModelRunner:
        """Model runner of rank 0."""
        return self._rank_group.runner

    @property
    def draft_runner(self) -> ModelRunner | None:
        """Model runner of the draft model or head on rank 0; None without one."""
        return self._rank_group.draft_runner

    @property
    def rank_pids(self) -> dict[int, int | None]:
        """Process ids of ranks 1 and up."""
        return self._rank_group.pids

    @property
    def rank_sentinels(self) -> list[int]:
        """Descriptors that become readable when a rank has ended."""
        return self._rank_group.sentinels

    @property
    def num_waiting(self) -> int:
        """Waiting requests."""
        return len(self.scheduler.waiting)

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and not yet collected: at most one between two calls of :meth:`step`."""
        return len(self._in_flight)

    def check_ranks(self) -> None:
        """Raise RankLostError when a rank has failed or ended; every later call then raises it too."""
        self._rank_group.check()

    def prepare(self, request: Request) -> "Future[Any] | None":
        """Start compiling the request's grammar; returns a future to wait for before :meth:`submit`, or None.

        Raises what :meth:`submit` raises for anything else about the request.
        """
        self._check(request)
        return self._grammars.prepare(request.params)

    def submit(self, request: Request) -> None:
        """Queue a request; raises UsageError when it can never run, RankLostError once the engine stopped."""
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
        """Compute one step over all running requests; returns the new output of each, none when no request is live.

        While generation is paused it only returns what was computed before.

        Raises RankLostError; every later call then raises it too. Raises OutOfMemoryError, after which an
        engine of one rank stays usable: if the step had sampled its tokens, its requests have ended; else the next call
        tries it again.
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
                self._finish(self._in_flight[0].plan)  # all of it is launched: nothing more fires in it
                self._launch(ahead)
        plan = self._in_flight[0].plan
        outputs = self._collect()
        if self.speculator is not None and not self._is_recording:
            self.speculator.record_time(plan, time.perf_counter() - begin)
        return outputs if self.scheduler.has_work else outputs + self._drain()

    def _propose(self) -> dict[str, Drafts] | None:
        """Draft tokens of the next step; None without speculation."""
        if self.speculator is None:
            return None
        return self.speculator.propose(self.scheduler.running, is_recorded=self._is_recording)

    def _drafts_next(self) -> bool:
        """Whether the step after the one in flight may have drafts, so that it is not planned before its tokens are
        known."""
        if self.speculator is None:
            return False
        if self._is_recording or not self.runner.has_graphs:
            return True  # nothing may be launched
        return self.speculator.drafts_next(self.scheduler.running)

    def _draft_ahead(self) -> None:
        """Start drafting after the step in flight, where the device can do so before the host knows its tokens."""
        assert self.speculator is not None, "the caller has asked it"
        last = self._in_flight[0]
        if not self._is_recording and last.launched.sampled is not None:
            num_steps = self.speculator.draft_ahead(last.plan, last.requests, last.launched.sampled)
            if self.runner.observer is not None:  # which counts steps of the draft model
                for _ in range(num_steps):
                    self.scheduler.claim_step()

    def _catch_up(self) -> None:
        """Let a draft model that has waited for long compute what it missed, between two steps without drafts."""
        plan = self._in_flight[0].plan
        if self.speculator is not None and plan.is_decode and self.speculator.is_behind(self.scheduler.running):
            self._finish(plan)  # steps of the draft model are not part of it
            self.speculator.catch_up(self.scheduler.running)

    @property
    def _is_recording(self) -> bool:
        """Whether an observer may record the next step."""
        observer = self.runner.observer
        return observer is not None and (observer.armed or any(request.capture for request in self.scheduler.running))

    def _may_launch_ahead(self) -> bool:
        """Whether a step may be launched before the tokens of the previous one are known."""
        observer = self.runner.observer
        in_flight = self._in_flight[0].plan
        if not self.async_scheduling:
            return False
        if self._rank_group.num_ranks > 1 and not (self.runner.overlaps_steps and in_flight.greedy):
            return False  # rank 0 alone knows drawn tokens
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
        """Wait for the oldest launched step and update its requests."""
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
        """Count requests with NaN in their logits, drop their cached prefixes, and warn of one every
        ``_NAN_WARNING_S``.

        Checks that the device has not answered yet stay for a later step, unless ``wait``.
        """
        while self._nan_checks and (found := self._nan_checks[0].found(wait=wait)) is not None:
            self._nan_checks.pop(0)
            new = {request.id: request for request in found if not request.has_nan}
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
        """End the requests of a step whose tokens were committed, while other values that they return are missing."""
        for request in requests:
            if self._live.get(request.id) is request:
                self.scheduler.abort(request.id)
                self._output(request)

    def _finish(self, plan: StepPlan, accepted: Mapping[str, Sequence[int]] | None = None) -> None:
        """See :meth:`ModelRunner.finish`; nothing if the step is finished, because the next one was launched."""
        if self._finished_step != plan.step:
            self._finished_step = plan.step
            self.runner.finish(plan, accepted)

    def _collect_values(self, plan: StepPlan, requests: Sequence[Request]) -> None:
        """Keep what the step's requests ask for besides tokens: embeddings, routed experts, hidden states."""
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
        """Count the drafts that the step verified; returns request id -> which of its drafts were accepted."""
        accepted: dict[str, Sequence[int]] = {}
        for item, request in zip(plan.scheduled, requests, strict=True):
            if item.num_drafts:
                if self.speculator is not None:
                    self.speculator.record(request, item)
                request.draft_counts = request.draft_counts.verified(item.num_drafts, request.num_accepted)
                accepted[request.id] = request.accepted_drafts
        return accepted

    def _drain(self) -> list[Output]:
        """Collect every launched step."""
        outputs: list[Output] = []
        while self._in_flight:
            outputs += self._collect()
        return outputs

    def _wants_all_logits(self) -> bool:
        """Whether lm_head computes every row of the next step, which an armed observer may capture.

        Called once for each planned step: an epoch that has changed since the last call may arm the observer.
        """
        observer = self.runner.observer
        if self.config.logits != "observed" or observer is None:
            return self.config.logits == "all"
        previous, self._epoch = self._epoch, observer.epoch
        is_requested = any(request.capture for request in self.scheduler.live())
        return observer.armed or is_requested or self._epoch != previous

    def abort(self, request_id: str) -> Output | None:
        """Abort a live request between two steps; returns its last output, None when no such request is live."""
        request = self.scheduler.abort(request_id)
        if request is None:
            return None
        output = self._output(request)
        if not self.scheduler.has_work:  # no later step() would collect the launched steps
            self._keep_outputs()
        return output

    def pause_generation(self, mode: PauseMode) -> int:
        """Compute no steps until :meth:`continue_generation`; returns the number of live requests, which wait.

        Requests may be submitted and wait too. ``mode`` is SGLang's: ``abort`` ends the live requests with their tokens
        so far, ``retract`` preempts the running ones, so that they hold no pages, and ``in_place`` leaves them as they
        are. The next :meth:`step` returns the outputs.
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
        """Compute steps again; returns the number of live requests.

        Raises LiveError while the memory of weights or KV cache is released.
        """
        self._rank_group.require_usable()
        self.weights.require_memory()
        self.is_paused = False
        return len(list(self.scheduler.live()))

    def update_weights(self, folder: Path | None, *, partial: bool = False) -> None:
        """See :meth:`WeightControl.update`."""
        self.weights.update(folder, partial=partial)

    def _keep_outputs(self) -> None:
        """Collect the launched steps; their outputs are delivered by the next :meth:`step`."""
        self._undelivered += self._drain()

    def load_adapter(self, name: str, folder: Path) -> None:
        """See :meth:`AdapterControl.load`."""
        self.adapters.load(name, folder)

    def unload_adapter(self, name: str) -> int:
        """See :meth:`AdapterControl.unload`."""
        return self.adapters.unload(name)

    def reopen(self, run: Path) -> None:
        """Continue the observers of all ranks in the run directory ``run``; raises RecorderError when one cannot."""
        self._rank_group.require_usable()
        self._keep_outputs()
        self._rank_group.run_command_rank_0_first(Message("reopen", {"run": str(run)}), RecorderError)

    def start_profile(self) -> None:
        """Record the coming steps of all ranks with torch's profiler; raises UsageError."""
        self._rank_group.require_usable()
        if self.config.profile_dir is None:
            raise UsageError("this engine has no directory for profiles; start it with profile_dir=DIR")
        if self.runner.profiler.is_running:
            raise UsageError("a profile is being recorded; stop it first")
        self._keep_outputs()
        self._rank_group.run_command(Message("profile", {"folder": None}), OutputError)

    def stop_profile(self, name: str | None = None) -> list[str]:
        """Write what was recorded since :meth:`start_profile`, one trace per rank in a new directory; returns paths.

        ``name``: of that directory in ``profile_dir``; by default the time. Raises UsageError, OutputError.
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
        """Settings and load as JSON values, for a status page."""
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
        """Outputs of the requests that got a token or ended; a partly computed prompt has none."""
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
        """The output of ``request`` since its last one."""
        first = request.num_emitted
        new = tuple(request.tokens[len(request.prompt_ids) + first :])
        request.num_emitted += len(new)
        if request.finish_reason:
            self._live.pop(request.id, None)
            self.sampler.remove_request(request)
            self.adapters.release(request)
            if self.speculator is not None:
                self.speculator.forget(request)
        if not (request.finish_reason or request.returns_values):  # fewer fields are faster
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
