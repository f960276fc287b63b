"""A served LLM: uvicorn in a thread of the test process, and a client."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import APIRouter

from tapscope.engine import LLM
from tapscope.engine.server import ServerSettings, make_app


class Hold:
    """Lets a model run a number of further steps, then blocks it until released."""

    def __init__(self, llm: LLM) -> None:
        self._left: int | None = None
        self._released = threading.Event()
        self._stands = threading.Event()
        llm.model.register_forward_pre_hook(self._wait)

    def after(self, steps: int) -> None:
        """Block the step after the next ``steps`` until :meth:`release`."""
        self._released.clear()
        self._stands.clear()
        self._left = steps

    def until_it_stands(self) -> None:
        """Wait until the model is blocked."""
        assert self._stands.wait(60), "the model never came to that step"

    def release(self) -> None:
        """Unblock the model."""
        self._left = None
        self._released.set()

    def _wait(self, *_: Any) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._stands.set()
                assert self._released.wait(60), "nobody released the model"


HOLDS: dict[str, Hold] = {}
"""The holds of the servers that :func:`served` is running, by address."""


def raw_post(body: dict[str, Any]) -> bytes:
    """Return a raw HTTP request to /generate, for clients that control the connection themselves."""
    content = json.dumps(body).encode()
    return f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


class Served:
    """A served LLM and a client."""

    def __init__(self, llm: LLM, routers: list[APIRouter], settings: ServerSettings | None = None) -> None:
        self.llm = llm
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._server = uvicorn.Server(uvicorn.Config(make_app(llm, routers, settings), log_config=None))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self._socket.getsockname()[1]}", timeout=90)

    def generate(self, **body: Any) -> httpx.Response:
        return self.client.post("/generate", json=body)

    def stream(self, **body: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed response; the last one must be [DONE]."""
        with self.client.stream("POST", "/generate", json=body | {"stream": True}) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert events.pop() == "[DONE]"
        yield from map(json.loads, events)

    def info(self) -> dict[str, Any]:
        return self.client.get("/get_server_info").raise_for_status().json()

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


@contextmanager
def served(path: Path, *, settings: dict[str, Any] | None = None, **engine: Any) -> Iterator[str]:
    """Serve the checkpoint at ``path``; yields the server's address, for custom clients."""
    with LLM(path, **engine) as llm:
        hold = Hold(llm)
        made = Served(llm, [], ServerSettings(**(settings or {})))
        address = str(made.client.base_url).rstrip("/")
        HOLDS[address] = hold
        try:
            yield address
        finally:
            del HOLDS[address]
            made.close()
