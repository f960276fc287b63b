"""`tapscope serve`: serve the engine over HTTP, with the dumper's control API on the same port."""

import argparse
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapscope.cli import capture_flags, diagnostics
from tapscope.cli.diagnostics import ExitCode
from tapscope.core.extras import require

if TYPE_CHECKING:
    from tapscope.core.observe import RankInfo, StepObserver
    from tapscope.engine import EngineConfig
    from tapscope.engine.server.server_settings import ServerSettings


class ServeCommand:
    """Serve a model over HTTP; capture is switched on and off at run time.

      $ tapscope serve MODEL -o live --listen 127.0.0.1:8000
      $ curl -X POST localhost:8000/dumper/capture -d '{"steps": 4}'
      $ curl -X POST localhost:8000/generate -d '{"text": "def main():"}'

    API and control routes share the port. Until a capture is requested, the model has no hooks. If --listen is
    reachable from other hosts, set the environment variable TAPSCOPE_CONTROL_TOKEN; the control routes then require
    that token.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        capture_flags.add_model_flags(parser)
        parser.add_argument("-o", "--out", type=Path, metavar="RUN", help="run directory (default: runs/MODEL-TIME)")
        text = "listen address (default: 127.0.0.1:8000; port 0 selects a free port)"
        parser.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help=text)
        text = "data-parallel replicas, each with --tp ranks (default: 1)"
        parser.add_argument("--dp", type=int, default=1, metavar="N", help=text)
        text = "maximum number of prompt and generated tokens of a request (default: the model's positions)"
        parser.add_argument("--max-model-len", type=int, metavar="N", help=text)
        _add_server_flags(parser)
        capture_flags.add_adapter_flags(parser)
        capture_flags.add_speculative_flags(parser)
        capture_flags.add_selection_flags(parser, keep="off")

    def run(self, args: argparse.Namespace) -> int:
        """Serve until SIGTERM or Ctrl-C."""
        require("engine", "tapscope serve")
        from tapscope.engine.distributed.openmp_threads import sleep_when_idle

        sleep_when_idle()
        from tapscope.dumper.control.access_guard import Guard, token_of
        from tapscope.dumper.pipeline.recorder_process import require_free
        from tapscope.engine.execution.num_processes import check_num_processes
        from tapscope.engine.server.http_listener import BACKLOG
        from tapscope.engine.server.request_log import RequestLog
        from tapscope.engine.server.request_traces import RequestTraces
        from tapscope.engine.server.server_process import ServerProcess
        from tapscope.http.listen import listen, parse_address, url_of

        settings = _settings(args)
        host, port = parse_address(args.listen, flag="--listen")
        Guard.of(host, token_of(None), flag=f"--listen {args.listen}")
        out = args.out or Path("runs") / f"{capture_flags.checkpoint_name(args.model)}-{time.strftime('%Y%m%d-%H%M%S')}"
        engine = _engine_config(args, out)
        if engine.dp > 1:  # tp larger than the number of heads has its own error
            check_num_processes(engine)
        require_free(out, force=args.force)
        config = capture_flags.config(args)
        if settings.request_log is not None:
            RequestLog(settings.request_log).close()  # fail before loading the model, as for a port in use
        if settings.otlp_traces_endpoint is not None:
            RequestTraces(settings.otlp_traces_endpoint, args.model).close()
        listener = listen(host, port, backlog=BACKLOG)
        observer = partial(_observe, out=str(out.absolute()), config=config, force=args.force)
        extras = {"run": str(out.absolute()), "host": host}
        url = url_of(listener)

        def announce() -> None:
            of = f" with {args.dp} replicas" if args.dp > 1 else ""
            diagnostics.note(f"serving {args.model} on {url}{of}; run: {out}")
            diagnostics.note(f"next: tapscope ctl {url.removeprefix('http://')} capture --steps 4")

        backend = ServerProcess(
            engine, observer, listener, settings, http_module="tapscope.cli.serve_http", extras=extras
        )
        with backend.signals(), backend:
            backend.run(announce)
        diagnostics.note(f"next: tapscope info {out}")
        return ExitCode.OK


def _observe(model: Any, info: "RankInfo", **settings: Any) -> "StepObserver":
    """Create the dumper. The import of torch is deferred until after the HTTP process has started."""
    from tapscope.dumper import make_observer

    return make_observer(model, info, **settings)


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    text = "model name in the API (default: MODEL)"
    parser.add_argument("--served-model-name", metavar="NAME", help=text)
    text = "API key that clients send as 'Authorization: Bearer' or 'x-api-key' (better: set TAPSCOPE_API_KEY)"
    parser.add_argument("--api-key", metavar="KEY", help=text)
    text = (
        "tool-call parser: deepseek, glm45, gpt_oss, hermes (also for Qwen), kimi_k2, llama3, mistral, qwen3_coder or "
        "none (default: from the chat template)"
    )
    parser.add_argument("--tool-format", metavar="FORM", help=text)
    text = "reasoning parser: think (<think>...</think>), gpt_oss or none (default: from the chat template)"
    parser.add_argument("--reasoning-format", metavar="FORM", help=text)
    text = "append one JSON line per finished request"
    parser.add_argument("--request-log", metavar="FILE", help=text)
    text = "send OpenTelemetry traces of requests to URL, such as http://localhost:4318/v1/traces (OTLP over HTTP)"
    parser.add_argument("--otlp-traces-endpoint", metavar="URL", help=text)
    text = "maximum request body in bytes (default: 8388608)"
    parser.add_argument("--max-body-bytes", type=int, metavar="N", default=None, help=text)
    text = "maximum number of queued requests; more are rejected with 503 (default: 2048)"
    parser.add_argument("--max-waiting", type=int, metavar="N", default=None, help=text)
    text = "maximum generations per request (prompts × n); more are rejected with 400 (default: 512)"
    parser.add_argument("--max-generations", type=int, metavar="N", default=None, help=text)
    text = (
        "maximum log-probabilities and hidden-state elements per response; more are rejected with 400 (default: 200000)"
    )
    parser.add_argument("--max-answer-values", type=int, metavar="N", default=None, help=text)
    text = "maximum number of open connections, capped by the open-file limit (default: 4096)"
    parser.add_argument("--max-connections", type=int, metavar="N", default=None, help=text)
    text = "timeout for receiving a request; bodies get at least 1 s per 10 kB (default: 10)"
    parser.add_argument("--request-timeout", type=float, metavar="SECONDS", default=None, help=text)
    text = "time for running requests to finish after SIGTERM (default: 30)"
    parser.add_argument("--drain-timeout", type=float, metavar="SECONDS", default=None, help=text)


def _engine_config(args: argparse.Namespace, out: Path) -> "EngineConfig":
    """Build the engine configuration from the flags; raises ConfigError."""
    from tapscope.engine.params.engine_config import EngineConfig

    given = {"logits": "observed", "profile_dir": str(out.absolute() / "profile")}
    given |= capture_flags.engine_settings(args)
    return EngineConfig.build(
        args.model, given | capture_flags.speculative_settings(args) | capture_flags.adapter_settings(args)
    )


def _settings(args: argparse.Namespace) -> "ServerSettings":
    from tapscope.engine.server.server_settings import ServerSettings

    given = {
        "model_name": args.served_model_name,
        "api_key": (os.environ.get("TAPSCOPE_API_KEY") or None) if args.api_key is None else args.api_key,
        "tool_format": args.tool_format,
        "reasoning_format": args.reasoning_format,
        "request_log": args.request_log,
        "otlp_traces_endpoint": args.otlp_traces_endpoint,
        "max_body_bytes": args.max_body_bytes,
        "max_waiting": args.max_waiting,
        "max_generations": args.max_generations,
        "max_answer_values": args.max_answer_values,
        "max_connections": args.max_connections,
        "request_timeout_s": args.request_timeout,
        "drain_timeout_s": args.drain_timeout,
    }
    return ServerSettings(**{name: value for name, value in given.items() if value is not None})
