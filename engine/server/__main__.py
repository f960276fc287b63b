"""Run as the front by :class:`tapscope.engine.server.backend.Backend`; not meant to be called by hand."""

from tapscope.engine.server.front import front_main

if __name__ == "__main__":
    raise SystemExit(front_main())
