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
"""A rank answers a heartbeat every half second; after this long without a message its status is ``silent``."""


@dataclass(slots=True)
class RankConnection:
    """One rank's connection."""

    identity: bytes
    rank: int
    pid: int
    local: bool
    open_fields: dict[str, Any]
    """Fields of the ``open`` event in its journal."""
    writer: RankWriter
    ring: ShmRingView | None = None
    """Shared memory that carries its payloads; None when payloads travel inside messages."""
    step: int = -1
    epoch: int = 0
    capture_steps_left: int | None = None
    stopped: str | None = None
    """Why it stopped capturing (a trigger, a budget); None while it captures."""
    left: str | None = None
    """Why it left: ``closed``, ``died``, ``silent``, ``disk`` or ``stopped``; None while connected."""
    last_received: float = field(default_factory=time.monotonic)
    """Time of its last message."""
    last_progress: float = field(default_factory=time.monotonic)
    """Time at which its step last advanced."""
    load: dict[str, Any] = field(default_factory=dict)
    """Counters it reports: ``queue_bytes``, ``shm_bytes``, ``shm_bytes_used``, ``dropped``, ``failed``."""
    num_divergences: int = 0
    """Steps that diverged from the reference run."""
    divergence: dict[str, Any] | None = None
    """The first divergence from the reference run, and ``last_step``, the last step with one."""
    call_counts: dict[str, int] = field(default_factory=dict)
    """Method name -> how often this rank called a method that all ranks must call."""
    last_call: float = field(default_factory=time.monotonic)
    """Time of the last such call."""
    unmatched: dict[str, str] = field(default_factory=dict)
    """Rule of its first configuration that matches no site of its model -> explanation."""
    written_before: tuple[int, int] = (0, 0)
    """Records and bytes written into runs that a reset has ended."""
    write_s: float = 0.0
    """Seconds spent writing its batches."""
    received: ReceivedMessages = field(default_factory=ReceivedMessages)
    sent: SentMessages[Message] = field(default_factory=SentMessages)
    tables: ReceivedTables = field(default_factory=ReceivedTables)
    close_message: Message | None = None
    """The answer to any message it sends after it has left."""

    def note_message(self, message: Message) -> None:
        """Update liveness, step and load; most messages carry the rank's current step."""
        self.last_received = time.monotonic()
        step = int(message.fields.get("current_step", self.step))
        if step > self.step:
            self.last_progress = self.last_received
        self.step = step
        self.load = message.fields.get("load", self.load)

    def payloads(self, message: Message) -> list[tuple[int, int, str, str, list[int], memoryview]]:
        """(line, number, name, dtype, shape, bytes) of every payload of a batch, from the ring or its own frame.

        Raises RecorderError for a payload in a ring that is not mapped.
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
        """Lines and payloads of a batch."""
        blob = bytes(message.frames[0])
        found = Unpacked(blob.split(b"\n") if blob else [], self.payloads(message), message["shared"])
        if "blocks" not in message.fields:
            return found
        blocks = self.tables.unpack(message.fields, found.lines, found.payloads)
        return blocks._replace(shared=[*found.shared, *blocks.shared])

    def switch_writer(self, writer: RankWriter) -> None:
        """Write into another run from now on."""
        self.writer, self.written_before = writer, self.written

    @property
    def written(self) -> tuple[int, int]:
        """Records and bytes written into all runs."""
        records, nbytes = self.written_before
        return records + self.writer.records_written, nbytes + self.writer.bytes_written

    @property
    def status(self) -> str:
        """``connected``, ``silent``, or why it left."""
        if self.left is not None:
            return self.left
        return "silent" if time.monotonic() - self.last_received > SILENT_S else "connected"
