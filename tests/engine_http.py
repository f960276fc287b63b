"""A served LLM on a loopback port, for tests with real clients; no test in here."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from tapscope.engine import LLM
from tapscope.engine.server import ServerSettings, make_app


@contextmanager
def served(path: Path, *, settings: dict[str, Any] | None = None, **engine: Any) -> Iterator[str]:
    """Serve the checkpoint at ``path`` by a real uvicorn; gives its address."""
    with LLM(path, **engine) as llm, socket.create_server(("127.0.0.1", 0)) as listener:
        app = make_app(llm, settings=ServerSettings(**(settings or {})))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
