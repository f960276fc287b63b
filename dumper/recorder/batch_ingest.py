"""Intake: what ranks send to be written."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapscope.core.errors import RunExistsError
from tapscope.core.wire import Message
from tapscope.dumper.recorder.rank_connection import Peer
from tapscope.run_format.directory import clear_run, create_run
from tapscope.run_format.manifest import rank_dir
from tapscope.run_format.writer import RankWriter

if TYPE_CHECKING:
    from tapscope.dumper.recorder.recorder import Recorder


class Intake:
    """Writes batches to disk, publishes their lines, and lets ranks go on in another run."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self._num_published = 0

    def writer(self, run: Path, rank: int) -> RankWriter:
        """The one writer of a rank; raises as :class:`RankWriter` does."""
        options = self._recorder.options
        fsync = options.get("fsync", "never")
        return RankWriter(run, rank, segment_bytes=int(options["segment_bytes"]), fsync=fsync)

    def batch(self, peer: Peer, message: Message) -> None:
        """Write it and publish it; a rank whose batch cannot be written leaves."""
        recorder = self._recorder
        blob = bytes(message.frames[0])
        lines = blob.split(b"\n") if blob else []
        payloads = peer.payloads(message)
        started = time.monotonic()
        try:
            written = peer.writer.batch(lines, payloads, message["shared"], message["sharing_step"])
        except OSError as error:
            farewell = Message("failing", {"reason": f"the recorder cannot write {recorder.path}: {error}"})
            recorder.roll.leave(peer, "disk", f"writing failed: {error}", farewell)
            return
        peer.write_s += time.monotonic() - started
        peer.capture_left = message.fields.get("capture_left")
        recorder.floor.wrote(sum(payload[-1].nbytes for payload in payloads))
        self._num_published += 1
        content = {"rank": peer.rank, "n": self._num_published}
        recorder.doors.publish(Message("live", content, [b"\n".join(written)]))

    def reopen(self, peer: Peer, message: Message) -> None:
        """A rank goes on in another run: one that all ranks agreed on, or with a ``manifest`` one of its own choice."""
        run, manifest = Path(message["run"]), message.fields.get("manifest")
        if manifest is not None:
            problem = self._open_run(run, manifest, peer.rank)
            self._recorder.tell(peer, Message("reopened", {"problem": problem}))
            if problem is not None:
                return
            peer.opening = message.fields.get("opening", peer.opening)
        peer.writer.event("close", reason="reset", **message["absent"])
        peer.writer.close()
        peer.turn_to(self.writer(run, peer.rank))
        peer.writer.event("open", **peer.opening)

    def _open_run(self, run: Path, manifest: dict[str, Any], rank: int) -> str | None:
        """Make a run that a rank asks for, unless another rank has done so; why not, or None."""
        changes = self._recorder.steering.changes
        if run == changes.run_path and run != self._recorder.path and not rank_dir(run, rank).exists():
            return None
        try:
            clear_run(run, force=False)
            create_run(run, manifest)
        except RunExistsError as error:
            return str(error)
        except OSError as error:
            return f"{run} cannot be created: {error.strerror}"
        self._recorder.adopt(run)
        changes.run_path = run
        return None
