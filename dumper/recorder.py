"""The recorder: a process without torch that writes what the ranks of one job send, and steers them.

    python -m tapscope.dumper.recorder RUN [--lock-fd N] <OPTIONS.json

Options come on standard input: they may hold a token, and arguments can be seen by everyone. Ranks talk to its ROUTER
socket (batches, answers), control clients too (requests); record lines also go out on a PUB socket, lossy and
numbered, for live views.
"""

import argparse
import contextlib
import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import zmq

from tapscope import wire
from tapscope.directory import RECORDER_FILE, RECORDER_LOG, clear_run, create_run
from tapscope.dumper.floor import Floor
from tapscope.dumper.network import NetworkDoor, write_private
from tapscope.dumper.peer import Peer
from tapscope.dumper.process import is_alive
from tapscope.dumper.ring import RingError, RingView
from tapscope.dumper.steering import Steering
from tapscope.errors import ConfigError, RecorderError, RunExistsError, TapscopeError
from tapscope.wire import Message
from tapscope.writer import RankWriter

_BEAT_S = 0.5
_JOIN_WAIT_S = 60.0  # for the first rank
_STRAGGLER_WAIT_S = 10.0  # for the rest of the world once those that came have left
_REMOTE_SILENCE_S = 30.0  # a rank on another host that says nothing for so long has left
_OPEN_FILES = 65536
_MAX_BURST = 64  # messages taken in a row before the heart beats


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
        self._network: NetworkDoor | None = None
        self._homes: list[Path] = []  # runs that say how to reach this process
        self.steering = Steering(self)
        self._floor = Floor(self)
        self.http: str | None = None
        self._server: Any = None
        self._announced = 0
        self.world_size = 1
        self._started = time.monotonic()
        self.changed = self._started
        """When a rank last came or left."""
        self._stop = False

    def listen(self) -> None:
        """Open the doors the options ask for: HTTP control, and the network; raises ConfigError or ListenError."""
        if (where := self.options.get("network")) is not None:
            self._network = NetworkDoor(self._router, where)
        if (control := self.options.get("control")) is None:
            return
        from tapscope.dumper.client import ControlClient
        from tapscope.dumper.control import ControlServer, make_app
        from tapscope.dumper.guard import Guard, bind, parse_address

        if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
            needed = " and ".join(missing)
            raise ConfigError(
                f"control={control!r}: needs {needed}; install tapscope[capture], or use tapscope ctl RUN"
            )
        host, port = parse_address(control)
        guard = Guard.of(host, self.options.get("control_token"))
        bound = bind(host, port)
        host, port = bound.getsockname()[:2]
        self.http = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._server = ControlServer(make_app(ControlClient(self.address), guard), bound)
        self._server.start()

    def announce(self) -> None:
        """Say in RUN how to reach this process; only this user can read it, it may hold the key of the network."""
        self._announce_in(self.path)

    def adopt(self, path: Path) -> None:
        """Take a run that a reset opened: nobody else may, and its directory too says how to reach this process."""
        try:
            lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
            self._announce_in(path)
        except OSError as error:
            self._log(f"{path} is not marked as being recorded: {error}")

    def _announce_in(self, path: Path) -> None:
        self._homes.append(path)
        content = {"pid": os.getpid(), "host": socket.gethostname(), "wire": wire.VERSION, "http": self.http}
        content |= {"address": self.address, "live": self.live_address}
        content["network"] = self._network.described() if self._network else None
        write_private(path / RECORDER_FILE, json.dumps(content))

    def run(self) -> None:
        """Serve until every rank has left, or SIGTERM."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_stop", True))
        beat = time.monotonic()
        while not self._finished():
            if self._router.poll(timeout=int(_BEAT_S * 500)):
                self._receive_burst()
            self.steering.changes.advance()
            if time.monotonic() - beat > _BEAT_S:
                beat = time.monotonic()
                self._heartbeat()

    def close(self) -> None:
        """Seal everything and leave no trace but the run."""
        for path in self._homes:  # first: nobody shall join any more
            with contextlib.suppress(OSError):
                (path / RECORDER_FILE).unlink(missing_ok=True)
        for peer in self.peers.values():
            if peer.gone is None:
                self._leave(peer, "stopped", "the recorder was stopped")
        self.steering.changes.end()
        self._router.close()  # before the control server ends: what it still asks is then answered with a 503
        self._live.close()
        if self._network is not None:
            self._network.close()
        shutil.rmtree(self._home, ignore_errors=True)
        if self._server is not None:
            self._server.stop()
        with contextlib.suppress(OSError):  # the disk may be full, or the directory gone
            sys.stderr.flush()
            log = self.path / RECORDER_LOG
            if log.is_file() and not log.stat().st_size:
                log.unlink()

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
                self._log(traceback.format_exc())
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
        peer.hear(message)
        if message.kind == "batch":
            self._batch(peer, message)
        elif message.kind == "reopen":
            self._reopen(peer, message)
        elif message.kind == "modules":
            self.steering.add_modules(message["modules"])
        elif message.kind == "close":
            self._leave(peer, "closed")
            self.send(identity, Message("closed"))
        elif message.kind != "at":
            self.steering.changes.from_rank(peer, message)

    def _hello(self, identity: bytes, message: Message) -> None:
        rank = int(message["rank"])
        if (refusal := self._refuses(rank)) is not None:
            self.send(identity, refusal)
            return
        opening = {"rank": rank, **message["opening"]}
        try:
            if not self.peers:
                create_run(self.path, message["manifest"])
            writer = self._open_writer(rank, opening)
        except OSError as error:
            text = f"the recorder cannot write {self.path}: {error.strerror}; make room there or choose another run"
            raise RecorderError(text) from None
        local = message["opening"]["host"] == socket.gethostname()
        peer = Peer(identity, rank, int(message["opening"]["pid"]), local, opening, writer)
        peer.ring = self._map_ring(message) if local else None
        self.peers[rank] = self._by_identity[identity] = peer
        self.world_size = int(message["opening"]["world_size"])
        self.changed = time.monotonic()
        peer.unmatched = dict(message.fields.get("unmatched") or {})
        in_force = self.steering.welcome(message)
        self.send(identity, Message("welcome", {**in_force, "http": self.http, "ring": peer.ring is not None}))

    def _map_ring(self, hello: Message) -> RingView | None:
        described = hello.fields.get("ring")
        try:
            return RingView(str(described["path"]), int(described["nbytes"])) if described else None
        except (RingError, KeyError, TypeError, ValueError) as error:
            self._log(f"payloads will come inside messages: {error}")
            return None

    def _open_writer(self, rank: int, opening: dict[str, Any]) -> RankWriter:
        writer = self._writer(self.steering.changes.run_path, rank)
        try:
            writer.event("open", **opening)
        except OSError:
            writer.close()
            raise
        return writer

    def _writer(self, path: Path, rank: int) -> RankWriter:
        fsync = self.options.get("fsync", "never")
        return RankWriter(path, rank, segment_bytes=int(self.options["segment_bytes"]), fsync=fsync)

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
        if self.steering.changes.busy:
            return Message("refused", {"reason": "a change of configuration is under way", "retry": True})
        return None

    def _batch(self, peer: Peer, message: Message) -> None:
        blob = bytes(message.frames[0])
        lines = blob.split(b"\n") if blob else []
        payloads = peer.payloads(message)
        started = time.monotonic()
        try:
            written = peer.writer.batch(lines, payloads, message["shared"], message["sharing_step"])
        except OSError as error:
            self._leave(peer, "disk", f"writing failed: {error}")
            self.send(peer.identity, Message("failing", {"reason": f"the recorder cannot write {self.path}: {error}"}))
            return
        peer.write_s += time.monotonic() - started
        peer.capture_left = message.fields.get("capture_left")
        self.send(peer.identity, Message("ack", {"n": message["n"]}))
        self._floor.wrote(sum(payload[-1].nbytes for payload in payloads))
        self._announced += 1
        live = Message("live", {"rank": peer.rank, "n": self._announced}, [b"\n".join(written)])
        self._live.send_multipart([b"live", *wire.encode(live)])

    def _reopen(self, peer: Peer, message: Message) -> None:
        """A rank goes on in another run: one that all ranks agreed on, or with a ``manifest`` one of its own choice."""
        path, manifest = Path(message["run"]), message.fields.get("manifest")
        if manifest is not None:
            problem = self._open_run(path, manifest)
            self.send(peer.identity, Message("reopened", {"problem": problem}))
            if problem is not None:
                return
            peer.opening = message.fields.get("opening", peer.opening)
        peer.writer.event("close", reason="reset", never_fired=message.fields.get("never_fired", []))
        peer.writer.close()
        peer.turn_to(self._writer(path, peer.rank))
        peer.writer.event("open", **peer.opening)

    def _open_run(self, path: Path, manifest: dict[str, Any]) -> str | None:
        """Make a run that a rank asks for, unless another rank has done so; why not, or None."""
        changes = self.steering.changes
        if path == changes.run_path and path != self.path:
            return None
        try:
            clear_run(path, force=False)
            create_run(path, manifest)
        except RunExistsError as error:
            return str(error)
        except OSError as error:
            return f"{path} cannot be created: {error.strerror}"
        self.adopt(path)
        changes.run_path = path
        return None

    def _leave(self, peer: Peer, why: str, reason: str = "") -> None:
        peer.gone = why
        self.changed = time.monotonic()
        try:
            with contextlib.closing(peer.writer):  # sealed as far as it goes, also where the line does not fit any more
                if why != "closed":  # a rank that closes has sent its own close line
                    peer.writer.event("lost", reason=reason)
        except OSError as error:
            self._log(f"rank {peer.rank}: sealing failed: {error}")
        self.steering.changes.rank_left(peer)

    def _heartbeat(self) -> None:
        for peer in self.present():
            if peer.local and not is_alive(peer.pid):
                self._leave(peer, "died", f"process {peer.pid} of rank {peer.rank} died")
            elif not peer.local and time.monotonic() - peer.heard > _REMOTE_SILENCE_S:
                reason = f"rank {peer.rank} on {peer.opening['host']} has said nothing for {_REMOTE_SILENCE_S:g} s"
                self._leave(peer, "silent", reason)
                self.send(peer.identity, Message("failing", {"reason": reason}))
            else:
                self.send(peer.identity, Message("alive"))

    def _log(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the log lies beside the run, where the disk may be full
            print(text, file=sys.stderr, flush=True)

    def _finished(self) -> bool:
        now = time.monotonic()
        if self._stop:
            return True
        if not self.peers:
            return now - self._started > _JOIN_WAIT_S
        if self.present():
            return False
        return len(self.peers) >= self.world_size or now - self.changed > _STRAGGLER_WAIT_S


def _private_directory() -> Path:
    """A directory of mode 0700 for sockets only this user reaches; their paths may not be longer than 107 bytes."""
    short = len(tempfile.gettempdir()) < 60
    return Path(tempfile.mkdtemp(prefix="tapscope-", dir=None if short else "/tmp"))


def _allow_many_files() -> None:
    """As many open files as there may be: connections that somebody leaves open must not keep segments from opening."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(argv: list[str] | None = None) -> int:
    """Entry point; failures to start are written where the first rank looks for them."""
    parser = argparse.ArgumentParser(prog="tapscope-recorder")
    parser.add_argument("run", type=Path)
    parser.add_argument("--lock-fd", type=int, help="held open: its lock says that this recorder lives")
    args = parser.parse_args(argv)
    _allow_many_files()
    recorder = Recorder(args.run, json.load(sys.stdin))
    try:
        recorder.listen()
        recorder.announce()
        recorder.run()
    except TapscopeError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        text = f"the recorder cannot write {args.run}: {error.strerror}; make room there or choose another run"
        with contextlib.suppress(OSError):
            print(json.dumps({"error": "RecorderError", "message": text}), file=sys.stderr, flush=True)
        return RecorderError.exit_code
    finally:
        recorder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
