"""See inside a running model, and find the first tensor where two runs diverge.

Capture with :class:`Dumper` (or the functions of :mod:`tapscope.dumper`, which need no object), generate with
:class:`LLM`, read with :func:`open_run`, compare with :func:`compare`. Every error that tapscope raises on purpose is a
:class:`TapscopeError`; accessing a name whose extra is not installed raises one that is also an :class:`ImportError`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tapscope._version import __version__

if TYPE_CHECKING:
    from tapscope.comparator.compare import compare
    from tapscope.core.cuda_coredump import enable_cuda_coredumps
    from tapscope.core.errors import TapscopeError
    from tapscope.core.site import Site
    from tapscope.dumper import Dumper, DumperConfig
    from tapscope.engine import LLM
    from tapscope.http.readiness import wait_for_ready
    from tapscope.run_format.run import Run
    from tapscope.sources import open_run

_EXPORTS = {
    "Dumper": ".dumper",
    "DumperConfig": ".dumper",
    "LLM": ".engine",
    "Run": ".run_format.run",
    "Site": ".core.site",
    "TapscopeError": ".core.errors",
    "compare": ".comparator.compare",
    "enable_cuda_coredumps": ".core.cuda_coredump",
    "open_run": ".sources",
    "wait_for_ready": ".http.readiness",
}

__all__ = [
    "LLM",
    "Dumper",
    "DumperConfig",
    "Run",
    "Site",
    "TapscopeError",
    "__version__",
    "compare",
    "dumper",
    "enable_cuda_coredumps",
    "open_run",
    "wait_for_ready",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first access: `import tapscope` alone loads neither torch nor numpy."""
    if name == "dumper":
        return import_module(".dumper", __name__)
    if name not in _EXPORTS:
        raise AttributeError(f"module 'tapscope' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
