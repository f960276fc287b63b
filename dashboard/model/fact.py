"""Fact: one labelled sentence of a view."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """A label and what it says."""

    label: str
    text: str
