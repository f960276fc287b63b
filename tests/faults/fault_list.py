"""The list of faults: each is tried a few times by `make test` and many times by `make soak`."""

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Trial = Callable[[Path, random.Random], None]
"""Hurts something in an empty directory, and raises AssertionError unless it was survived."""


class CannotTry(Exception):
    """The fault needs something that this machine does not allow; the text says what."""


@dataclass(frozen=True)
class Fault:
    """One of them."""

    name: str
    short: int
    long: int
    trial: Trial

    def attempt(self, seed: int, place: Path) -> None:
        """Try it once; the seed decides everything that is random."""
        self.trial(place, random.Random(f"{self.name} {seed}"))


FAULTS: dict[str, Fault] = {}


def fault(name: str, short: int, long: int) -> Callable[[Trial], Trial]:
    """Put a fault on the list: how often the short and the long form try it."""

    def enlist(trial: Trial) -> Trial:
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, short, long, trial)
        return trial

    return enlist


def all_faults() -> dict[str, Fault]:
    """The whole list: each of these modules puts its own on it."""
    for module in ("kill", "disk", "load", "doors", "process", "model", "storm", "server", "engine"):
        importlib.import_module(f"faults_{module}")
    return FAULTS
