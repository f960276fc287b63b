"""HTTP server for the engine.

The server has two processes, which communicate over ZMQ: the HTTP process (FastAPI, tokenizer, detokenizer) and the
engine process (scheduler and rank 0), which spawns the processes of the other ranks. ``make_app`` runs both parts in
one process, for tests and for embedding in another app.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapscope.engine.server.app import make_app
    from tapscope.engine.server.http_listener import serve
    from tapscope.engine.server.server_settings import ServerSettings

__all__ = ["ServerSettings", "make_app", "serve"]

_MODULES = {"ServerSettings": "server_settings", "make_app": "app", "serve": "http_listener"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
