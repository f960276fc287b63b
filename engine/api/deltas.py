"""What a model's text is made of, in the order of generation; the dialects turn these into their own events."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool; its arguments follow."""

    index: int
    """Calls of one answer are counted from 0."""
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments, as the model wrote it."""

    index: int
    text: str


Delta = Thought | Said | CallBegun | CallArguments
