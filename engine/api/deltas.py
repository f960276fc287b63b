"""Deltas: increments of a parsed model output, in order of generation, which each API converts to its own events."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """An increment of the reasoning text."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """An increment of the answer text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a tool call; :class:`ToolCallArguments` with the same index follow."""

    index: int
    """Index of the call in the response, from 0."""
    name: str
    id: str = ""
    """Call id that the model generated or that its chat template requires; empty: the API creates one."""


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """An increment of a call's arguments: JSON text as the model generated it."""

    index: int
    text: str


Delta = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments
