"""Labeled line of text in a view."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """Label and text."""

    label: str
    text: str
