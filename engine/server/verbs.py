"""Verbs: what a client may ask of the engine between two steps, beside requests. Values in and out are JSON's."""

from collections.abc import Callable
from typing import Any

from tapscope.engine.engine import Engine


def state(engine: Engine) -> dict[str, Any]:
    """Settings and load."""
    return engine.state()


VERBS: dict[str, Callable[..., dict[str, Any]]] = {"state": state}
