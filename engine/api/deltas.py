"""Deltas: the pieces of a model's output in the order of generation; each API turns them into its own events."""

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
    """The model calls a tool; its arguments follow."""

    index: int
    """Calls of one answer are counted from 0."""
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments, as the model wrote it."""

    index: int
    text: str


Delta = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments
