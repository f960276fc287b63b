"""BatchIngest: write the batches of the ranks to disk and publish their lines."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapscope.core.errors import RecorderError
from tapscope.core.wire import Message
from tapscope.dumper.recorder.rank_connection import RankConnection
from tapscope.run_format.writer import RankWriter


class BatchIngest:
    """Writes batches with one :class:`RankWriter` per rank, and publishes the lines, numbered, to live views."""

    def __init__(self, options: dict[str, Any], publish: Callable[[Message], None]) -> None:
        """``options`` are the options of the recorder; uses ``segment_bytes`` and ``fsync``."""
        self._segment_bytes = int(options["segment_bytes"])
        self._fsync = options.get("fsync", "never")
        self._publish = publish
        self._num_published = 0

    def open_writer(self, run: Path, rank: int, open_fields: dict[str, Any]) -> RankWriter:
        """Open the exclusive writer of a rank in ``run`` and write its ``open`` event; raises RecorderError."""
        try:
            writer = RankWriter(run, rank, segment_bytes=self._segment_bytes, fsync=self._fsync)
            try:
                writer.event("open", **open_fields)
            except OSError:
                writer.close()
                raise
        except OSError as error:
            raise RecorderError(cannot_write(run, error)) from None
        return writer

    def write(self, rank: RankConnection, message: Message) -> int:
        """Write a batch and publish its lines; return the payload bytes. Raises OSError if writing fails."""
        lines, payloads, shared, packed = rank.unpacked(message)
        started = time.monotonic()
        written = rank.writer.batch(lines, payloads, shared, message["sharing_step"], packed)
        rank.write_s += time.monotonic() - started
        rank.capture_steps_left = message.fields.get("capture_steps_left")
        self._num_published += 1
        content = {"rank": rank.rank, "n": self._num_published}
        self._publish(Message("live", content, [b"\n".join(written)]))
        contents = [*(each[-1] for each in payloads), *(each.data for each in packed)]
        return sum(memoryview(content).nbytes for content in contents)

    def switch_run(self, rank: RankConnection, run: Path, absent: dict[str, Any]) -> None:
        """Close the rank's writer and open one in ``run``; ``absent`` are fields of the close event on missing data."""
        rank.writer.event("close", reason="reset", **absent)
        rank.writer.close()
        rank.switch_writer(self.open_writer(run, rank.rank, rank.open_fields))


def cannot_write(run: Path, error: OSError) -> str:
    """Return the error message for a run that cannot be written."""
    return f"the recorder cannot write {run}: {error.strerror}; free disk space or choose another run"
