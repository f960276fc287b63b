"""Peer: one rank's connection, as the recorder sees it."""

import time
from dataclasses import dataclass, field
from typing import Any

from tapscope.core.errors import RecorderError
from tapscope.core.wire import Message
from tapscope.dumper.transport.reliable_channel import ReceivedMessages, SentMessages
from tapscope.dumper.transport.shm_ring import ShmRingView
from tapscope.run_format.writer import RankWriter

SILENT_S = 3.0
"""A rank answers a heartbeat every half second; one that has not for so long is called silent."""


@dataclass(slots=True)
class Peer:
    """One rank's connection."""

    identity: bytes
    rank: int
    pid: int
    local: bool
    opening: dict[str, Any]
    writer: RankWriter
    ring: ShmRingView | None = None
    """Shared memory through which its payloads come; None when they come inside messages."""
    step: int = -1
    epoch: int = 0
    capture_left: int | None = None
    stopped: str | None = None
    """Why it has stopped capturing (a trigger, a budget); None while it goes on."""
    gone: str | None = None
    """Why it left: ``closed``, ``died``, ``silent``, ``disk`` or ``stopped``; None while it is there."""
    heard: float = field(default_factory=time.monotonic)
    """When it last said anything."""
    moved: float = field(default_factory=time.monotonic)
    """When its step last grew."""
    load: dict[str, Any] = field(default_factory=dict)
    """What it says of itself: ``queue_bytes``, ``ring_bytes``, ``ring_bytes_used``, ``dropped``, ``failed``."""
    calls: dict[str, int] = field(default_factory=dict)
    """How often its own process called a method that all ranks must call, by the method's name."""
    unmatched: dict[str, str] = field(default_factory=dict)
    """Rules of its first configuration that match no site of its model, each with a sentence."""
    called: float = field(default_factory=time.monotonic)
    """When it last did."""
    written_before: tuple[int, int] = (0, 0)
    """Lines and bytes it wrote into runs that a reset has ended."""
    write_s: float = 0.0
    """Seconds spent in writing what it sent."""
    received: ReceivedMessages = field(default_factory=ReceivedMessages)
    """How far its messages have come."""
    sent: SentMessages[Message] = field(default_factory=SentMessages)
    """What it was told and may not have heard."""
    farewell: Message | None = None
    """What it is told when it speaks though it has left."""

    def hear(self, message: Message) -> None:
        """It said something; most messages tell its step."""
        self.heard = time.monotonic()
        step = int(message.fields.get("at", self.step))
        if step > self.step:
            self.moved = self.heard
        self.step = step
        self.load = message.fields.get("load", self.load)

    def payloads(self, message: Message) -> list[tuple[int, int, str, str, list[int], memoryview]]:
        """(line, number, name, dtype, shape, bytes) of every payload of a batch, in the ring or in its own frame."""
        frames = iter(message.frames[1:])
        found = []
        for line, number, name, dtype, shape, offset, nbytes in message["payloads"]:
            if offset < 0:
                data = next(frames).buffer
            elif self.ring is not None:
                data = self.ring.view(offset, nbytes)
            else:
                raise RecorderError(f"rank {self.rank} names a place in a ring that it does not have")
            found.append((line, number, name, dtype, shape, data))
        return found

    def turn_to(self, writer: RankWriter) -> None:
        """It goes on in another run."""
        lines, nbytes = self.written
        self.writer, self.written_before = writer, (lines, nbytes)

    @property
    def written(self) -> tuple[int, int]:
        """Lines and bytes it wrote into all runs."""
        lines, nbytes = self.written_before
        return lines + self.writer.lines_written, nbytes + self.writer.bytes_written

    @property
    def status(self) -> str:
        """One word for people: ``connected``, ``silent``, or why it left."""
        if self.gone is not None:
            return self.gone
        return "silent" if time.monotonic() - self.heard > SILENT_S else "connected"
