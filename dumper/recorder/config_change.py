"""ConfigChange: coordinate changes of the configuration or run across all ranks, and track running captures."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapscope.core.wire import Message
from tapscope.dumper.recorder.rank_connection import RankConnection
from tapscope.dumper.recorder.rank_registry import RankRegistry
from tapscope.dumper.recorder.two_phase_commit import Release, Transaction
from tapscope.run_format.directory import remove_empty_run

Answer = tuple[int, dict[str, Any]]
"""HTTP status and body."""
Reply = Callable[[bytes, Any, int, dict[str, Any]], None]
"""Callback that answers a control request: (ZeroMQ identity, request id, HTTP status, body)."""
NO_RANK = "no rank is connected; start the model first"


class ConfigChange:
    """Coordinator of two-phase commits: asks every rank to accept a change, commits or cancels it, answers the client.

    Only one change is in progress at a time.
    """

    def __init__(
        self,
        run: Path,
        ranks: RankRegistry,
        *,
        reply: Reply,
        adopt: Callable[[Path], None],
        resumed: Callable[[], None],
    ) -> None:
        """Create the coordinator of the recorder's first run.

        ``adopt`` is called with the run that a reset opens, ``resumed`` when a stopped rank captures again.
        """
        self._ranks = ranks
        self._reply = reply
        self._adopt = adopt
        self._resumed = resumed
        self._change: Transaction | None = None
        self._release: Release | None = None
        self._last_epoch = 0
        self._capture_steps: dict[int, int | None] = {}  # epoch -> capture_steps of its configuration
        self._capture_epoch: int | None = None  # epoch of the newest capture
        self._stop: Message | None = None  # the trigger message that stopped the capture, until it resumes
        self.epoch = 0
        """Newest epoch that every rank accepted."""
        self.config: dict[str, Any] = {}
        """Base configuration, which applies while no capture is running."""
        self.run = run
        """Run that the ranks currently write."""

    @property
    def busy(self) -> bool:
        """Whether a change is in progress."""
        return self._change is not None

    # ---- requests

    def propose(self, identity: bytes, request: Any, payload: dict[str, Any], shown: dict[str, Any]) -> Answer | None:
        """Ask every rank to accept the change ``payload``.

        Returns None if the question was sent; the client receives the outcome, which includes ``shown``, once the ranks
        have answered. Returns an error answer if no change is possible now.
        """
        if (refusal := self.refusal()) is not None:
            return refusal
        self._last_epoch += 1  # never reused, so that a late answer to a canceled change cannot count for the next one
        epoch = self._last_epoch
        self._change = Transaction(
            epoch=epoch, payload=payload, shown=shown, reply_to=identity, request_id=request, **self._members()
        )
        self._ranks.send_to_all(Message("prepare", {"epoch": epoch, **payload}))
        return None

    def release(self, identity: bytes, request: Any, past: int) -> Answer | None:
        """Ask every rank to release the last ``past`` steps of its flight recorder; return None or an error answer."""
        if not self._ranks.present():
            return 409, {"error": NO_RANK}
        if self._release is not None:
            return 409, {"error": "another release is in progress; try again in a second"}
        self._last_epoch += 1
        number = self._last_epoch
        self._release = Release(epoch=number, past=past, reply_to=identity, request_id=request, **self._members())
        self._ranks.send_to_all(Message("release", {"id": number, "past": past}))
        return None

    def refusal(self) -> Answer | None:
        """Return the error answer if no change is possible now, else None."""
        if self._change is not None:
            return 409, {"error": "another change is in progress; try again in a second"}
        if not self._ranks.present():
            return 409, {"error": NO_RANK}
        return None

    def running_capture(self) -> str | None:
        """Return a phrase that describes the running capture; None if there is none."""
        if self._capture_epoch is None:
            return None
        left = {}
        for rank in self._ranks.present():
            if rank.epoch < self._capture_epoch:
                left[rank.rank] = "pending"
            elif rank.capture_steps_left is not None:
                left[rank.rank] = f"{rank.capture_steps_left} left"
        if not left:
            return None
        steps = self._capture_steps[self._capture_epoch]
        each = ", ".join(f"rank {rank}: {words}" for rank, words in left.items())
        return f"the capture of {steps} step{'s' if steps != 1 else ''} of epoch {self._capture_epoch} ({each})"

    # ---- ranks

    def from_rank(self, rank: RankConnection, message: Message) -> None:
        """Handle an answer or report of a rank.

        ``accept`` answers a ``prepare``, ``applied`` states the step from which a commit applies, and ``released``
        answers a ``release``. ``trigger`` is forwarded to the other ranks; ``stopped`` states why a rank no longer
        captures. ``divergence`` (``found``) reports the first divergence of a step from the reference run.
        ``call_count`` (``method``, ``count``, ``config``) reports the calls of a method that all ranks should call.
        """
        if message.kind == "accept" and self._change and message["epoch"] == self._change.epoch:
            self._change.unmatched[rank.rank] = dict(message.fields.get("unmatched") or {})
            self._change.answer(rank.rank, message.fields.get("problem"))
        elif message.kind == "applied":
            self._applied(rank, message)
        elif message.kind == "released" and self._release and message["id"] == self._release.epoch:
            if message.fields.get("problem") is None:
                self._release.released[rank.rank] = {name: int(message[name]) for name in ("steps", "bytes")}
            self._release.answer(rank.rank, message.fields.get("problem"))
        elif message.kind == "stopped":
            rank.stopped = message.fields.get("reason")
            if rank.stopped is None:
                self._stop = None
                self._resumed()
        elif message.kind == "trigger":
            if message["stop"]:
                self._stop = Message("trigger", message.fields | {"keep": False})
            self._ranks.send_to_all(message, but=rank)
        elif message.kind == "divergence":
            divergence = dict(message["found"])
            rank.num_divergences += 1
            rank.divergence = {**(rank.divergence or divergence), "last_step": divergence["step"]}
        elif message.kind == "call_count":
            rank.call_counts[str(message["method"])], rank.last_call = int(message["count"]), time.monotonic()
            self.config = message.fields.get("config") or self.config
        self.advance()

    def _applied(self, rank: RankConnection, message: Message) -> None:
        rank.epoch = message["epoch"]
        if rank.epoch in self._capture_steps:
            rank.capture_steps_left = self._capture_steps[rank.epoch]
        if self._change and rank.epoch == self._change.epoch:
            self._change.applied[rank.rank] = message["step"]

    def rank_joined(self, rank: RankConnection) -> None:
        """Send the stop message to a rank that joins after a trigger stopped the capture."""
        if self._stop is not None:
            self._ranks.send_reliably(rank, self._stop)

    def rank_left(self, rank: RankConnection) -> None:
        """Stop waiting for answers of a rank that left."""
        for inquiry in (self._change, self._release):
            if inquiry is not None:
                inquiry.forget(rank.rank, rank.left or "gone")

    # ---- progress

    def advance(self) -> None:
        """Commit the change once every rank accepted it, and answer clients whose outcome is known."""
        if self._release is not None and (outcome := self._release.outcome()) is not None:
            release, self._release = self._release, None
            self._reply(release.reply_to, release.request_id, *outcome)
        change = self._change
        if change is None:
            return
        if change.accepted:
            self._commit(change)
        outcome = change.outcome()
        if outcome is None:
            return
        if change.committed_at is None:
            self._ranks.send_to_all(Message("cancel", {"epoch": change.epoch}))
            if "run" in change.payload:
                remove_empty_run(Path(change.payload["run"]))
        self._change = None
        self._reply(change.reply_to, change.request_id, *outcome)

    def _commit(self, change: Transaction) -> None:
        step = max((rank.step for rank in self._ranks.present()), default=-1) + 1
        if "run" in change.payload:
            self.run = Path(change.payload["run"])
            self._adopt(self.run)
        self.epoch = change.epoch
        if (config := change.payload.get("config")) is not None:
            steps = self._capture_steps[change.epoch] = config.get("capture_steps")
            if steps is None:
                self.config = config
            self._capture_epoch = None if steps is None else change.epoch
        change.commit(step)
        self._ranks.send_to_all(Message("commit", {"epoch": change.epoch, "step": step}))

    def end(self) -> None:
        """Answer all waiting clients with status 503, because the recorder exits."""
        for inquiry in (self._change, self._release):
            if inquiry is not None:
                self._reply(inquiry.reply_to, inquiry.request_id, 503, {"error": "the recorder has just ended"})
        self._change = self._release = None

    def _members(self) -> dict[str, Any]:
        present = frozenset(rank.rank for rank in self._ranks.present())
        return {"members": present, "absent": self._ranks.absent()}
