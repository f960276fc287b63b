"""Control over HTTP: the routes, the client behind them, and the server thread of the recorder."""

import json
import socket
import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq

from tapscope import wire
from tapscope.errors import ConfigError, ListenError, UnreachableError
from tapscope.wire import Message

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def parse_address(text: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``PORT``; raises ConfigError. Only loopback is served."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"address {text!r}: must be HOST:PORT or PORT, e.g. 127.0.0.1:5757 (port 0: any)")
    if host not in _LOOPBACK:
        raise ConfigError(f"address {text!r}: control has no password yet and listens on loopback only")
    return host, int(port)


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; raises ListenError that names the address."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port (0: any)") from None
    return listener


class ControlClient:
    """Asks a recorder; one short-lived socket a call, so that any thread may use it."""

    def __init__(self, address: str, *, timeout_s: float = 10.0) -> None:
        self.address = address
        self.timeout_s = timeout_s

    def call(self, verb: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """The HTTP status and body; raises UnreachableError when nothing answers."""
        request = uuid.uuid4().hex
        channel: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        with channel:
            channel.linger = 0
            channel.connect(self.address)
            channel.send_multipart(wire.encode(Message("request", {"id": request, "verb": verb, "body": body})))
            if not channel.poll(timeout=int(self.timeout_s * 1000)):
                raise UnreachableError(f"the recorder did not answer within {self.timeout_s:g} s: has the job ended?")
            reply = wire.decode(channel.recv_multipart())
        return int(reply["status"]), dict(reply["body"])


def make_router(client: ControlClient | Callable[[], ControlClient]) -> "APIRouter":
    """The ``/dumper`` routes, for the recorder's own app or any host's FastAPI app."""
    from fastapi import APIRouter, Request
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import JSONResponse

    router = APIRouter(prefix="/dumper", tags=["dumper"])

    async def answer(verb: str, body: dict[str, Any] | None) -> JSONResponse:
        def ask() -> tuple[int, dict[str, Any]]:
            return (client if isinstance(client, ControlClient) else client()).call(verb, body)

        try:
            status, content = await run_in_threadpool(ask)
        except UnreachableError as error:
            status, content = 503, {"error": str(error)}
        return JSONResponse(content, status)

    async def post(verb: str, request: Request) -> JSONResponse:
        try:
            body = json.loads(await request.body() or b"{}")
        except ValueError as error:
            return JSONResponse({"error": f"the body is no JSON: {error}"}, 400)
        if not isinstance(body, dict):
            return JSONResponse({"error": "the body must be a JSON object"}, 400)
        return await answer(verb, body)

    @router.get("/state", summary="Run, epoch, configuration and every rank's step")
    async def state() -> JSONResponse:
        return await answer("state", None)

    @router.get("/sites", summary="Modules and ports that can be tapped; ?glob= narrows")
    async def sites(glob: str | None = None) -> JSONResponse:
        return await answer("sites", {"glob": glob})

    @router.post("/configure", summary="Change enabled, keep, rules on all ranks at one step")
    async def configure(request: Request) -> JSONResponse:
        return await post("configure", request)

    @router.post("/capture", summary="Keep the next steps in full, then fall back")
    async def capture(request: Request) -> JSONResponse:
        return await post("capture", request)

    @router.post("/reset", summary="Close the run and open a new one beside it")
    async def reset(request: Request) -> JSONResponse:
        return await post("reset", request)

    return router


def make_app(client: ControlClient) -> "FastAPI":
    """The control app on its own."""
    from fastapi import FastAPI

    app = FastAPI(title="tapscope dumper", description="Steer the taps of a running job.")
    app.include_router(make_router(client))
    return app


class ControlServer:
    """uvicorn on a bound socket, in a thread."""

    def __init__(self, app: "FastAPI", bound: socket.socket) -> None:
        import uvicorn

        self._socket = bound
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([bound],), name="tapscope-control", daemon=True)

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Finish what is being answered, at most two seconds."""
        self._server.should_exit = True
        self._thread.join(timeout=2)
        self._socket.close()
