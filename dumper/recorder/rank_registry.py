"""Roll: which ranks are there, who may come in, and who has left."""

import contextlib
import socket
import time
from typing import TYPE_CHECKING, Any

from tapscope.core.errors import RecorderError
from tapscope.core.wire import Message
from tapscope.dumper.job.processes import is_alive
from tapscope.dumper.recorder.disk_space_guard import free_bytes
from tapscope.dumper.recorder.rank_connection import Peer
from tapscope.dumper.transport.shm_ring import ShmRingError, ShmRingView
from tapscope.run_format.directory import create_run
from tapscope.run_format.writer import RankWriter

if TYPE_CHECKING:
    from tapscope.dumper.recorder.recorder import Recorder

_JOIN_WAIT_S = 60.0  # for the first rank
_REFUSED_WAIT_S = 2.0  # for another rank, once one was refused and nobody is there
_STRAGGLER_WAIT_S = 10.0  # for the rest of the world once those that came have left
_REMOTE_SILENCE_S = 30.0  # a rank on another host that says nothing for so long has left


class Roll:
    """One peer a rank that ever came."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self.peers: dict[int, Peer] = {}
        self._by_identity: dict[bytes, Peer] = {}
        self.world_size = 1
        self._started = time.monotonic()
        self.changed = self._started
        """When a rank last came or left."""
        self._refused: float | None = None
        """When a rank was last refused."""
        self._is_over = False

    def find(self, identity: bytes) -> Peer | None:
        """The rank that speaks from there."""
        return self._by_identity.get(identity)

    def present(self) -> list[Peer]:
        """Ranks that are connected, in order."""
        return [peer for _, peer in sorted(self.peers.items()) if peer.gone is None]

    @property
    def is_finished(self) -> bool:
        """Whether nobody is there and nobody is waited for."""
        now = time.monotonic()
        if self._is_over:
            return True
        if not self.peers:
            is_refused = self._refused is not None and now - self._refused > _REFUSED_WAIT_S
            return is_refused or now - self._started > _JOIN_WAIT_S
        if self.present():
            return False
        return len(self.peers) >= self.world_size or now - self.changed > _STRAGGLER_WAIT_S

    # ---- coming

    def hello(self, identity: bytes, message: Message) -> None:
        """A rank asks to come in: it is welcomed, or refused; raises whatever is wrong with what it says."""
        self._refused = time.monotonic()
        recorder, opening = self._recorder, message["opening"]
        rank = int(message["rank"])
        if (refusal := self._refuses(rank)) is not None:
            recorder.send(identity, refusal)
            return
        writer = self._begin(rank, message)
        local = opening["host"] == socket.gethostname()
        peer = Peer(identity, rank, int(opening["pid"]), local, {"rank": rank, **opening}, writer)
        peer.ring = self._map_ring(message) if local else None
        self.peers[rank] = self._by_identity[identity] = peer
        self._refused = None
        self.world_size = int(opening["world_size"])
        self.changed = time.monotonic()
        peer.unmatched = dict(message.fields.get("unmatched") or {})
        in_force = recorder.steering.welcome(message)
        free = free_bytes(recorder.steering.changes.run_path)
        content = {**in_force, "http": recorder.doors.http, "ring": peer.ring is not None, "free": free}
        recorder.send(identity, Message("welcome", content))
        recorder.steering.changes.rank_joined(peer)

    def _begin(self, rank: int, hello: Message) -> RankWriter:
        """The rank's writer, and with the first one the run."""
        recorder = self._recorder
        try:
            if not self.peers:
                create_run(recorder.path, hello["manifest"])
            writer = recorder.intake.writer(recorder.steering.changes.run_path, rank)
            try:
                writer.event("open", rank=rank, **hello["opening"])
            except OSError:
                writer.close()
                raise
        except OSError as error:
            text = f"the recorder cannot write {recorder.path}: {error.strerror}; make room there or choose another run"
            raise RecorderError(text) from None
        return writer

    def _map_ring(self, hello: Message) -> ShmRingView | None:
        described: dict[str, Any] | None = hello.fields.get("ring")
        try:
            return ShmRingView(str(described["path"]), int(described["nbytes"])) if described else None
        except (ShmRingError, KeyError, TypeError, ValueError) as error:
            self._recorder.log(f"payloads will come inside messages: {error}")
            return None

    def _refuses(self, rank: int) -> Message | None:
        """Why a rank cannot come in now; ``retry`` when it soon can."""
        path, known = self._recorder.path, self.peers.get(rank)
        if known is not None and known.gone is None:
            reason = f"rank {rank} of {path} already has a writer (pid {known.pid}); choose another run or rank"
            return Message("refused", {"reason": reason})
        if known is not None:
            self._is_over = self._is_over or not self.present()  # a new capture begins: wait for stragglers no longer
            reason = f"rank {rank} of {path} was written by pid {known.pid}; other ranks are still recording"
            return Message("refused", {"reason": reason, "retry": True})
        if self._recorder.steering.changes.busy:
            return Message("refused", {"reason": "a change of configuration is under way", "retry": True})
        return None

    # ---- leaving

    def beat(self) -> None:
        """Tell every rank that the recorder lives, and see who does not."""
        for peer in self.present():
            if peer.local and not is_alive(peer.pid):
                self.leave(peer, "died", f"process {peer.pid} of rank {peer.rank} died")
            elif not peer.local and time.monotonic() - peer.heard > _REMOTE_SILENCE_S:
                reason = f"rank {peer.rank} on {peer.opening['host']} has said nothing for {_REMOTE_SILENCE_S:g} s"
                self.leave(peer, "silent", reason, farewell=Message("failing", {"reason": reason}))
            else:
                counts = {"has": peer.received.count, "sent": peer.sent.count}
                self._recorder.send(peer.identity, Message("alive", counts))

    def leave(self, peer: Peer, why: str, reason: str = "", farewell: Message | None = None) -> None:
        """A rank has left: what it wrote is sealed, and it is told ``farewell``."""
        peer.gone = why
        peer.farewell = farewell
        self.changed = time.monotonic()
        try:
            with contextlib.closing(peer.writer):  # sealed as far as it goes, also where the line does not fit any more
                if why != "closed":  # a rank that closes has sent its own close line
                    peer.writer.event("lost", reason=reason, cause=why)
        except OSError as error:
            self._recorder.log(f"rank {peer.rank}: sealing failed: {error}")
        self._recorder.steering.changes.rank_left(peer)
        if farewell is not None:
            self._recorder.send(peer.identity, farewell)

    def end(self) -> None:
        """The recorder was stopped, and with it the recording of whoever is still there."""
        reason = "the recorder was stopped by a signal"
        for peer in self.present():
            self.leave(peer, "stopped", reason, farewell=Message("failing", {"reason": reason}))
