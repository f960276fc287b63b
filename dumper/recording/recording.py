"""Recording: an open run of this rank."""

import logging
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapscope.core.errors import RecorderError, RuleError, StepError
from tapscope.core.observe import RankInfo, StepInfo
from tapscope.core.wire import Message
from tapscope.dumper.config import DumperConfig
from tapscope.dumper.job.fork_guard import ForkGuard
from tapscope.dumper.job.rank_identity import RankIdentity
from tapscope.dumper.pipeline.in_memory_sink import NULL_SINK
from tapscope.dumper.pipeline.recorder_client import RecorderClient
from tapscope.dumper.recording import rank_manifest
from tapscope.dumper.recording.active_config import ActiveConfig
from tapscope.dumper.recording.attached_model import AttachedModel
from tapscope.dumper.recording.live_injection import LiveInjection
from tapscope.dumper.recording.model_registry import ModelRegistry
from tapscope.dumper.recording.run_rollover import RunRollover
from tapscope.dumper.recording.step_tracker import StepTracker
from tapscope.dumper.reference.live_comparison import LiveComparison
from tapscope.dumper.selection.expression_usage import ExpressionUsage
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.taps.collector import Collector
from tapscope.run_format.ledger import REMEDY, compiled_sentence
from tapscope.source_patcher import SourcePatches

_log = logging.getLogger("tapscope")
_closing_log = logging.getLogger("tapscope.closing")
"""Logger of :func:`report_close`; disabled by programs that print the ledger of the run themselves."""


def report_close(
    collector: Collector,
    run: Path | None,
    lost: str | None,
    *,
    silent: list[str],
    compiled: list[str],
    unused: list[str],
    empty: str | None,
    never_held: list[str],
) -> None:
    """Log the data missing from a run: taps that never fired, and values that were lost or could not be captured.

    ``lost`` is the reason why the recorder did not acknowledge all values, ``empty`` the reason why there are no
    records. ``silent`` are sites that never fired; ``compiled`` are compiled modules whose taps did not fire;
    ``unused`` are rules without a match; ``never_held`` are expressions that were evaluated but never true.
    """
    counters = collector.counters
    facts = [
        (empty if run else None, f"{run} has no records: {empty}"),
        (len(compiled), compiled_sentence(compiled)),
        (len(silent), f"taps that never fired ({len(silent)}): {', '.join(silent[:4])}"),
        (len(unused), f"rules that match nothing that was dumped: {', '.join(unused[:4])}"),
        (len(never_held), f"expressions that were never true: {'; '.join(never_held[:4])}"),
        (collector.num_outside, f"{collector.num_outside} firings outside a step were not captured; use step()"),
        (counters.num_dropped if run else 0, f"{counters.num_dropped} values were dropped; {run} is incomplete"),
        (counters.num_failed, f"{counters.num_failed} values could not be captured (tapscope info shows why)"),
        (lost if run else None, f"{run} is incomplete: {lost}"),
    ]
    for amount, sentence in facts:
        if amount:
            _closing_log.warning("tapscope: %s", sentence)


