"""RankRegistry: track the ranks of a job that are connected to the recorder, may still join, or have left."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from tapscope.core.wire import Message
from tapscope.dumper.job.processes import is_alive
from tapscope.dumper.recorder.rank_connection import RankConnection

Send = Callable[[bytes, Message], None]
"""Callback that sends a message to a ZeroMQ identity; dropped if the peer is gone."""
Log = Callable[[str], None]

_JOIN_WAIT_S = 60.0  # maximum wait for the first rank
_REFUSED_WAIT_S = 2.0  # maximum wait for another rank after one was refused and none is connected
_STRAGGLER_WAIT_S = 10.0  # maximum wait for the missing ranks after all joined ranks have left
_REMOTE_SILENCE_S = 30.0  # a rank on another host that sends no message for this long counts as gone


class RankRegistry:
    """Collection of the :class:`RankConnection` of each rank that ever joined."""

    def __init__(self, send: Send, log: Log) -> None:
        self._send = send
        self._log = log
        self.ranks: dict[int, RankConnection] = {}
        self._by_identity: dict[bytes, RankConnection] = {}
        self.world_size = 1
        self._started = time.monotonic()
        self.changed = self._started
        """Time at which a rank last joined or left."""
        self._refused: float | None = None  # time of the last refused attempt to join
        self._is_over = False

    def find(self, identity: bytes) -> RankConnection | None:
        """Return the connection with the given ZeroMQ identity, or None."""
        return self._by_identity.get(identity)

    def present(self) -> list[RankConnection]:
        """Return the connected ranks, ordered by rank."""
        return [rank for _, rank in sorted(self.ranks.items()) if rank.left is None]

    def absent(self) -> dict[int, str]:
        """Return rank -> reason for each rank of the world that is not connected (``missing`` if it never joined)."""
        absent = dict.fromkeys(range(self.world_size), "missing")
        for number, rank in self.ranks.items():
            absent.pop(number, None)
            if rank.left is not None:
                absent[number] = rank.left
        return absent

    @property
    def is_finished(self) -> bool:
        """Whether no rank is connected and no further rank is expected."""
        now = time.monotonic()
        if self._is_over:
            return True
        if not self.ranks:
            is_refused = self._refused is not None and now - self._refused > _REFUSED_WAIT_S
            return is_refused or now - self._started > _JOIN_WAIT_S
        if self.present():
            return False
        return len(self.ranks) >= self.world_size or now - self.changed > _STRAGGLER_WAIT_S

    # ---- joining

    def note_attempt(self) -> None:
        """Note that a rank asked to join; the attempt counts as refused until :meth:`add` is called."""
        self._refused = time.monotonic()

    def refusal(self, number: int, run: Path) -> Message | None:
        """Return the ``refused`` message if rank ``number`` cannot join now, else None; ``retry``: it can join soon."""
        known = self.ranks.get(number)
        if known is None:
            return None
        if known.left is None:
            reason = f"rank {number} of {run} already has a writer (pid {known.pid}); choose another run or rank"
            return Message("refused", {"reason": reason})
        self._is_over = self._is_over or not self.present()  # a new capture starts: stop waiting for stragglers
        reason = f"rank {number} of {run} was written by pid {known.pid}; other ranks are still recording"
        return Message("refused", {"reason": reason, "retry": True})

    def add(self, rank: RankConnection) -> None:
        """Register a rank that has joined."""
        self.ranks[rank.rank] = self._by_identity[rank.identity] = rank
        self._refused = None
        self.world_size = int(rank.open_fields["world_size"])
        self.changed = time.monotonic()

    # ---- sending

    def send_reliably(self, rank: RankConnection, message: Message) -> None:
        """Send a numbered message, and keep it for retransmission until the rank acknowledges it."""
        message = Message(message.kind, message.fields | {"n": rank.sent.count}, message.frames)
        rank.sent.keep(message)
        self._send(rank.identity, message)

    def send_to_all(self, message: Message, *, but: RankConnection | None = None) -> None:
        """Send a message reliably to every connected rank except ``but``."""
        for rank in self.present():
            if rank is not but:
                self.send_reliably(rank, message)

    # ---- leaving

    def heartbeat(self, leave: Callable[[RankConnection, str, str, Message | None], None]) -> None:
        """Send a heartbeat to every rank; call ``leave`` for a dead local rank or a remote rank silent for 30 s."""
        for rank in self.present():
            if rank.local and not is_alive(rank.pid):
                leave(rank, "died", f"process {rank.pid} of rank {rank.rank} died", None)
            elif not rank.local and time.monotonic() - rank.last_received > _REMOTE_SILENCE_S:
                host = rank.open_fields["host"]
                reason = f"no message from rank {rank.rank} on {host} for {_REMOTE_SILENCE_S:g} s"
                leave(rank, "silent", reason, Message("fatal", {"reason": reason}))
            else:
                counts = {"received": rank.received.count, "sent": rank.sent.count}
                self._send(rank.identity, Message("heartbeat", counts))

    def remove(self, rank: RankConnection, why: str, reason: str, close_message: Message | None) -> None:
        """Mark a rank as left: seal its files, and send it ``close_message``."""
        rank.left = why
        rank.close_message = close_message
        self.changed = time.monotonic()
        try:
            with contextlib.closing(rank.writer):  # seals as much as possible, even if the line does not fit any more
                if why != "closed":  # a rank that closes sends its own close event
                    rank.writer.event("lost", reason=reason, cause=why)
        except OSError as error:
            self._log(f"rank {rank.rank}: sealing failed: {error}")
        if close_message is not None:
            self._send(rank.identity, close_message)
