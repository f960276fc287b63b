"""The dumper: taps on running models, explicit ``dump()`` calls, and the recorder process that writes their records.

The package exposes the process-wide dumper: ``from tapscope import dumper; dumper.dump("q", q, layer_id=3)``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapscope.dumper.api import (
        attach,
        capture_output,
        close,
        configure,
        configure_default,
        ctx,
        dump,
        dump_dict,
        dump_model,
        get_state,
        may_enable,
        metric,
        micro,
        register,
        reset,
        set_ctx,
        start,
        step,
    )
    from tapscope.dumper.config import DumperConfig
    from tapscope.dumper.dumper import Dumper
    from tapscope.dumper.observer import make_observer
    from tapscope.dumper.rules.rule import Rule

__all__ = [
    "Dumper",
    "DumperConfig",
    "Rule",
    "attach",
    "capture_output",
    "close",
    "configure",
    "configure_default",
    "ctx",
    "dump",
    "dump_dict",
    "dump_model",
    "get_state",
    "make_observer",
    "may_enable",
    "metric",
    "micro",
    "register",
    "reset",
    "set_ctx",
    "start",
    "step",
]
_EXPORTS = {"Dumper": ".dumper", "make_observer": ".observer", "DumperConfig": ".config", "Rule": ".rules.rule"}
"""Public name -> module that defines it; names not listed here are defined in ``api``."""


def __getattr__(name: str) -> Any:
    """Import a public name on first access, because the recorder process imports this package without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'tapscope.dumper' has no attribute {name!r}")
    from tapscope.core.extras import requiring

    with requiring(f"tapscope.dumper.{name}", "capture"):
        value = getattr(import_module(_EXPORTS.get(name, ".api"), __name__), name)
    globals()[name] = value
    return value
