"""Messages: how workers hand results to the screen; late ones are dropped by the handler."""

from dataclasses import dataclass

from textual.message import Message

from tapscope.dashboard.digest import Digest
from tapscope.dashboard.sources import Counts, Query, RunSource
from tapscope.errors import TapscopeError
from tapscope.record import Record


@dataclass
class SourceOpened(Message):
    """The run's index has been read."""

    source: RunSource


@dataclass
class OpenFailed(Message):
    """The run cannot be read at all."""

    error: TapscopeError


@dataclass
class RecordsReady(Message):
    """The answer to a query."""

    query: Query
    records: list[Record]


@dataclass
class CountsReady(Message):
    """The marks of the tree for one step and rank."""

    step: int
    rank: int
    counts: dict[str, Counts]


@dataclass
class DigestReady(Message):
    """A tensor has been read."""

    record: Record
    digest: Digest


@dataclass
class DigestFailed(Message):
    """A tensor cannot be read."""

    record: Record
    error: TapscopeError
