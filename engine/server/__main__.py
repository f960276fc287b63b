"""Entry point of the HTTP process, started by :class:`tapscope.engine.server.server_process.ServerProcess`."""

from tapscope.engine.server.http_server import http_server_main

if __name__ == "__main__":
    raise SystemExit(http_server_main())
