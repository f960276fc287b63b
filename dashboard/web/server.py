"""Server of the web page, until interrupted."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from tapscope.core.errors import ConfigError
from tapscope.dashboard.bench_source import BenchSource
from tapscope.dashboard.capture_control import CaptureControl
from tapscope.dashboard.web.app import create_app
from tapscope.dashboard.web.login import PASSWORD, Login
from tapscope.dashboard.web.roots import Roots
from tapscope.http.listen import is_loopback, listen, parse_address, url_of


def serve(
    roots: Roots,
    address: str,
    password: str,
    announce: Callable[[str], None],
    *,
    benchmarks: Sequence[Path] = (),
    control: CaptureControl | None = None,
    read_only_link_s: float = 0.0,
) -> int:
    """Serve the runs of ``roots`` and the results below ``benchmarks`` until interrupted; return the exit code.

    ``announce`` receives the link, and a second one that opens read-only sessions for ``read_only_link_s`` seconds.
    Raises ConfigError for a non-loopback address without a password.
    """
    host, port = parse_address(address)
    if not is_loopback(host) and not password:
        raise ConfigError(f"--listen {host} is not loopback: it needs --password-file FILE or {PASSWORD}")
    source = BenchSource(benchmarks) if benchmarks else None
    with listen(host, port) as listener:
        login = Login(password, port=listener.getsockname()[1])
        app = create_app(roots, login, loopback=is_loopback(host), benchmarks=source, control=control)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=20, limit_concurrency=512,
            timeout_graceful_shutdown=1, server_header=False,
        )  # fmt: skip
        url = url_of(listener)
        announce(url if login.needs_password and not is_loopback(host) else f"{url}/login?token={login.link}")
        if read_only_link_s:
            announce(f"{url}/login?token={login.add_read_only_link(read_only_link_s)}")
        server = uvicorn.Server(config)
        with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            server.run(sockets=[listener])
    return 0
