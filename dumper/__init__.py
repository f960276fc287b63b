"""Taps on a running model, and the recorder they stream to."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapscope.dumper.config import DumperConfig, Rule
    from tapscope.dumper.dumper import Dumper, attach

_EXPORTS = {"Dumper": ".dumper", "attach": ".dumper", "DumperConfig": ".config", "Rule": ".rule"}

__all__ = ["Dumper", "DumperConfig", "Rule", "attach"]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: the recorder imports this package and must hold no torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'tapscope.dumper' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name], __name__), name)
    globals()[name] = value
    return value
