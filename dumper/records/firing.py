"""Stamp: which firing a value belongs to, and the line that says so."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tapscope.dumper.steps.open_step import OpenStep
from tapscope.run_format.record import FORWARD, Key, tensor_name

if TYPE_CHECKING:
    from tapscope.dumper.records.site_port import SitePort

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


class Firing(NamedTuple):
    """One firing of a site."""

    step: OpenStep
    """The step it belongs to; a gradient's is that of its forward."""
    occurrence: int
    micro: int = 0
    pass_: str = FORWARD
    tags: Mapping[str, Any] | None = None

    def key(self, port: "SitePort", rank: int = 0) -> Key:
        """The record's identity."""
        step = self.step.info.step
        return Key(port.site, step, rank, self.occurrence, self.micro, self.pass_, port.model)

    def tensor_name(self, port: "SitePort") -> str:
        """The name of the record's payload in its segment."""
        step, occurrence, micro, pass_, _ = self
        return tensor_name(port.site, step.info.step, occurrence, micro, pass_, port.model)


def record_line(seq: int, port: "SitePort", firing: Firing, layout: str, content: bytes) -> bytes:
    """The ``record`` line of run-format.md, without its entry: as :func:`.record.encode`, but faster.

    ``layout`` are the members from ``dtype`` to ``cap`` (with a comma before each), ``content`` those from ``value`` to
    ``stats``.
    """
    step, occurrence, micro, pass_, tags = firing
    text = f'{{"type":"record","seq":{seq},"site":{port.site_text},"step":{step.info.step}'
    if occurrence or micro or tags or pass_ is not FORWARD:
        text += _unusual(firing)
        layout += f',"tags":{_encode(tags)}' if tags else ""
    return b"%b,%b}" % (f"{text}{port.model_text}{layout}".encode(), content)


def _unusual(firing: Firing) -> str:
    """The line's members from ``occurrence`` to ``pass``; what is at its default is left out."""
    text = f',"occurrence":{firing.occurrence}' if firing.occurrence else ""
    if firing.micro:
        text += f',"micro":{firing.micro}'
    return text if firing.pass_ == FORWARD else f'{text},"pass":"{firing.pass_}"'


def json_text(value: Any) -> str:
    """The JSON text of a value."""
    return _encode(value)
