"""Changes: the one change of configuration or run that may be under way, and the captures that came of them."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapscope.core.wire import Message
from tapscope.dumper.recorder import recorder_state
from tapscope.dumper.recorder.two_phase_commit import Release, Transaction
from tapscope.run_format.directory import remove_empty_run

if TYPE_CHECKING:
    from tapscope.dumper.recorder.rank_connection import Peer
    from tapscope.dumper.recorder.recorder import Recorder

Answer = tuple[int, dict[str, Any]]
"""HTTP status and body."""
NO_RANK = "no rank is connected; start the model first"


class Changes:
    """Asks the ranks, hears their answers, commits or cancels, and answers who asked."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self._change: Transaction | None = None
        self._release: Release | None = None
        self._last_epoch = 0
        self._capture_steps: dict[int, int | None] = {}  # epoch -> capture_steps of the configuration it brought
        self._capture: int | None = None  # epoch of the newest capture
        self._stop: Message | None = None  # the alarm by which a trigger ended the capture, until it goes on
        self.epoch = 0
        """The newest epoch that every rank accepted."""
        self.config: dict[str, Any] = {}
        """What is in force when no capture is."""
        self.run_path = recorder.path

    @property
    def busy(self) -> bool:
        """Whether a change is under way."""
        return self._change is not None

    def from_rank(self, peer: "Peer", message: Message) -> None:
        """``accept`` answers a prepare, ``applied`` says from which step, ``released`` answers a release.

        ``alarm`` is passed on to the other ranks, ``stopped`` says why one captures no more.
        ``called`` (``method``, ``count``, ``config``) counts what a process calls on its own and all ranks should.
        """
        if message.kind == "accept" and self._change and message["epoch"] == self._change.epoch:
            self._change.unmatched[peer.rank] = dict(message.fields.get("unmatched") or {})
            self._change.answer(peer.rank, message.fields.get("problem"))
        elif message.kind == "applied":
            self._applied(peer, message)
        elif message.kind == "released" and self._release and message["id"] == self._release.epoch:
            if message.fields.get("problem") is None:
                self._release.released[peer.rank] = {name: int(message[name]) for name in ("steps", "bytes")}
            self._release.answer(peer.rank, message.fields.get("problem"))
        elif message.kind == "stopped":
            peer.stopped = message.fields.get("reason")
            if peer.stopped is None:  # it goes on, unless its disk is as full as it was
                self._stop = None
                self._recorder.floor.check()
        elif message.kind == "alarm":  # what one rank met concerns all
            if message["stop"]:
                self._stop = Message("alarm", message.fields | {"keep": False})
            for other in self._recorder.present():
                if other is not peer:
                    self._recorder.tell(other, message)
        elif message.kind == "called":
            peer.calls[str(message["method"])], peer.called = int(message["count"]), time.monotonic()
            self.config = message.fields.get("config") or self.config
        self.advance()

    def _applied(self, peer: "Peer", message: Message) -> None:
        peer.epoch = message["epoch"]
        if peer.epoch in self._capture_steps:
            peer.capture_left = self._capture_steps[peer.epoch]
        if self._change and peer.epoch == self._change.epoch:
            self._change.applied[peer.rank] = message["step"]

    def rank_joined(self, peer: "Peer") -> None:
        """Tell a rank that joins after a trigger ended the capture."""
        if self._stop is not None:
            self._recorder.tell(peer, self._stop)

    def rank_left(self, peer: "Peer") -> None:
        """A rank that is gone is waited for no longer."""
        for inquiry in (self._change, self._release):
            if inquiry is not None:
                inquiry.forget(peer.rank, peer.gone or "gone")

    def end(self) -> None:
        """The recorder ends: whoever still waits is told."""
        for inquiry in (self._change, self._release):
            if inquiry is not None:
                self._reply(inquiry.reply_to, inquiry.request_id, 503, {"error": "the recorder has just ended"})
        self._change = self._release = None

    def advance(self) -> None:
        """Send the commit when all accepted, answer when there is an outcome."""
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
            self._broadcast(Message("cancel", {"epoch": change.epoch}))
            if "run" in change.payload:
                remove_empty_run(Path(change.payload["run"]))
        self._change = None
        self._reply(change.reply_to, change.request_id, *outcome)

    def _commit(self, change: Transaction) -> None:
        peers = self._recorder.present()
        step = max((peer.step for peer in peers), default=-1) + 1
        if "run" in change.payload:
            self.run_path = Path(change.payload["run"])
            self._recorder.adopt(self.run_path)
        self.epoch = change.epoch
        if (config := change.payload.get("config")) is not None:
            steps = self._capture_steps[change.epoch] = config.get("capture_steps")
            if steps is None:
                self.config = config
            self._capture = None if steps is None else change.epoch
        change.commit(step)
        self._broadcast(Message("commit", {"epoch": change.epoch, "step": step}))

    def propose(self, identity: bytes, request: Any, payload: dict[str, Any], shown: dict[str, Any]) -> Answer | None:
        """Ask every rank to accept ``payload``; the answer, which repeats ``shown``, comes when they have."""
        if (refusal := self.refusal()) is not None:
            return refusal
        self._last_epoch += 1  # never used twice: an answer to a cancelled change must not count for the next
        epoch = self._last_epoch
        self._change = Transaction(
            epoch=epoch, payload=payload, shown=shown, reply_to=identity, request_id=request, **self._ranks()
        )
        self._broadcast(Message("prepare", {"epoch": epoch, **payload}))
        return None

    def release(self, identity: bytes, request: Any, past: int) -> Answer | None:
        """Ask every rank's flight recorder for its last ``past`` steps."""
        if not self._recorder.present():
            return 409, {"error": NO_RANK}
        if self._release is not None:
            return 409, {"error": "another release is under way; try again in a second"}
        self._last_epoch += 1
        number = self._last_epoch
        self._release = Release(epoch=number, past=past, reply_to=identity, request_id=request, **self._ranks())
        self._broadcast(Message("release", {"id": number, "past": past}))
        return None

    def refusal(self) -> Answer | None:
        """Why nothing can be changed now, or None."""
        if self._change is not None:
            return 409, {"error": "another change is under way; try again in a second"}
        if not self._recorder.present():
            return 409, {"error": NO_RANK}
        return None

    def running_capture(self) -> str | None:
        """The capture that is under way, as a phrase."""
        if self._capture is None:
            return None
        left = {}
        for peer in self._recorder.present():
            if peer.epoch < self._capture:
                left[peer.rank] = "pending"
            elif peer.capture_left is not None:
                left[peer.rank] = f"{peer.capture_left} left"
        if not left:
            return None
        steps = self._capture_steps[self._capture]
        each = ", ".join(f"rank {rank}: {words}" for rank, words in left.items())
        return f"the capture of {steps} step{'s' if steps != 1 else ''} of epoch {self._capture} ({each})"

    def _ranks(self) -> dict[str, Any]:
        present = frozenset(peer.rank for peer in self._recorder.present())
        return {"members": present, "absent": recorder_state.absent_ranks(self._recorder.roll)}

    def _broadcast(self, message: Message) -> None:
        for peer in self._recorder.present():
            self._recorder.tell(peer, message)

    def _reply(self, identity: bytes, request: Any, status: int, body: dict[str, Any]) -> None:
        self._recorder.send(identity, Message("reply", {"id": request, "status": status, "body": body}))
