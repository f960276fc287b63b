"""Recording: one run of this rank while it is open."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapscope.core.errors import RecorderError, RuleError, StepError
from tapscope.core.observe import RankInfo, StepInfo
from tapscope.core.wire import Message
from tapscope.dumper.config import DumperConfig
from tapscope.dumper.job.fork_guard import Forked
from tapscope.dumper.job.rank_identity import Who
from tapscope.dumper.pipeline.in_memory_sink import NOWHERE
from tapscope.dumper.pipeline.recorder_client import Link
from tapscope.dumper.recording import rank_manifest
from tapscope.dumper.recording.active_config import Regime
from tapscope.dumper.recording.attached_model import Watch
from tapscope.dumper.recording.close_report import say
from tapscope.dumper.recording.model_registry import Watches
from tapscope.dumper.recording.run_rollover import Succession
from tapscope.dumper.recording.step_tracker import Schedule
from tapscope.dumper.selection.expression_usage import Holding
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.taps.collector import Collector
from tapscope.run_format.ledger import REMEDY


class Recording:
    """Steps, collector, taps and link of one open run; without a link only what is captured in memory."""

    def __init__(self, config: DumperConfig, who: Who, watches: Watches, link: Link | None) -> None:
        info = who.ask()
        self._who = who
        self.link = link
        self.run: Path | None = None
        """None until the recorder is there."""
        self.http: str | None = None
        sink: Any = link.backlog if link is not None else NOWHERE
        self.collector = Collector(sink, rank=info.rank)
        self.regime = Regime(config, info, watches, self.collector, link)
        self.schedule = self.regime.schedule = Schedule(
            self.collector,
            before=self._before_step,
            ending=self._ending,
            after=self.regime.count_down,
            wanted=lambda: self.regime.is_on,
        )
        self._watches = watches
        self._calls: Counter[str] = Counter()
        self._runs = Succession()
        self._told_lost: OpenStep | None = None
        self.forked = Forked()
        if link is not None:
            link.tick, link.quiet = self.collector.keeper.tick, self.collector.show
            account = self.collector.account
            link.tell = lambda: {"dropped": account.num_dropped, "failed": account.num_failed}

    # ---- life

    def open(self, run: Callable[[], Path], *, force: bool, later: bool = False, lenient: bool = False) -> None:
        """Join or start the recorder of ``run()`` and place the taps; with ``later`` in the background.

        Raises what :meth:`Link.open` does, and RuleError for a rule that can match nothing, unless ``lenient`` or
        another rank may have what it means.
        """
        assert self.link is not None
        config = self.regime.config
        if not lenient and (problem := self.regime.problem_with(config)) is not None:
            raise RuleError(problem)
        unmatched = self.regime.unmatched(config) if self._watches and not lenient else {}
        hello = rank_manifest.hello(self.info, config, self._watches.taps, unmatched)
        if later:
            self.link.open_later(run, hello, self._on_message, force=force)
        else:
            self._welcome(self.link.open(run, hello, self._on_message, force=force))
        self.start()

    def start(self, *, select: bool = True) -> None:
        """Watch the models; the taps are placed with ``select``, or later."""
        self._watches.start(self)
        if select:
            self.regime.select()

    def join(self, watch: Watch) -> None:
        """One more model: its taps are placed at once."""
        watch.start(self)
        self.regime.select()
        if self.link is not None:
            self.link.put_message(Message("modules", {"modules": rank_manifest.modules(watch.taps)}))
            self.link.backlog.flush()

    def close(self, interrupted: str | None) -> str | None:
        """Take the taps away, send what is left and say what is missing; None, or why the run is incomplete."""
        self.schedule.settle()
        self._watches.last_look(self.collector)
        unused, why_empty = self.regime.unused(), self._why_empty()
        silent, compiled = self._never_fired(), self._watches.compiled()
        was_on = self.regime.is_on
        self.stop()
        link, collector = self.link, self.collector
        if link is None:
            return None
        if (welcome := link.arrived(wait=True)) is not None:
            self._welcome(welcome)
        collector.close()
        collector.account.settle()
        empty = None if collector.account.num_sent else why_empty
        never_held = self.regime.holding.never_held()
        fields = self._absent(silent, compiled, empty) | {"outside_step": collector.num_outside}
        if interrupted is not None:
            fields["interrupted"] = interrupted
        collector.keeper.close(interrupted)
        link.put_event("close", **fields)
        lost = link.close()
        news = [] if self._watches.have_warned else compiled
        empty = empty if was_on else None  # with capture off, as a server starts, that is what was asked for
        say(collector, self.run, lost, silent=silent, compiled=news, unused=unused, empty=empty, never_held=never_held)
        return lost

    def stop(self) -> None:
        """Take the taps away."""
        self.regime.explicit = None
        self.collector.gradients.forget()
        self._watches.stop()

    @property
    def info(self) -> RankInfo:
        """Who this process is in its job."""
        return self.regime.info

    @property
    def is_lost(self) -> bool:
        """Whether the recorder was there and is not any more: nothing can be written here."""
        return self.run is not None and self.link is not None and self.link.backlog.dead is not None

    def next_run(self, name: str | None) -> Path:
        """The run to go on in, called ``name`` or by number; raises StepError inside a step."""
        if (link := self.link) is None:
            raise StepError("reset(): there is no run to go on from; what is captured in memory needs none")
        if (welcome := link.arrived(wait=True)) is not None:
            self._welcome(welcome)
        if self.run is None:
            raise RecorderError(f"reset(): no run is open: {link.backlog.dead}")
        self.schedule.turn()
        self.schedule.unturn()
        return self._runs.next(self.run, name)

    def succeed(self, lost: "Recording", run: Path) -> None:
        """Go on in ``run``, by a recorder of its own, where that of ``lost`` has ended; raises as :meth:`open`."""
        self._runs.follow(lost._runs)
        self.open(lambda: run, force=False, lenient=True)

    def reset(self, name: str | None) -> None:
        """Go on in a new run called ``name``, with steps from 0.

        Waits for the recorder: for use between steps. Raises RunExistsError when the run is taken, RecorderError when
        there is no answer, StepError inside a step.
        """
        link, run = self.link, self.next_run(name)
        assert link is not None
        self.schedule.settle()
        self.collector.account.settle()
        self.regime.info = info = self._who.ask()
        hello = rank_manifest.hello(info, self.regime.config, [], {})
        more = {"manifest": hello["manifest"], "opening": {"rank": info.rank, **hello["opening"]}}
        self._runs.ask(link, self._leave_for(run, **more))
        self.called("reset")
        self._runs.wait(link, run)
        self._renew(run)
        self.schedule.restart()

    def configure(self, changes: dict[str, Any]) -> None:
        """This process's own change, applied now, or before the next step when one is open; raises as DumperConfig."""
        is_idle = self.collector.step is None
        if is_idle:  # what was agreed on before comes first
            self.regime.apply_agreed(self.schedule.next_step, None, self._go_on_in)
        config = self.regime.base.updated(changes)
        if (problem := self.regime.problem_with(config)) is not None:
            raise RuleError(problem)
        self.called("configure", config=config.to_json())
        self.regime.configure(config, now=is_idle)

    def called(self, method: str, **more: Any) -> None:
        """Tell the recorder of a call that all ranks should make, so that it can say when they do not."""
        self._calls[method] += 1
        if self.link is not None:
            self.link.put_message(Message("called", {"method": method, "count": self._calls[method], **more}))
            self.link.backlog.flush()

    # ---- steps

    @property
    def is_wanted(self) -> bool:
        """Whether a step that begins now may be recorded."""
        return self.regime.is_on or self.regime.is_due

    def check_strict(self, step: OpenStep) -> None:
        """With the strict policy, raise RecorderError when anything up to the end of ``step`` was lost.

        Once a step: whoever opens the next one asks again, for explicit values that came in between.
        """
        link, config = self.link, self.regime.config
        if config.policy != "strict" or link is None or step is self._told_lost:
            return
        lost = step.counts.dropped + step.counts.failed
        if lost or not link.backlog.drained(max(config.block_timeout_s, 1.0)):
            reason = link.backlog.dead or ("see the events of the run" if lost else "the recorder does not acknowledge")
            number = step.info.step
            self._told_lost = step
            raise RecorderError(f"values up to step {number} were lost ({lost} in this step): {reason}")

    def _before_step(self, info: StepInfo) -> int:
        if self.link is not None and (welcome := self.link.arrived()) is not None:
            self._welcome(welcome)
            self.regime.select()
        if (news := self._who.news()) is not None:
            self.regime.become(news)
        return self.regime.apply_due(info, self._go_on_in)

    def _ending(self, step: OpenStep) -> None:
        self._watches.end_step(self.collector, step)

    # ---- the recorder

    def _welcome(self, welcome: dict[str, Any]) -> None:
        self.regime.adopt(int(welcome["epoch"]), welcome["config"])
        self.http, self.run = welcome["http"], Path(welcome["run"])
        keeper = self.collector.keeper
        keeper.alarms.run = self.run
        if (free := welcome.get("free")) is not None:  # looked at before the first value is taken
            keeper.brake.heed_disk(int(free), self.regime.config.min_free_bytes or 0)

    def _on_message(self, message: Message) -> Message | None:
        if self._runs.hear(message) or self.collector.keeper.hear(message):
            return None
        return self.regime.adoption.on_message(message, self.schedule.next_step - 1)

    def _go_on_in(self, run: Path) -> None:
        """What the recorder has agreed on with all ranks."""
        assert self.link is not None
        self.link.put_message(self._leave_for(run))
        self._renew(run)

    def _leave_for(self, run: Path, **more: Any) -> Message:
        """Ends the present run, and asks for another."""
        why_empty = None if self.collector.account.num_sent else self._why_empty()
        absent = self._absent(self._never_fired(), self._watches.compiled(), why_empty)
        return Message("reopen", {"run": str(run), "absent": absent, **more})

    def _absent(self, silent: list[str], compiled: list[str], why_empty: str | None) -> dict[str, Any]:
        """What the end of a run says of what is not in it."""
        more = {"compiled": compiled, "empty": why_empty, "never_held": self.regime.holding.never_held()}
        return {"never_fired": silent} | {name: value for name, value in more.items() if value}

    def _renew(self, run: Path) -> None:
        self.run = run
        self.collector.restart(run)
        self.regime.holding = Holding()
        self.regime.note()
        self._watches.renew()
        self.regime.select()

    def _why_empty(self) -> str | None:
        """Why this rank has no record, if it has none; None where that is nothing to wonder at."""
        keeper, config = self.collector.keeper, self.regime.config
        if config.filter is not None and config.filter in self.regime.holding.never_held():
            return f"the filter never held: {config.filter}"
        if not self.regime.is_on and keeper.brake.stopped is None:
            return "nothing was selected: no rule that is in force keeps anything"
        if not self._watches or keeper.is_holding:
            return None if keeper.is_holding else "nothing was dumped that the rules keep"
        if self.schedule.next_step:
            return "of what the rules keep nothing fired"
        if self.forked.was_called:
            return "the model was called only in a forked process, which records nothing; open a Dumper there"
        if self._watches.is_traced:
            return f"the model ran only inside a graph that was compiled without its taps; {REMEDY}"
        return f"no step was taken: the model was not called, or only in a graph compiled before; for that, {REMEDY}"

    def _never_fired(self) -> list[str]:
        return self._watches.silent() if self.schedule.next_step else []
