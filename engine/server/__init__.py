"""The engine over HTTP.

Two processes: the *front* (HTTP, tokenizer, text) and the *engine* (scheduler, rank 0, and further ranks below it).
They exchange JSON over ZMQ. ``make_app`` runs both in one process, for tests and for embedding in another app.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapscope.engine.server.app import make_app
    from tapscope.engine.server.http_listener import serve
    from tapscope.engine.server.server_settings import ServerSettings

__all__ = ["ServerSettings", "make_app", "serve"]

_HOMES = {"ServerSettings": "server_settings", "make_app": "app", "serve": "http_listener"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
