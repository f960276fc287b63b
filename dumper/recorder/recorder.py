"""The recorder: a process without torch that writes what the ranks of one job send, and steers them.

    python -m tapscope.dumper.recorder RUN [--lock-fd N] <OPTIONS.json

Options come on standard input: they may hold a token, and arguments can be seen by everyone. Ranks talk to its ROUTER
socket (batches, answers), control clients too (requests); record lines also go out on a PUB socket, lossy and
numbered, for live views.
"""

import argparse
import contextlib
import faulthandler
import json
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tapscope.core import wire
from tapscope.core.errors import RecorderError, TapscopeError
from tapscope.core.wire import Message
from tapscope.dumper.recorder.batch_ingest import Intake
from tapscope.dumper.recorder.control_handler import Steering
from tapscope.dumper.recorder.disk_space_guard import Floor
from tapscope.dumper.recorder.endpoints import Doors, Signpost
from tapscope.dumper.recorder.rank_connection import Peer
from tapscope.dumper.recorder.rank_registry import Roll
from tapscope.run_format.directory import RECORDER_LOG

_BEAT_S = 0.5
_OPEN_FILES = 65536
_GRACE_S = 30.0  # after SIGTERM: what ends a whole job at once leaves its ranks a while to end in
_MAX_BURST = 64  # messages taken in a row before the heart beats


class Recorder:
    """Reads messages and hands each to the part that knows what to do: roll, intake or steering."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path = path
        self.options = options
        self.doors = Doors()
        self._signpost = Signpost(self.doors)
        self.roll = Roll(self)
        self.intake = Intake(self)
        self.steering = Steering(self)
        self.floor = Floor(self)
        self._terms = 0
        self._term_at = 0.0

    def open(self) -> None:
        """Let ranks in; raises ConfigError, ListenError, or OSError where the run cannot say how to come in."""
        self.doors.open(self.options)
        self._signpost.put_up(self.path)

    def adopt(self, run: Path) -> None:
        """Take a run that a reset opened."""
        try:
            self._signpost.adopt(run)
        except OSError as error:
            self.log(f"{run} is not marked as being recorded: {error}")

    def run(self) -> None:
        """Serve until every rank has left; after SIGTERM that is all it waits for, and not for long."""
        signal.signal(signal.SIGTERM, self._on_term)
        beat = time.monotonic()
        while not (self.roll.is_finished or self._is_dismissed):
            if self.doors.wait(_BEAT_S / 2):
                self._receive_burst()
            self.steering.changes.advance()
            if time.monotonic() - beat > _BEAT_S:
                beat = time.monotonic()
                self.roll.beat()

    def _on_term(self, *_: object) -> None:
        self._terms += 1
        self._term_at = time.monotonic()

    @property
    def _is_dismissed(self) -> bool:
        """Whether SIGTERM came and nobody is there any more; or it came twice, or too long ago."""
        if not self._terms:
            return False
        return self._terms > 1 or not self.roll.present() or time.monotonic() - self._term_at > _GRACE_S

    def close(self) -> None:
        """Seal everything and leave no trace but the run."""
        self._signpost.take_down()
        self.roll.end()
        self.steering.changes.end()
        self.doors.close()
        with contextlib.suppress(OSError):  # the disk may be full, or the directory gone
            sys.stderr.flush()
            log = self.path / RECORDER_LOG
            if log.is_file() and not log.stat().st_size:
                log.unlink()

    def send(self, identity: bytes, message: Message) -> None:
        """To a rank or control client; one that is gone loses it."""
        self.doors.send(identity, message)

    def tell(self, peer: Peer, message: Message) -> None:
        """Send a rank what it must not miss."""
        message = Message(message.kind, message.fields | {"n": peer.sent.count}, message.frames)
        peer.sent.keep(message)
        self.send(peer.identity, message)

    def present(self) -> list[Peer]:
        """Ranks that are connected, in order."""
        return self.roll.present()

    def log(self, text: str) -> None:
        """Say something to whoever looks for the reason."""
        with contextlib.suppress(OSError):  # the log lies beside the run, where the disk may be full
            print(text, file=sys.stderr, flush=True)

    def _receive_burst(self) -> None:
        for _ in range(_MAX_BURST):
            if (received := self.doors.receive()) is None:
                return
            identity, frames = received
            try:
                self._handle(identity, wire.decode(frames))
            except TapscopeError as error:
                self.send(identity, Message("refused", {"reason": str(error)}))
            except Exception as error:  # noqa: BLE001 - one bad message must not end the recording of the others
                self.log(traceback.format_exc())
                self.send(identity, Message("refused", {"reason": f"{type(error).__name__}: {error}"}))

    def _handle(self, identity: bytes, message: Message) -> None:
        if message.kind == "hello":
            self.roll.hello(identity, message)
        elif message.kind == "request":
            self.steering.request(identity, message)
        elif (peer := self.roll.find(identity)) is None:
            raise RecorderError(f"a {message.kind!r} message came from a rank that did not say hello")
        elif peer.gone is None:
            self._hear(peer, message)
        elif peer.farewell is not None:
            self.send(identity, peer.farewell)

    def _hear(self, peer: Peer, message: Message) -> None:
        """A rank said something: handle it, unless it came before, or something before it is lost."""
        peer.hear(message)
        if message.kind == "at":
            self._catch_up(peer, message)
            return
        number = int(message["n"])
        if peer.received.accept(number):
            self._handle_rank(peer, message)
        elif peer.received.is_missing(number + 1, again=False):
            self.send(peer.identity, Message("resume", {"has": peer.received.count}))
            return
        if peer.gone is None:
            self.send(peer.identity, Message("ack", {"has": peer.received.count}))

    def _catch_up(self, peer: Peer, at: Message) -> None:
        """Send again what a broken connection has lost, and ask for what it lost on the other way."""
        peer.sent.acknowledge(at["has"])
        if at["is_missing"]:
            for message in peer.sent.since(at["has"]):
                self.send(peer.identity, message)
        if peer.received.is_missing(at["sent"], again=True):
            self.send(peer.identity, Message("resume", {"has": peer.received.count}))

    def _handle_rank(self, peer: Peer, message: Message) -> None:
        if message.kind == "batch":
            self.intake.batch(peer, message)
        elif message.kind == "reopen":
            self.intake.reopen(peer, message)
        elif message.kind == "modules":
            self.steering.add_modules(message["modules"])
        elif message.kind == "close":
            self.roll.leave(peer, "closed", farewell=Message("closed"))
        else:
            self.steering.changes.from_rank(peer, message)


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
    faulthandler.enable()  # what a library does wrong is in the log, too
    _allow_many_files()
    recorder = Recorder(args.run, json.load(sys.stdin))
    try:
        recorder.open()
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
