"""RankConnection: the recorder's state for one rank."""

import time
from dataclasses import dataclass, field
from typing import Any

from tapscope.core.errors import RecorderError
from tapscope.core.wire import Message
from tapscope.dumper.transport.packed_rows import ReceivedTables, Unpacked
from tapscope.dumper.transport.reliable_channel import ReceivedMessages, SentMessages
from tapscope.dumper.transport.shm_ring import ShmRingView
from tapscope.run_format.writer import RankWriter

SILENT_S = 3.0
"""Time in seconds without a message after which the status is ``silent``; ranks answer a heartbeat every 0.5 s."""


@dataclass(slots=True)
class RankConnection:
    """Connection to one rank, with its writer and last reported state."""

    identity: bytes
    """ZeroMQ identity."""
    rank: int
    pid: int
    local: bool
    """Whether the rank runs on the recorder's host."""
    open_fields: dict[str, Any]
    """Fields of the rank's ``open`` event."""
    writer: RankWriter
    ring: ShmRingView | None = None
    """Shared memory with the rank's payloads; None if payloads are sent inside messages."""
    step: int = -1
    epoch: int = 0
    """Newest epoch that the rank has applied."""
    capture_steps_left: int | None = None
    """Remaining steps of a running capture; None without one."""
    stopped: str | None = None
    """Why the rank stopped capturing (trigger, budget); None while it captures."""
    left: str | None = None
    """Why the rank left: ``closed``, ``died``, ``silent``, ``disk`` or ``stopped``; None while connected."""
    last_received: float = field(default_factory=time.monotonic)
    """Time of the last message."""
    last_progress: float = field(default_factory=time.monotonic)
    """Time at which the step last advanced."""
    load: dict[str, Any] = field(default_factory=dict)
    """Counters reported by the rank: ``queue_bytes``, ``shm_bytes``, ``shm_bytes_used``, ``dropped``, ``failed``."""
    num_divergences: int = 0
    """Number of steps that diverged from the reference run."""
    divergence: dict[str, Any] | None = None
    """First divergence from the reference run, plus ``last_step``, the last step that diverged."""
    call_counts: dict[str, int] = field(default_factory=dict)
    """Name of a method that all ranks must call -> number of calls by this rank."""
    last_call: float = field(default_factory=time.monotonic)
    """Time of the last call counted in ``call_counts``."""
    unmatched: dict[str, str] = field(default_factory=dict)
    """Rule of the rank's initial configuration that matches no site of its model -> explanation."""
    written_before: tuple[int, int] = (0, 0)
    """Number of records and bytes written into earlier runs, before a reset."""
    write_s: float = 0.0
    """Time in seconds spent writing the rank's batches."""
    received: ReceivedMessages = field(default_factory=ReceivedMessages)
    sent: SentMessages[Message] = field(default_factory=SentMessages)
    tables: ReceivedTables = field(default_factory=ReceivedTables)
    close_message: Message | None = None
    """Reply to any message that the rank sends after it left."""

    def note_message(self, message: Message) -> None:
        """Update liveness, step and load from any message of the rank."""
        self.last_received = time.monotonic()
        step = int(message.fields.get("current_step", self.step))
        if step > self.step:
            self.last_progress = self.last_received
        self.step = step
        self.load = message.fields.get("load", self.load)

    def payloads(self, message: Message) -> list[tuple[int, int, str, str, list[int], memoryview]]:
        """Return (line, number, name, dtype, shape, bytes) of every payload of a batch, from the ring or a frame.

        Raises RecorderError if a payload refers to the ring and none is mapped.
        """
        frames = iter(message.frames[1:])
        items = []
        for line, number, name, dtype, shape, offset, nbytes in message["payloads"]:
            if offset < 0:
                data = next(frames).buffer
            elif self.ring is not None:
                data = self.ring.view(offset, nbytes)
            else:
                raise RecorderError(
                    f"rank {self.rank} refers to shared memory, but the recorder has mapped none for it"
                )
            items.append((line, number, name, dtype, shape, data))
        return items

    def unpacked(self, message: Message) -> Unpacked:
        """Return the lines and payloads of a batch, with blocks of packed rows expanded."""
        blob = bytes(message.frames[0])
        batch = Unpacked(blob.split(b"\n") if blob else [], self.payloads(message), message["shared"])
        if "blocks" not in message.fields:
            return batch
        expanded = self.tables.unpack(message.fields, batch.lines, batch.payloads)
        return expanded._replace(shared=[*batch.shared, *expanded.shared])

    def switch_writer(self, writer: RankWriter) -> None:
        """Use ``writer``, which belongs to another run, for all further batches."""
        self.writer, self.written_before = writer, self.written

    @property
    def written(self) -> tuple[int, int]:
        """Number of records and bytes written into all runs."""
        records, nbytes = self.written_before
        return records + self.writer.records_written, nbytes + self.writer.bytes_written

    @property
    def status(self) -> str:
        """``connected``, ``silent``, or the reason why the rank left."""
        if self.left is not None:
            return self.left
        return "silent" if time.monotonic() - self.last_received > SILENT_S else "connected"
