"""Messages between ranks, recorder and control: a JSON header frame and raw payload frames; no pickle.

The transport (ZMQ) handles only frames; this module converts messages to frames and back::

    frame 0   {"tapscope": 1, "kind": "batch", ...}
    frame 1.. raw bytes
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tapscope.core.errors import RecorderError

VERSION = 1
"""Protocol version; both ends must use the same version, and a mismatch is an error that names both versions."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message; ``fields`` are sent as JSON, ``frames`` as raw bytes."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    frames: Sequence[Any] = ()

    def __getitem__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise RecorderError(f"a {self.kind!r} message lacks the field {name!r}") from None


def encode(message: Message) -> list[Any]:
    """Return the frames to send for ``message``."""
    header = {"tapscope": VERSION, "kind": message.kind, **message.fields}
    return [json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode(), *message.frames]


def decode(frames: Sequence[Any]) -> Message:
    """Return the message in ``frames``; raises RecorderError for invalid bytes or another version."""
    try:
        header = json.loads(bytes(frames[0]))
        version, kind = header.pop("tapscope"), header.pop("kind")
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, RecursionError):
        raise RecorderError("received bytes that are not a tapscope message") from None
    if version != VERSION:
        raise RecorderError(f"a peer speaks wire version {version}; this tapscope speaks {VERSION}")
    if not isinstance(kind, str):
        raise RecorderError("received a message whose kind is not a string")
    return Message(kind, header, tuple(frames[1:]))
