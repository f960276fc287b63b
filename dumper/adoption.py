"""Adoption: a rank's side of a change. It accepts or refuses in the pipeline's thread and applies between steps."""

from collections.abc import Callable
from typing import Any

from tapscope.dumper.config import DumperConfig
from tapscope.errors import ConfigError, RuleError
from tapscope.wire import Message


class Adoption:
    """Changes this rank has accepted, and which of them is due."""

    def __init__(self, check: Callable[[DumperConfig], None], epoch: int = 0) -> None:
        """``check`` raises RuleError or ConfigError for a configuration this rank cannot apply."""
        self._check = check
        self._prepared: dict[int, dict[str, Any]] = {}
        self._commit: tuple[int, int] | None = None
        self.applied = epoch
        """Epoch in force."""

    @property
    def wanted(self) -> int:
        """The newest epoch that every rank has accepted."""
        return self._commit[0] if self._commit else self.applied

    def on_message(self, message: Message, step: int) -> Message | None:
        """Take what the recorder says; the model is not touched here. ``step`` is the one the rank is in."""
        epoch = int(message["epoch"])
        if message.kind == "commit":
            self._commit = (epoch, int(message["step"]))
        elif message.kind == "cancel":
            self._prepared.pop(epoch, None)
        elif message.kind == "prepare":
            return Message("accept", {"epoch": epoch, "problem": self._prepare(epoch, message), "at": step})
        return None

    def due(self, step: int, epoch: int | None) -> list[tuple[int, dict[str, Any]]]:
        """The changes to apply before ``step``, oldest first, with their epochs.

        ``epoch`` is the host's word where it decides for all ranks. An idle rank may have several to catch up with.
        """
        if epoch is None and self._commit and step >= self._commit[1]:
            epoch = self._commit[0]
        if epoch is None or epoch == self.applied:
            return []
        ready = sorted(each for each in list(self._prepared) if each <= epoch)
        if ready:
            self.applied = ready[-1]
        return [(each, self._prepared.pop(each)) for each in ready]

    def _prepare(self, epoch: int, message: Message) -> str | None:
        try:
            if "config" in message.fields:
                self._check(DumperConfig().updated(message["config"]))
        except (ConfigError, RuleError) as error:
            return str(error)
        self._prepared[epoch] = message.fields
        return None
