"""Recording: one run of this rank while it is open."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapscope.dumper import manifest
from tapscope.dumper.captures import NOWHERE
from tapscope.dumper.collector import Collector
from tapscope.dumper.config import DumperConfig
from tapscope.dumper.farewell import say
from tapscope.dumper.identity import Who
from tapscope.dumper.link import Link
from tapscope.dumper.regime import Regime
from tapscope.dumper.schedule import Schedule
from tapscope.dumper.steps import OpenStep
from tapscope.dumper.watch import Watch
from tapscope.errors import RecorderError, RuleError, RunExistsError, StepError
from tapscope.observe import RankInfo, StepInfo
from tapscope.wire import Message

_log = logging.getLogger("tapscope")
_RESET_TIMEOUT_S = 10.0


class Recording:
    """Steps, collector, taps and link of one open run; without a link only what is captured in memory."""

    def __init__(self, config: DumperConfig, who: Who, watches: list[Watch], link: Link | None) -> None:
        self.info = info = who.ask()
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
        self._calls: dict[str, int] = {}
        self._num_runs = 1
        self._first: Path | None = None
        self._answer: dict[str, Any] = {}
        self._answered = threading.Event()
        self._told_lost: OpenStep | None = None
        if link is not None:
            link.tick = self.collector.keeper.tick
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
        if not lenient and (problem := self.problem_with(config)) is not None:
            raise RuleError(problem)
        unmatched = self.regime.unmatched(config) if self._watches and not lenient else {}
        taps = [tap for watch in self._watches for tap in watch.taps]
        hello = manifest.hello(self.info, config, taps, unmatched)
        if later:
            self.link.open_later(run, hello, self._on_message, force=force)
        else:
            self._welcome(self.link.open(run, hello, self._on_message, force=force))
        self.start()

    def start(self, *, select: bool = True) -> None:
        """Watch the models; the taps are placed with ``select``, or later."""
        for watch in self._watches:
            watch.start(self)
        if select:
            self.regime.select()

    def join(self, watch: Watch) -> None:
        """One more model: its taps are placed at once."""
        watch.start(self)
        self.regime.select()
        if self.link is not None:
            self.link.put_message(Message("modules", {"modules": manifest.modules(watch.taps)}))
            self.link.backlog.flush()

    def close(self, interrupted: str | None) -> str | None:
        """Take the taps away, send what is left and say what is missing; None, or why the run is incomplete."""
        self.schedule.settle()
        for watch in self._watches:
            watch.last_look(self.collector)
        silent, unused = self._never_fired(), self.regime.unused()
        is_idle = not self.schedule.next_step and any(watch.armed for watch in self._watches)
        self.stop()
        link, collector = self.link, self.collector
        if link is None:
            return None
        if (welcome := link.arrived(wait=True)) is not None:
            self._welcome(welcome)
        collector.close()
        collector.account.settle()
        fields: dict[str, Any] = {"never_fired": silent, "outside_step": collector.num_outside}
        if interrupted is not None:
            fields["interrupted"] = interrupted
        collector.keeper.close(interrupted)
        link.put_event("close", **fields)
        lost = link.close()
        say(collector, self.run, silent, lost, unused=unused, is_idle=is_idle)
        return lost

    def stop(self) -> None:
        """Take the taps away."""
        self.regime.explicit = None
        self.collector.gradients.forget()
        for watch in self._watches:
            watch.stop()

    def abandon(self) -> None:
        """This is a forked child, and the recording its parent's: nothing is recorded here."""
        self.stop()

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
        first, number = self._first or self.run, self._num_runs + 1
        self._first, self._num_runs = first, number
        return first.with_name(name or f"{first.name}-{number}")

    def succeed(self, lost: "Recording", run: Path) -> None:
        """Go on in ``run``, by a recorder of its own, where that of ``lost`` has ended; raises as :meth:`open`."""
        self._first, self._num_runs = lost._first, lost._num_runs
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
        self.info = self.regime.info = info = self._who.ask()
        hello = manifest.hello(info, self.regime.config, [], {})
        more = {"manifest": hello["manifest"], "opening": {"rank": info.rank, **hello["opening"]}}
        self._answered.clear()
        self._reopen(run, **more)
        self.called("reset")
        if not self._answered.wait(_RESET_TIMEOUT_S):
            reason = link.backlog.dead or "it did not answer"
            raise RecorderError(f"the recorder has not opened {run} within {_RESET_TIMEOUT_S:g} s: {reason}")
        if (problem := self._answer.get("problem")) is not None:
            raise RunExistsError(str(problem))
        self._renew(run)
        self.schedule.restart()

    def configure(self, changes: dict[str, Any]) -> None:
        """This process's own change, applied now, or before the next step when one is open; raises as DumperConfig."""
        is_idle = self.collector.step is None
        if is_idle:  # what was agreed on before comes first
            self.regime.apply_agreed(self.schedule.next_step, None, self._go_on_in)
        config = self.regime.base.updated(changes)
        if (problem := self.problem_with(config)) is not None:
            raise RuleError(problem)
        self.called("configure", config=config.to_json())
        self.regime.configure(config, now=is_idle)

    def problem_with(self, config: DumperConfig) -> str | None:
        """Why the configuration is refused: a rule that matches no site, on a rank that should have them all."""
        unmatched = {} if not self._watches or self._may_be_a_stage() else self.regime.unmatched(config)
        return next(iter(unmatched.values()), None)

    def called(self, method: str, **more: Any) -> None:
        """Tell the recorder of a call that all ranks should make, so that it can say when they do not."""
        self._calls[method] = self._calls.get(method, 0) + 1
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
            self._become(news)
        return self.regime.apply_due(info, self._go_on_in)

    def _become(self, info: RankInfo) -> None:
        """Groups were made after the run was opened."""
        if info.rank != self.info.rank:
            text = "tapscope records as rank %d, which this process was when the run was opened; it is rank %d now: "
            _log.warning(text + "open the run after init_process_group", self.info.rank, info.rank)
            return
        self.info = self.regime.info = info
        if self.link is not None:
            mesh, coords = dict(info.mesh), dict(info.coords)
            self.link.put_event("mesh", world_size=info.world_size, mesh=mesh, coords=coords)
        self.regime.select()

    def _ending(self, step: OpenStep) -> None:
        for watch in self._watches:
            watch.end_step(self.collector, step)

    # ---- the recorder

    def _welcome(self, welcome: dict[str, Any]) -> None:
        self.regime.adopt(int(welcome["epoch"]), welcome["config"])
        self.http, self.run = welcome["http"], Path(welcome["run"])
        keeper = self.collector.keeper
        keeper.alarms.run = self.run
        if (free := welcome.get("free")) is not None:  # looked at before the first value is taken
            keeper.brake.heed_disk(int(free), self.regime.config.min_free_bytes or 0)

    def _on_message(self, message: Message) -> Message | None:
        if message.kind == "reopened":
            self._answer = message.fields
            self._answered.set()
            return None
        if self.collector.keeper.hear(message):
            return None
        return self.regime.adoption.on_message(message, self.schedule.next_step - 1)

    def _go_on_in(self, run: Path) -> None:
        """What the recorder has agreed on with all ranks."""
        self._reopen(run)
        self._renew(run)

    def _reopen(self, run: Path, **more: Any) -> None:
        assert self.link is not None
        self.link.put_message(Message("reopen", {"run": str(run), "never_fired": self._never_fired(), **more}))

    def _renew(self, run: Path) -> None:
        self.run = run
        self.collector.restart(run)
        self.regime.note()
        for watch in self._watches:
            watch.renew()
        self.regime.select()

    def _may_be_a_stage(self) -> bool:
        """Whether other ranks may hold layers that this one lacks."""
        mesh = self.info.mesh
        return self.info.world_size > 1 and (not mesh or mesh.get("pp", 1) > 1)

    def _never_fired(self) -> list[str]:
        return [site for watch in self._watches for site in watch.silent()] if self.schedule.next_step else []
