"""TriggerActions: runs the actions of triggers that fire, and limits the number of reports."""

import logging
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tapscope.dumper.rules.trigger import STATISTICS, Trigger
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.run_format.stats import Stats

_log = logging.getLogger("tapscope")
TIME_LIMIT_S = 60.0
"""Time limit of a command in seconds; then its process group is killed."""
MAX_COMMANDS = 20
"""Maximum number of commands that one rank starts in a run."""
_EVENTS_PER_SITE = 3
_WARNINGS_PER_TRIGGER = 10


class TriggerOutcome(NamedTuple):
    """The combined actions of triggers that fired together."""

    keep: bool
    stop: bool
    reason: str


class TriggerActions:
    """The triggers of one rank in one run.

    A NaN propagates to every site downstream, so reports are limited. The first firings of a trigger at a site are
    written as events, and the log gets one line per trigger and step, up to a limit. Further firings are only counted.
    """

    def __init__(self, put_event: Callable[..., None], *, rank: int = 0, run: Path = Path()) -> None:
        self._put_event = put_event
        self.rank = rank
        self.run = run
        self._commands = TriggerCommands(lambda **fields: put_event("command", **fields))
        self._fired: Counter[tuple[Trigger, str]] = Counter()
        self._warned: Counter[Trigger] = Counter()
        self._last_step: dict[Trigger, int] = {}  # trigger -> last step in which it fired
        self._last_command_step: dict[Trigger, int] = {}  # trigger -> last step in which it ran its command

    def fire(self, fired: list[tuple[Trigger, Stats]], site: str, step: OpenStep) -> TriggerOutcome:
        """Report the triggers that fired at ``site`` and start their commands; returns their combined other actions."""
        number = step.info.step
        for trigger, stats in fired:
            self._fired[trigger, site] += 1
            statistics = _used_statistics(trigger, stats)
            if self._fired[trigger, site] <= _EVENTS_PER_SITE:
                fields = {"condition": trigger.condition, "action": trigger.action, "found": statistics, "step": number}
                self._put_event("trigger", site=site, **fields)
            if self._last_step.get(trigger) != number:
                self._last_step[trigger] = number
                self._warn(trigger, site, statistics, number)
            if trigger.action == "run" and self._last_command_step.get(trigger) != number:
                self._last_command_step[trigger] = number
                self._run_command(trigger, site, number)
        actions = {trigger.action for trigger, _ in fired}
        first = fired[0][0]
        reason = f"trigger '{first.condition}' at {site}, step {number}, rank {self.rank}"
        return TriggerOutcome("keep" in actions, "stop" in actions, reason)

    def write_summary(self) -> None:
        """Report the firings and commands that were only counted, at the end of the run."""
        for (trigger, site), amount in self._fired.items():
            if amount > _EVENTS_PER_SITE:
                fields = {"condition": trigger.condition, "action": trigger.action, "step": self._last_step[trigger]}
                self._put_event("trigger", site=site, **fields, num_more=amount - _EVENTS_PER_SITE)
        if self._commands.num_refused:
            reason = f"{self._commands.num_refused} commands were not started: a run starts {MAX_COMMANDS}"
            self._put_event("command", problem=reason)
            _log.warning("tapscope: %s", reason)
        for trigger in self._warned:
            if self._warned[trigger] > _WARNINGS_PER_TRIGGER:
                amount = sum(number for (each, _), number in self._fired.items() if each == trigger)
                _log.warning("tapscope: trigger '%s' fired %d times in all", trigger, amount)
        self._fired.clear()

    def _warn(self, trigger: Trigger, site: str, statistics: dict[str, Any], step: int) -> None:
        self._warned[trigger] += 1
        if self._warned[trigger] > _WARNINGS_PER_TRIGGER:
            return
        last = "; further firings are counted" if self._warned[trigger] == _WARNINGS_PER_TRIGGER else ""
        numbers = ", ".join(f"{name}={value:.6g}" for name, value in statistics.items() if value is not None)
        text = "tapscope: %s: %s (%s) at step %d, rank %d -> %s%s"
        _log.warning(text, site, trigger.condition, numbers, step, self.rank, trigger.action, last)

    def _run_command(self, trigger: Trigger, site: str, step: int) -> None:
        values = {"site": site, "step": step, "rank": self.rank, "run": self.run, "condition": trigger.condition}
        self._commands.start(trigger.argv(values))


def _used_statistics(trigger: Trigger, stats: Stats) -> dict[str, Any]:
    """Return name -> value of the statistics that the condition uses."""
    return {name: STATISTICS[name](stats) for name in sorted(trigger.names) if name in STATISTICS}


class TriggerCommands:
    """Runs each trigger command in its own thread, with a time limit, and reports its outcome."""

    def __init__(self, put_event: Callable[..., None], *, time_limit_s: float = TIME_LIMIT_S) -> None:
        """``put_event(**fields)`` is called once per command, with ``argv`` and either ``exit`` or ``problem``."""
        self._put_event = put_event
        self._time_limit_s = time_limit_s
        self.num_started = 0
        self.num_refused = 0
        """Number of commands beyond MAX_COMMANDS, which were not started."""

    def start(self, argv: Sequence[str]) -> None:
        """Run ``argv`` without a shell, with the standard streams redirected to the null device."""
        if self.num_started >= MAX_COMMANDS:
            self.num_refused += 1
            return
        self.num_started += 1
        threading.Thread(target=self._run, args=(list(argv),), name="tapscope-command", daemon=True).start()

    def _run(self, argv: list[str]) -> None:
        try:
            self._put_event(argv=argv, **self._outcome(argv))
        except Exception as error:  # noqa: BLE001 - a thread's exception would be lost
            _log.warning("tapscope: the command %s: %s", argv[0], error)

    def _outcome(self, argv: list[str]) -> dict[str, int | str]:
        null = subprocess.DEVNULL
        try:
            process = subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, start_new_session=True)
        except (OSError, ValueError) as error:
            _log.warning("tapscope: the command %s was not started: %s", argv[0], error)
            return {"problem": f"not started: {error}"}
        try:
            return {"exit": process.wait(self._time_limit_s)}
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _log.warning("tapscope: the command %s was ended after %g s", argv[0], self._time_limit_s)
            return {"problem": f"ended after {self._time_limit_s:g} s"}