class Recording:
    """Steps, collector, taps and recorder client of one open run.

    Without a client, values are captured only in memory.
    """

    def __init__(
        self, config: DumperConfig, identity: RankIdentity, models: ModelRegistry, client: RecorderClient | None
    ) -> None:
        info = identity.resolve()
        self._identity = identity
        self.client = client
        self.run: Path | None = None
        """Path of the run; None until the recorder has answered."""
        self.http: str | None = None
        sink: Any = client.queue if client is not None else NULL_SINK
        self.collector = Collector(sink, rank=info.rank)
        self.active = ActiveConfig(config, info, models, self.collector, client)
        self.steps = self.active.steps = StepTracker(
            self.collector,
            before=self._before_step,
            ending=self._ending,
            after=self.active.after_step,
            wanted=lambda: self.active.may_capture,
        )
        self._models = models
        self._calls: Counter[str] = Counter()
        self._rollover = RunRollover()
        self._patches: SourcePatches | None = None
        self._reported_lost: OpenStep | None = None
        self.fork_guard = ForkGuard()
        if client is not None:
            client.on_tick, client.on_idle = self.collector.retention.tick, self.collector.flush_partial
            client.rank_counters = self._rank_counters

    # ---- opening and closing

    def open(self, run: Callable[[], Path], *, force: bool, later: bool = False, lenient: bool = False) -> None:
        """Join or start the recorder of ``run()`` and place the taps; with ``later``, join in the background.

        Raises the errors of :meth:`RecorderClient.open`, and RuleError for a rule that matches no site, unless
        ``lenient`` is set or another rank (a pipeline stage) may have matching sites.
        """
        assert self.client is not None
        config = self.active.config
        if config.against is not None:
            self.collector.capturer.comparison = LiveComparison.open(
                config.against, self.info, rtol=config.against_rtol
            )
        if config.source_patches is not None:
            self._patches = SourcePatches.of(config.source_patches)
        if config.inject_from is not None:
            self.active.injection = LiveInjection.open(config.inject_from, self.info, config.inject_wait_s)
        if not lenient and (problem := self.active.refusal(config)) is not None:
            raise RuleError(problem)
        unmatched = self.active.unmatched(config) if self._models and not lenient else {}
        join_request = rank_manifest.join_message(self.info, config, self._models.taps, unmatched)
        if later:
            self.client.open_later(run, join_request, self._on_message, force=force)
        else:
            self._take_answer(self.client.open(run, join_request, self._on_message, force=force))
        if self._patches is not None:
            self._patches.apply()
            self._put_patches_event()
        self.start()

    def start(self, *, select: bool = True) -> None:
        """Attach the models, and place the taps if ``select`` is set."""
        self._models.attach(self)
        if select:
            self.active.select()

    def join(self, attached: AttachedModel) -> None:
        """Attach another model and place its taps."""
        attached.attach(self)
        self.active.select()
        if self.client is not None:
            self.client.put_message(Message("modules", {"modules": rank_manifest.modules(attached.taps)}))
            self.client.queue.flush()

    def close(self, interrupted: str | None) -> str | None:
        """Remove the taps, send the remaining records, close the run and report missing data.

        ``interrupted`` names the exception that ended the program. Returns the reason why the recorder did not
        acknowledge everything, or None.
        """
        self.steps.close()
        self._models.check_hooks(self.collector)
        unused, why_empty = self.active.unused_rules(), self._why_empty()
        silent, compiled = self._never_fired(), self._models.compiled()
        was_on = self.active.may_capture
        self.stop()
        client, collector = self.client, self.collector
        if client is None:
            return None
        self._finish_join(wait=True)
        collector.close()
        collector.counters.flush_late()
        empty = None if collector.counters.num_sent else why_empty
        never_held = self.active.expressions.never_held()
        fields = self._absent(silent, compiled, empty) | {"outside_step": collector.num_outside}
        if interrupted is not None:
            fields["interrupted"] = interrupted
        collector.retention.close(interrupted)
        if (comparison := collector.capturer.comparison) is not None:
            client.put_event("comparison", **comparison.summary())
            (_log.warning if comparison.verdict != "agrees" else _log.info)("tapscope: %s", comparison)
        client.put_event("close", **fields)
        lost = client.close()
        news = [] if self._models.have_warned else compiled
        # while capture is off, e.g. when a server starts, an empty run is expected
        empty = empty if was_on else None
        if sys.exception() is not None:  # the exception explains empty runs and silent taps
            empty, silent = None, []
        report_close(
            collector, self.run, lost, silent=silent, compiled=news, unused=unused, empty=empty, never_held=never_held
        )
        return lost

    def stop(self) -> None:
        """Remove the taps, source patches and injections."""
        self.active.explicit_dump = None
        self.collector.gradients.forget()
        if self._patches is not None:
            self._patches.undo()
        if self.active.injection is not None:
            self.active.injection.place((), (), self.collector)
        self._models.detach()

    def _rank_counters(self) -> dict[str, int]:
        """Return the counters of this rank for its heartbeat messages."""
        counters, comparison = self.collector.counters, self.collector.capturer.comparison
        numbers = {"dropped": counters.num_dropped, "failed": counters.num_failed}
        if self.active.injection is not None:
            numbers["injected"] = self.active.injection.num_injected
        if comparison is None:
            return numbers
        return numbers | {
            "compared": comparison.num_compared,
            "not_compared": comparison.num_skipped,
        }

    @property
    def info(self) -> RankInfo:
        """Rank and mesh coordinates of this process."""
        return self.active.info

    @property
    def is_lost(self) -> bool:
        """Whether the recorder was lost, so that no record can be written any more."""
        return self.run is not None and self.client is not None and self.client.queue.dead is not None

    def next_run(self, name: str | None) -> Path:
        """Return the path of the next run, called ``name`` or numbered; ends the current iteration.

        Raises StepError inside a step or in a recording without a run, and RecorderError if opening the run failed.
        """
        if (client := self.client) is None:
            raise StepError("reset(): no run is open; capture in memory needs none")
        self._finish_join(wait=True)
        if self.run is None:
            raise RecorderError(f"reset(): no run is open: {client.queue.dead}")
        self.steps.end_iteration()
        self.steps.cancel_end_iteration()
        return self._rollover.next(self.run, name)

    def take_over(self, lost: "Recording", run: Path) -> None:
        """Open ``run`` with a new recorder, because the recorder of ``lost`` has exited; raises like :meth:`open`."""
        self._rollover.continue_from(lost._rollover)
        self.open(lambda: run, force=False, lenient=True)

    def reset(self, name: str | None) -> None:
        """Continue in a new run called ``name``, with steps from 0.

        Blocks until the recorder has opened the run, and must be called between steps. Raises RunExistsError if the run
        exists, RecorderError if the recorder does not answer, and StepError inside a step.
        """
        client, run = self.client, self.next_run(name)
        assert client is not None
        self.steps.close()
        self.collector.counters.flush_late()
        self.active.info = info = self._identity.resolve()
        join_request = rank_manifest.join_message(info, self.active.config, [], {})
        more = {"manifest": join_request["manifest"], "opening": {"rank": info.rank, **join_request["opening"]}}
        self._rollover.request(client, self._reopen_message(run, **more))
        self.report_call("reset")
        self._rollover.wait(client, run)
        self._begin_run(run)
        self.steps.restart()

    def configure(self, changes: dict[str, Any]) -> None:
        """Apply a change by this process now, or before the next step if a step is open.

        Raises the errors of :meth:`.DumperConfig.updated`, and RuleError for a rule that matches no site.
        """
        is_idle = self.collector.step is None
        if is_idle:  # first apply the changes that all ranks agreed on
            self.active.apply_agreed(self.steps.next_step, None, self._switch_run)
        config = self.active.base.updated(changes)
        if (problem := self.active.refusal(config)) is not None:
            raise RuleError(problem)
        self.report_call("configure", config=config.to_json())
        self.active.configure(config, now=is_idle)

    def report_call(self, method: str, **more: Any) -> None:
        """Report a call that all ranks should make, so that the recorder can detect ranks that do not."""
        self._calls[method] += 1
        if self.client is not None:
            self.client.put_message(Message("call_count", {"method": method, "count": self._calls[method], **more}))
            self.client.queue.flush()

    # ---- steps

    @property
    def is_wanted(self) -> bool:
        """Whether a step that begins now may be recorded."""
        return self.active.may_capture or self.active.has_pending_change

    def check_strict(self, step: OpenStep) -> None:
        """With ``strict`` back-pressure, raise RecorderError if any value up to the end of ``step`` was lost.

        Called once per step; opening the next step checks again, for explicit dumps in between.
        """
        client, config = self.client, self.active.config
        if config.backpressure != "strict" or client is None or step is self._reported_lost:
            return
        lost = step.counts.dropped + step.counts.failed
        if lost or not client.queue.drained(max(config.block_timeout_s, 1.0)):
            reason = client.queue.dead or ("see the events of the run" if lost else "the recorder does not acknowledge")
            number = step.info.step
            self._reported_lost = step
            raise RecorderError(f"values up to step {number} were lost ({lost} in this step): {reason}")

    def _before_step(self, info: StepInfo) -> int:
        if self._finish_join():
            self.active.select()
        if (news := self._identity.refresh()) is not None:
            self.active.update_rank_info(news)
        return self.active.apply_due(info, self._switch_run)

    def _ending(self, step: OpenStep) -> None:
        if self.active.injection is not None:
            self.active.injection.end_step(self.collector, step)
        self._models.end_step(self.collector, step)

    # ---- the recorder

    def _finish_join(self, *, wait: bool = False) -> bool:
        """Process the recorder's answer to a background join; return whether there was one."""
        answer = self.client.take_answer(wait=wait) if self.client is not None else None
        if answer is not None:
            self._take_answer(answer)
        return answer is not None

    def _take_answer(self, joined: dict[str, Any]) -> None:
        """Process the ``joined`` answer: adopt epoch, configuration and run, and check free disk space."""
        self.active.join_epoch(int(joined["epoch"]), joined["config"])
        self.http, self.run = joined["http"], Path(joined["run"])
        retention = self.collector.retention
        retention.trigger_actions.run = self.run
        if (free := joined.get("free")) is not None:  # check before the first value is captured
            retention.capture_stop.check_disk(int(free), self.active.config.min_free_bytes or 0)

    def _on_message(self, message: Message) -> Message | None:
        if self._rollover.handle_message(message) or self.collector.retention.handle_message(message):
            return None
        return self.active.epochs.on_message(message, self.steps.next_step - 1)

    def _switch_run(self, run: Path) -> None:
        """Continue in a run that all ranks have agreed on."""
        assert self.client is not None
        self.client.put_message(self._reopen_message(run))
        self._begin_run(run)

    def _reopen_message(self, run: Path, **more: Any) -> Message:
        """Build the message that ends the current run and requests ``run``."""
        why_empty = None if self.collector.counters.num_sent else self._why_empty()
        absent = self._absent(self._never_fired(), self._models.compiled(), why_empty)
        return Message("reopen", {"run": str(run), "absent": absent, **more})

    def _absent(self, silent: list[str], compiled: list[str], why_empty: str | None) -> dict[str, Any]:
        """Return the fields of a close event that report missing data."""
        more = {"compiled": compiled, "empty": why_empty, "never_held": self.active.expressions.never_held()}
        return {"never_fired": silent} | {name: value for name, value in more.items() if value}

    def _begin_run(self, run: Path) -> None:
        self.run = run
        self.collector.restart(run)
        self.active.expressions = ExpressionUsage()
        self.active.put_config_event()
        self._put_patches_event()
        self._models.begin_run()
        self.active.select()

    def _put_patches_event(self) -> None:
        """Write an event that names the patched functions into the run."""
        if self._patches is not None and self.client is not None:
            targets = list(self._patches.targets)
            self.client.put_event("source_patches", file=self.active.config.source_patches, functions=targets)

    def _why_empty(self) -> str | None:
        """Return why this rank has no records, provided that it has none; None if that is expected."""
        retention, config = self.collector.retention, self.active.config
        if config.filter is not None and config.filter in self.active.expressions.never_held():
            return f"the filter was never true: {config.filter}"
        if not self.active.may_capture and retention.capture_stop.stopped is None:
            return "nothing was selected: no rule in force records anything"
        if not self._models or retention.is_holding:
            return None if retention.is_holding else "nothing was dumped that the rules keep"
        if self.steps.next_step:
            return "no site that the rules select fired"
        if self.fork_guard.was_called:
            return "the model was called only in a forked process, which records nothing; open a Dumper there"
        if self._models.is_traced:
            return f"the model ran only inside a graph that was compiled without its taps; {REMEDY}"
        return f"no step was taken: the model was not called, or only in a graph compiled before; for that, {REMEDY}"

    def _never_fired(self) -> list[str]:
        return self._models.never_fired() if self.steps.next_step else []
