"""Extras: the optional packages, and the error that names the extra to install."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from tapscope.core.errors import MissingExtraError

_CAPTURE = {
    "torch": "torch",
    "zmq": "pyzmq",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "prometheus_client": "prometheus-client",
}
_ENGINE = _CAPTURE | {"tokenizers": "tokenizers", "jinja2": "jinja2", "llguidance": "llguidance", "re2": "google-re2"}
EXTRAS: dict[str, dict[str, str]] = {
    "tui": {"textual": "textual"},
    "table": {"polars": "polars"},
    "fsspec": {"fsspec": "fsspec"},
    "ray": {"ray": "ray"},
    "web": {"jinja2": "jinja2", "fastapi": "fastapi", "uvicorn": "uvicorn"},
    "capture": _CAPTURE,
    "hf": _CAPTURE | {"transformers": "transformers"},
    "engine": _ENGINE,
    "otel": {"opentelemetry": "opentelemetry-exporter-otlp-proto-http"},
    "bench": _ENGINE | {"httpx": "httpx"},
}
"""Extra -> module -> package that provides the module, as in pyproject.toml; smaller extras first."""


def require(extra: str, what: str) -> None:
    """Raise MissingExtraError unless every package of the extra is installed; no package is imported.

    ``what`` names the feature in the message, e.g. ``tapscope serve``.
    """
    missing = [package for module, package in EXTRAS[extra].items() if find_spec(module) is None]
    if missing:
        raise MissingExtraError(_sentence(what, missing, extra))


@contextmanager
def requiring(what: str, extra: str) -> Iterator[None]:
    """Context manager: turn a failed import of one of the extra's packages into MissingExtraError.

    ``what`` names the feature in the message. Other import failures propagate.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = EXTRAS[extra].get((error.name or "").partition(".")[0])
        if package is None:
            raise
        raise MissingExtraError(_sentence(what, [package], extra)) from None


def extra_of(error: ModuleNotFoundError) -> str | None:
    """Return the smallest extra that provides the module missing from ``error``, or None."""
    module = (error.name or "").partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)


def _sentence(what: str, missing: list[str], extra: str) -> str:
    listed = missing[0] if len(missing) == 1 else f"{', '.join(missing[:-1])} and {missing[-1]}"
    verb = "is" if len(missing) == 1 else "are"
    return f"{what} needs {listed}, which {verb} not installed; install the extra: pip install 'tapscope[{extra}]'"
