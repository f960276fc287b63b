"""`tapscope serve`: the engine over HTTP, its taps steered on the same port."""

import argparse
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from tapscope.cli import capture, diagnostics
from tapscope.cli.diagnostics import ExitCode


class ServeCommand:
    """Serve a model over HTTP; capture is switched on and off at run time on the same port.

      tapscope serve MODEL -o live --listen 127.0.0.1:8000
      curl -X POST localhost:8000/dumper/capture -d '{"steps": 4}'
      curl -X POST localhost:8000/generate -d '{"text": "def main():"}'

    Until told otherwise nothing is captured and no hook is on the model. An address that other hosts can reach needs
    a token for the control paths: set the environment variable TAPSCOPE_CONTROL_TOKEN.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        capture.add_model_flags(parser)
        parser.add_argument("-o", "--out", type=Path, metavar="RUN", help="run directory (default: runs/MODEL-TIME)")
        text = "address (default: 127.0.0.1:8000; port 0: any)"
        parser.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help=text)
        capture.add_selection_flags(parser, keep="off")

    def run(self, args: argparse.Namespace) -> int:
        """Serve until SIGTERM or Ctrl-C."""
        from tapscope.dumper import make_observer
        from tapscope.dumper.control import Guard, bind, make_router, parse_address
        from tapscope.dumper.guard import token_of
        from tapscope.dumper.mount import client_of
        from tapscope.dumper.session import require_free
        from tapscope.engine import LLM
        from tapscope.engine.server import make_app, serve

        host, port = parse_address(args.listen)
        guard = Guard.of(host, token_of(None))
        out = args.out or Path("runs") / f"{capture.checkpoint_name(args.model)}-{time.strftime('%Y%m%d-%H%M%S')}"
        require_free(out, force=args.force)
        bind(host, port).close()  # a taken port is said before the model is loaded
        config = capture.config(args)
        observer = partial(make_observer, out=str(out.absolute()), config=config, force=args.force)
        with LLM(args.model, dtype=args.dtype, tp=args.tp, logits="all", observer=observer) as llm:
            client = client_of(out)

            def announce(url: str) -> None:
                diagnostics.note(f"serving {args.model} on {url}; run: {out}")
                diagnostics.note(f"next: tapscope ctl {url.removeprefix('http://')} capture --steps 4")

            with suppress(KeyboardInterrupt):  # Ctrl-C is how one stops a server
                serve(make_app(llm, routers=[make_router(client, guard)]), host, port, on_listen=announce)
        diagnostics.note(f"next: tapscope info {out}")
        return ExitCode.OK
