"""Deltas: pieces of a model's output in order of generation; each API converts them to its own events."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of a tool call; its arguments follow."""

    index: int
    """Number of the call in its response, from 0."""
    name: str
    id: str = ""
    """Identifier that the model wrote, or that its chat template requires; empty: the API makes one."""


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the JSON encoding of a call's arguments, as the model generated it."""

    index: int
    text: str


Delta = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments
