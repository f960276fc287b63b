"""Run as the front by :class:`tapscope.engine.server.server_process.Backend`; not meant to be called by hand."""

from tapscope.engine.server.http_server import http_server_main

if __name__ == "__main__":
    raise SystemExit(http_server_main())
