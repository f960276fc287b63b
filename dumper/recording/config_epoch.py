"""ConfigEpochs: the rank's side of a two-phase commit of a configuration change."""

from collections.abc import Callable, Mapping
from typing import Any

from tapscope.core.errors import ConfigError, RuleError
from tapscope.core.wire import Message
from tapscope.dumper.config import DumperConfig

Check = Callable[[DumperConfig], Mapping[str, str] | None]
"""Callback that checks a configuration; raises RuleError or ConfigError if this rank cannot apply it.

Returns the rules that match no site of this rank's model, each with an explanation; another pipeline stage may have
matching sites.
"""

ReleasePast = Callable[[int], tuple[int, int]]
"""Callback that sends the last N steps of the flight recorder; returns (number of steps, number of bytes)."""


class ConfigEpochs:
    """Changes that this rank has accepted, and the epochs at which they apply.

    The sender's thread accepts or refuses changes; the forward's thread applies them between steps.
    """

    def __init__(self, check: Check, *, release: ReleasePast | None = None) -> None:
        """``release`` is called in the sender's thread; the message of a ConfigError it raises becomes the answer."""
        self._check = check
        self._release = release
        self._prepared: dict[int, dict[str, Any]] = {}
        self._commits: dict[int, int] = {}  # epoch -> step from which it applies
        self.applied = 0
        """Active epoch."""

    @property
    def latest(self) -> int:
        """Newest epoch that every rank has accepted."""
        return max([self.applied, *list(self._commits)])

    def on_message(self, message: Message, step: int) -> Message | None:
        """Handle a message of the recorder without touching the model; return the answer, if one is due.

        ``step`` is the rank's current step.
        """
        if message.kind == "release":
            return Message(
                "released", {"id": message["id"], "current_step": step, **self._released(int(message["past"]))}
            )
        epoch = int(message["epoch"])
        if message.kind == "commit":
            self._commits[epoch] = int(message["step"])
        elif message.kind == "cancel":
            self._prepared.pop(epoch, None)
        elif message.kind == "prepare":
            return Message("accept", {"epoch": epoch, "current_step": step, **self._prepare(epoch, message)})
        return None

    def take_due(self, step: int, epoch: int | None) -> list[tuple[int, dict[str, Any]]]:
        """Remove and return the changes to apply before ``step`` as (epoch, change), oldest first.

        ``epoch`` is set if the host decides for all ranks. An idle rank may have several changes to apply.
        """
        commits = dict(self._commits)  # a copy, because the sender's thread adds commits
        if epoch is None:
            epoch = max((each for each, agreed in commits.items() if step >= agreed), default=None)
        if epoch is None or epoch <= self.applied:
            return []
        ready = sorted(each for each in list(self._prepared) if each <= epoch)
        if ready:
            self.applied = ready[-1]
        for each in commits:
            if each <= self.applied:
                self._commits.pop(each, None)
        return [(each, self._prepared.pop(each)) for each in ready]

    def _prepare(self, epoch: int, message: Message) -> dict[str, Any]:
        unmatched: Mapping[str, str] | None = None
        try:
            if "config" in message.fields:
                unmatched = self._check(DumperConfig().updated(message["config"]))
        except (ConfigError, RuleError) as error:
            return {"problem": str(error)}
        except Exception as error:  # noqa: BLE001 - a configuration must not end the capture
            return {"problem": f"this configuration cannot be checked: {type(error).__name__}: {error}"}
        self._prepared[epoch] = message.fields
        return {"problem": None, "unmatched": dict(unmatched or {})}

    def _released(self, past: int) -> dict[str, Any]:
        if self._release is None:
            return {"problem": "no flight recorder is on; configure flight_recorder_steps first"}
        try:
            steps, nbytes = self._release(past)
        except ConfigError as error:
            return {"problem": str(error)}
        except Exception as error:  # noqa: BLE001 - as above
            return {"problem": f"the flight recorder failed: {type(error).__name__}: {error}"}
        return {"steps": steps, "bytes": nbytes}
