"""The recorder: a process without torch that writes the records of all ranks of a job and controls their capture.

    python -m tapscope.dumper.recorder RUN [--lock-fd N] <OPTIONS.json

Options are read from standard input because they may contain a token, and command lines are visible to all users. Ranks
(batches, answers) and control clients (requests) connect to a ROUTER socket. Record lines are also published on a PUB
socket for live views; this feed is numbered and may lose messages.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tapscope.core import wire
from tapscope.core.errors import RecorderError, RunExistsError, TapscopeError
from tapscope.core.wire import Message
from tapscope.dumper.recorder.batch_ingest import BatchIngest, cannot_write
from tapscope.dumper.recorder.config_change import ConfigChange
from tapscope.dumper.recorder.control_handler import ControlHandler
from tapscope.dumper.recorder.disk_space_guard import DiskSpaceGuard, free_bytes
from tapscope.dumper.recorder.endpoints import Endpoints, RecorderFile
from tapscope.dumper.recorder.rank_connection import RankConnection
from tapscope.dumper.recorder.rank_registry import RankRegistry
from tapscope.dumper.transport.packed_rows import can_unpack
from tapscope.dumper.transport.shm_ring import ShmRingError, ShmRingView
from tapscope.run_format.directory import RECORDER_LOG, clear_run, create_run
from tapscope.run_format.manifest import rank_dir

_HEARTBEAT_S = 0.5
_OPEN_FILES = 65536
_NICE = 10  # niceness while writing record indexes
_GRACE_S = 30.0  # after SIGTERM: time for the ranks to finish, as the signal often goes to the whole job
_MAX_BURST = 64  # maximum number of messages handled before the next heartbeat check


class Recorder:
    """Event loop of the recorder: receives messages and dispatches them to components.

    Components receive callbacks and have no reference to the recorder.
    """

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path = path
        self._options = options
        self._endpoints = endpoints = Endpoints()
        self._recorder_file = RecorderFile(endpoints)
        self._ranks = RankRegistry(endpoints.send, self.log)
        self._ingest = BatchIngest(options, endpoints.publish)
        self._change = ConfigChange(
            path, self._ranks, reply=self._reply, adopt=self._adopt, resumed=lambda: self._disk.check()
        )
        self._disk = DiskSpaceGuard(
            self._ranks, lambda: (self._change.run, self._change.config.get("min_free_bytes")), endpoints.send
        )
        self._control = ControlHandler(path, self._ranks, self._change, reply=self._reply, live=endpoints.live_address)
        self._num_sigterm = 0
        self._sigterm_at = 0.0

    # ---- start and end

    def open(self) -> None:
        """Start to accept connections, and publish the address in ``recorder.json``.

        Raises ConfigError or ListenError, or OSError if ``recorder.json`` cannot be written.
        """
        self._endpoints.open(self._options)
        self._recorder_file.write(self.path)

    def run(self) -> None:
        """Serve until every rank has left; after SIGTERM, wait only for connected ranks, for a limited time."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        last_heartbeat = time.monotonic()
        while not (self._ranks.is_finished or self._must_stop):
            if self._endpoints.wait(_HEARTBEAT_S / 2):
                self._receive_burst()
            self._change.advance()
            if time.monotonic() - last_heartbeat > _HEARTBEAT_S:
                last_heartbeat = time.monotonic()
                self._ranks.heartbeat(self._leave)

    def close(self) -> None:
        """Disconnect all ranks, seal their files, and remove files that are not part of the run."""
        self._recorder_file.remove()
        reason = "the recorder was stopped by a signal"
        for rank in self._ranks.present():
            self._leave(rank, "stopped", reason, Message("fatal", {"reason": reason}))
        self._change.end()
        self._endpoints.close()
        with contextlib.suppress(OSError):  # the disk may be full or the directory removed
            sys.stderr.flush()
            log = self.path / RECORDER_LOG
            if log.is_file() and not log.stat().st_size:
                log.unlink()

    def index(self) -> None:
        """Write record indexes at low priority, so that the run opens fast; no process waits for the recorder now."""
        with contextlib.suppress(OSError):
            os.nice(_NICE)
        for rank in self._ranks.ranks.values():
            rank.writer.index()

    def log(self, text: str) -> None:
        """Write a line to the recorder's log."""
        with contextlib.suppress(OSError):  # the log is in the run directory, whose disk may be full
            print(text, file=sys.stderr, flush=True)

    def _on_sigterm(self, *_: object) -> None:
        self._num_sigterm += 1
        self._sigterm_at = time.monotonic()

    @property
    def _must_stop(self) -> bool:
        """Whether SIGTERM arrived and no rank is connected, the grace period has passed, or SIGTERM arrived twice."""
        if not self._num_sigterm:
            return False
        is_late = time.monotonic() - self._sigterm_at > _GRACE_S
        return self._num_sigterm > 1 or not self._ranks.present() or is_late

    def _reply(self, identity: bytes, request: Any, status: int, body: dict[str, Any]) -> None:
        self._endpoints.send(identity, Message("reply", {"id": request, "status": status, "body": body}))

    def _adopt(self, run: Path) -> None:
        """Mark a run created by a reset as recorded by this process: lock it and write its ``recorder.json``."""
        try:
            self._recorder_file.write_locked(run)
        except OSError as error:
            self.log(f"{run} is not marked as being recorded: {error}")

    # ---- messages

    def _receive_burst(self) -> None:
        for _ in range(_MAX_BURST):
            if (received := self._endpoints.receive()) is None:
                return
            identity, frames = received
            try:
                self._handle(identity, wire.decode(frames))
            except TapscopeError as error:
                self._endpoints.send(identity, Message("refused", {"reason": str(error)}))
            except Exception as error:  # noqa: BLE001 - a bad message must not end the recording of other ranks
                self.log(traceback.format_exc())
                reason = f"{type(error).__name__}: {error}"
                self._endpoints.send(identity, Message("refused", {"reason": reason}))

    def _handle(self, identity: bytes, message: Message) -> None:
        if message.kind == "join":
            self._join(identity, message)
        elif message.kind == "request":
            self._control.request(identity, message)
        elif (rank := self._ranks.find(identity)) is None:
            raise RecorderError(f"a {message.kind!r} message came from a rank that has not joined")
        elif rank.left is None:
            self._receive(rank, message)
        elif rank.close_message is not None:
            self._endpoints.send(identity, rank.close_message)

    def _receive(self, rank: RankConnection, message: Message) -> None:
        """Handle a message of a joined rank, unless it is a duplicate or follows a lost message."""
        rank.note_message(message)
        if message.kind == "position":
            self._catch_up(rank, message)
            return
        number = int(message["n"])
        if rank.received.accept(number):
            self._handle_rank(rank, message)
        elif rank.received.is_missing(number + 1, again=False):
            self._endpoints.send(rank.identity, Message("resend", {"received": rank.received.count}))
            return
        if rank.left is None:
            self._endpoints.send(rank.identity, Message("ack", {"received": rank.received.count}))

    def _catch_up(self, rank: RankConnection, position: Message) -> None:
        """Resynchronize after a broken connection: resend messages the rank lacks, and request those missing here."""
        rank.sent.acknowledge(position["received"])
        if position["has_gap"]:
            for message in rank.sent.since(position["received"]):
                self._endpoints.send(rank.identity, message)
        if rank.received.is_missing(position["sent"], again=True):
            self._endpoints.send(rank.identity, Message("resend", {"received": rank.received.count}))

    def _handle_rank(self, rank: RankConnection, message: Message) -> None:
        if message.kind == "batch":
            self._write_batch(rank, message)
        elif message.kind == "reopen":
            self._switch_run(rank, message)
        elif message.kind == "modules":
            self._control.add_modules(message["modules"])
        elif message.kind == "close":
            self._leave(rank, "closed", "", Message("closed"))
        else:
            self._change.from_rank(rank, message)

    # ---- ranks

    def _join(self, identity: bytes, join: Message) -> None:
        """Handle the join request of a rank: reply ``joined`` or ``refused``.

        Raises RecorderError if the run or the files of the rank cannot be created.
        """
        self._ranks.note_attempt()
        fields, number, change = join["opening"], int(join["rank"]), self._change
        refusal = self._ranks.refusal(number, self.path)
        if refusal is None and change.busy:
            refusal = Message("refused", {"reason": "a change of configuration is in progress", "retry": True})
        if refusal is not None:
            self._endpoints.send(identity, refusal)
            return
        if not self._ranks.ranks:
            try:
                create_run(self.path, join["manifest"])
            except OSError as error:
                raise RecorderError(cannot_write(self.path, error)) from None
        open_fields = {"rank": number, **fields}
        writer = self._ingest.open_writer(change.run, number, open_fields)
        local = fields["host"] == socket.gethostname()
        rank = RankConnection(identity, number, int(fields["pid"]), local, open_fields, writer)
        rank.ring = self._map_ring(join) if local else None
        rank.unmatched = dict(join.fields.get("unmatched") or {})
        self._ranks.add(rank)
        content = self._control.joined(join) | {"http": self._endpoints.http, "ring": rank.ring is not None}
        content["blocks"] = can_unpack()
        self._endpoints.send(identity, Message("joined", content | {"free": free_bytes(change.run)}))
        change.rank_joined(rank)

    def _map_ring(self, join: Message) -> ShmRingView | None:
        described: dict[str, Any] | None = join.fields.get("ring")
        try:
            return ShmRingView(str(described["path"]), int(described["nbytes"])) if described else None
        except (ShmRingError, KeyError, TypeError, ValueError) as error:
            self.log(f"payloads travel inside messages: {error}")
            return None

    def _write_batch(self, rank: RankConnection, message: Message) -> None:
        """Write a batch; if that fails, disconnect the rank with the reason."""
        try:
            nbytes = self._ingest.write(rank, message)
        except OSError as error:
            close_message = Message("fatal", {"reason": f"the recorder cannot write {self.path}: {error}"})
            self._leave(rank, "disk", f"writing failed: {error}", close_message)
            return
        self._disk.wrote(nbytes)

    def _switch_run(self, rank: RankConnection, message: Message) -> None:
        """Handle ``reopen``: the rank continues in another run.

        That run was agreed on by all ranks, unless the message has a ``manifest``: then it is created on demand.
        """
        run, manifest = Path(message["run"]), message.fields.get("manifest")
        if manifest is not None:
            problem = self._create_run(run, manifest, rank.rank)
            self._ranks.send_reliably(rank, Message("reopened", {"problem": problem}))
            if problem is not None:
                return
            rank.open_fields = message.fields.get("opening", rank.open_fields)
        self._ingest.switch_run(rank, run, message["absent"])

    def _create_run(self, run: Path, manifest: dict[str, Any], rank: int) -> str | None:
        """Create a run on request of a rank, unless another rank did so already; return the error message or None."""
        change = self._change
        if run == change.run and run != self.path and not rank_dir(run, rank).exists():
            return None
        try:
            clear_run(run, force=False)
            create_run(run, manifest)
        except RunExistsError as error:
            return str(error)
        except OSError as error:
            return f"cannot create {run}: {error.strerror}"
        self._adopt(run)
        change.run = run
        return None

    def _leave(self, rank: RankConnection, why: str, reason: str, close_message: Message | None) -> None:
        """Seal the files of a rank, send it ``close_message``, and stop waiting for its answers."""
        self._ranks.remove(rank, why, reason, close_message)
        self._change.rank_left(rank)


def _allow_many_files() -> None:
    """Raise the soft limit of open files, so that idle connections cannot prevent opening segments."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(argv: list[str] | None = None) -> int:
    """Entry point; a startup failure is written as JSON to stderr, i.e. to the log that the first rank reads."""
    parser = argparse.ArgumentParser(prog="tapscope-recorder")
    parser.add_argument("run", type=Path)
    parser.add_argument("--lock-fd", type=int, help="held open: its lock shows that this recorder runs")
    args = parser.parse_args(argv)
    faulthandler.enable()  # log crashes in native libraries
    _allow_many_files()
    recorder = Recorder(args.run, json.load(sys.stdin))
    try:
        recorder.open()
        recorder.run()
    except TapscopeError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        text = cannot_write(args.run, error)
        with contextlib.suppress(OSError):
            print(json.dumps({"error": "RecorderError", "message": text}), file=sys.stderr, flush=True)
        return RecorderError.exit_code
    except Exception:  # noqa: BLE001 - log it before close() removes an empty log
        traceback.print_exc()
        return RecorderError.exit_code
    finally:
        recorder.close()
    if args.lock_fd is not None:
        os.close(args.lock_fd)  # the run is finished: release it, e.g. for a compaction
    recorder.index()
    return 0
