"""The recorder: a process without torch that writes what the ranks of one job send, and steers them.

    python -m tapscope.dumper.recorder RUN --options JSON [--lock-fd N]

Ranks talk to its ROUTER socket (batches, answers), control clients too (requests); record lines also go out
on a PUB socket, lossy and numbered, for live views.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from tapscope import wire
from tapscope.dumper.process import is_alive
from tapscope.dumper.steering import Steering
from tapscope.errors import RecorderError, TapscopeError
from tapscope.wire import Message
from tapscope.writer import RECORDER_FILE, RECORDER_LOG, RankWriter, create_run

_BEAT_S = 0.5
_JOIN_WAIT_S = 60.0  # for the first rank
_STRAGGLER_WAIT_S = 10.0  # for the rest of the world once those that came have left
_MAX_BURST = 64  # messages taken in a row before the heart beats


@dataclass(slots=True)
class Peer:
    """One rank's connection."""

    identity: bytes
    rank: int
    pid: int
    local: bool
    opening: dict[str, Any]
    writer: RankWriter
    step: int = -1
    epoch: int = 0
    capture_left: int | None = None
    gone: str | None = None
    """Why it left: ``closed``, ``died`` or ``disk``; None while it is there."""


class Recorder:
    """Owns the run directory, the sockets and one peer a rank."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path = path
        self.options = options
        self.peers: dict[int, Peer] = {}
        self._by_identity: dict[bytes, Peer] = {}
        self._home = _private_directory()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._router = context.socket(zmq.ROUTER)
        self._router.linger = 1000
        self._router.sndhwm = 0  # a ROUTER at its mark would silently drop acknowledgements
        self._live = context.socket(zmq.PUB)
        self._live.linger = 0
        self.address = f"ipc://{self._home}/recorder"
        self.live_address = f"ipc://{self._home}/live"
        self._router.bind(self.address)
        self._live.bind(self.live_address)
        self.steering = Steering(self)
        self.http: str | None = None
        self._server: Any = None
        self._announced = 0
        self._world_size = 1
        self._started = time.monotonic()
        self._changed = self._started
        self._stop = False

    def listen(self, control: str | None) -> None:
        """Serve the control app on ``HOST:PORT``; raises ListenError when that cannot be."""
        if control is None:
            return
        from tapscope.dumper.control import ControlClient, ControlServer, bind, make_app, parse_address

        bound = bind(*parse_address(control))
        host, port = bound.getsockname()[:2]
        self.http = f"{host}:{port}"
        self._server = ControlServer(make_app(ControlClient(self.address)), bound)
        self._server.start()

    def announce(self) -> None:
        """Say in RUN how to reach this process."""
        content = {"pid": os.getpid(), "wire": wire.VERSION, "address": self.address, "live": self.live_address}
        temporary = self.path / f".{RECORDER_FILE}"
        temporary.write_text(json.dumps(content | {"http": self.http}))
        temporary.replace(self.path / RECORDER_FILE)

    def run(self) -> None:
        """Serve until every rank has left, or SIGTERM."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_stop", True))
        beat = time.monotonic()
        while not self._finished():
            if self._router.poll(timeout=int(_BEAT_S * 500)):
                self._receive_burst()
            self.steering.advance()
            if time.monotonic() - beat > _BEAT_S:
                beat = time.monotonic()
                self._heartbeat()

    def close(self) -> None:
        """Seal everything and leave no trace but the run."""
        (self.path / RECORDER_FILE).unlink(missing_ok=True)  # first: nobody shall join any more
        for peer in self.peers.values():
            if peer.gone is None:
                self._leave(peer, "stopped", "the recorder was stopped")
        if self._server is not None:
            self._server.stop()
        sys.stderr.flush()
        log = self.path / RECORDER_LOG
        if log.is_file() and not log.stat().st_size:
            log.unlink()
        self._router.close()
        self._live.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def send(self, identity: bytes, message: Message) -> None:
        """To a rank or control client; one that is gone loses it."""
        self._router.send_multipart([identity, *wire.encode(message)])

    def present(self) -> list[Peer]:
        """Ranks that are connected, in order."""
        return [peer for _, peer in sorted(self.peers.items()) if peer.gone is None]

    def _receive_burst(self) -> None:
        for _ in range(_MAX_BURST):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = frames[0].bytes
            try:
                self._handle(identity, wire.decode([frames[1].buffer, *frames[2:]] if len(frames) > 1 else []))
            except TapscopeError as error:
                self.send(identity, Message("refused", {"reason": str(error)}))
            except Exception as error:  # noqa: BLE001 - one bad message must not end the recording of the others
                traceback.print_exc()
                self.send(identity, Message("refused", {"reason": f"{type(error).__name__}: {error}"}))

    def _handle(self, identity: bytes, message: Message) -> None:
        if message.kind == "hello":
            self._hello(identity, message)
            return
        if message.kind == "request":
            self.steering.request(identity, message)
            return
        peer = self._by_identity.get(identity)
        if peer is not None and peer.gone is not None:
            return
        if peer is None:
            raise RecorderError(f"a {message.kind!r} message came from a rank that did not say hello")
        peer.step = message.fields.get("at", peer.step)
        if message.kind == "batch":
            self._batch(peer, message)
        elif message.kind == "reopen":
            self._reopen(peer, message)
        elif message.kind == "close":
            self._leave(peer, "closed")
            self.send(identity, Message("closed"))
        elif message.kind != "at":
            self.steering.from_rank(peer, message)

    def _hello(self, identity: bytes, message: Message) -> None:
        rank = int(message["rank"])
        if (refusal := self._refuses(rank)) is not None:
            self.send(identity, refusal)
            return
        if not self.peers:
            create_run(self.path, message["manifest"])
        opening = {"rank": rank, **message["opening"]}
        writer = RankWriter(self.steering.run_path, rank, segment_bytes=int(self.options["segment_bytes"]))
        writer.event("open", **opening)
        local = message["opening"]["host"] == socket.gethostname()
        peer = Peer(identity, rank, int(message["opening"]["pid"]), local, opening, writer)
        self.peers[rank] = self._by_identity[identity] = peer
        self._world_size = int(message["opening"]["world_size"])
        self._changed = time.monotonic()
        self.steering.welcome(peer, message)
        self.send(identity, Message("welcome", {**self.steering.in_force(), "http": self.http}))

    def _refuses(self, rank: int) -> Message | None:
        """Why a rank cannot come in now; ``retry`` when it soon can."""
        known = self.peers.get(rank)
        if known is not None and known.gone is None:
            reason = f"rank {rank} of {self.path} already has a writer (pid {known.pid}); choose another run or rank"
            return Message("refused", {"reason": reason})
        if known is not None:
            self._stop = self._stop or not self.present()  # a new capture begins: wait for stragglers no longer
            reason = f"rank {rank} of {self.path} was written by pid {known.pid}; other ranks are still recording"
            return Message("refused", {"reason": reason, "retry": True})
        if self.steering.busy:
            return Message("refused", {"reason": "a change of configuration is under way", "retry": True})
        return None

    def _batch(self, peer: Peer, message: Message) -> None:
        blob = bytes(message.frames[0])
        lines = blob.split(b"\n") if blob else []
        payloads = [(*head, frame.buffer) for head, frame in zip(message["payloads"], message.frames[1:], strict=True)]
        try:
            written = peer.writer.batch(lines, payloads, message["shared"], message["sharing_step"])
        except OSError as error:
            self._leave(peer, "disk", f"writing failed: {error}")
            self.send(peer.identity, Message("failing", {"reason": f"the recorder cannot write {self.path}: {error}"}))
            return
        peer.capture_left = message.fields.get("capture_left")
        self.send(peer.identity, Message("ack", {"n": message["n"]}))
        self._announced += 1
        live = Message("live", {"rank": peer.rank, "n": self._announced}, [b"\n".join(written)])
        self._live.send_multipart([b"live", *wire.encode(live)])

    def _reopen(self, peer: Peer, message: Message) -> None:
        path = Path(message["run"])
        peer.writer.event("close", reason="reset", never_fired=message.fields.get("never_fired", []))
        peer.writer.close()
        peer.writer = RankWriter(path, peer.rank, segment_bytes=int(self.options["segment_bytes"]))
        peer.writer.event("open", **peer.opening)

    def _leave(self, peer: Peer, why: str, reason: str = "") -> None:
        peer.gone = why
        self._changed = time.monotonic()
        try:
            if why != "closed":  # a rank that closes has sent its own close line
                peer.writer.event("lost", reason=reason)
            peer.writer.close()
        except OSError as error:
            print(f"rank {peer.rank}: sealing failed: {error}", file=sys.stderr)
        self.steering.rank_left(peer)

    def _heartbeat(self) -> None:
        for peer in self.present():
            if peer.local and not is_alive(peer.pid):
                self._leave(peer, "died", f"process {peer.pid} of rank {peer.rank} died")
            else:
                self.send(peer.identity, Message("alive"))

    def _finished(self) -> bool:
        now = time.monotonic()
        if self._stop:
            return True
        if not self.peers:
            return now - self._started > _JOIN_WAIT_S
        if self.present():
            return False
        return len(self.peers) >= self._world_size or now - self._changed > _STRAGGLER_WAIT_S


def _private_directory() -> Path:
    """A directory of mode 0700 for sockets only this user reaches; their paths may not be longer than 107 bytes."""
    short = len(tempfile.gettempdir()) < 60
    return Path(tempfile.mkdtemp(prefix="tapscope-", dir=None if short else "/tmp"))


def main(argv: list[str] | None = None) -> int:
    """Entry point; failures to start are written where the first rank looks for them."""
    parser = argparse.ArgumentParser(prog="tapscope-recorder")
    parser.add_argument("run", type=Path)
    parser.add_argument("--options", type=json.loads, required=True)
    parser.add_argument("--lock-fd", type=int, help="held open: its lock says that this recorder lives")
    args = parser.parse_args(argv)
    recorder = Recorder(args.run, args.options)
    try:
        recorder.listen(args.options.get("control"))
        recorder.announce()
        recorder.run()
    except TapscopeError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        recorder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
