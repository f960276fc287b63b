"""`tapscope ctl`: control a running dumper, over HTTP (by address) or ZeroMQ (by run directory)."""

import argparse
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapscope.cli import output
from tapscope.cli.diagnostics import ExitCode
from tapscope.core import extras
from tapscope.core.deprecation import deprecated_flag
from tapscope.core.errors import DataError, RankLostError, UnreachableError, UsageError
from tapscope.core.formatting import plural, size
from tapscope.core.site import compact_ranges

_TIMEOUT_S = 30.0
_TOKEN_VARIABLE = "TAPSCOPE_CONTROL_TOKEN"
_VERBS = ("state", "configure", "capture", "reset", "inject", "sites", "metrics", "verdict")


class CtlCommand:
    """Control a running dumper.

    $ tapscope ctl 127.0.0.1:8000 state
    $ tapscope ctl 127.0.0.1:8000 configure keep=stats 'rules=layers.3.*=full'
    $ tapscope ctl 127.0.0.1:8000 capture --steps 4
    $ tapscope ctl 127.0.0.1:8000 capture --flight-recorder 20
    $ tapscope ctl 127.0.0.1:8000 reset next-run
    $ tapscope ctl 127.0.0.1:8000 inject 'layers.3.mlp:out steps=10-'
    $ tapscope ctl 127.0.0.1:8000 sites 'layers.0.*'
    $ tapscope ctl 127.0.0.1:8000 verdict
    $ tapscope ctl runs/live state --table

    Responses are printed as JSON, except capture (one line; JSON with --json) and metrics (Prometheus text).

    Exit codes of verdict: 0 no divergence so far, 1 the live comparison found one, 3 nothing was compared.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        text = "address of the server or recorder, or the directory of a run that is being recorded"
        parser.add_argument("where", metavar="[HOST:]PORT|RUN", help=text)
        parser.add_argument("verb", choices=_VERBS, metavar="VERB", help=", ".join(_VERBS))
        words = "configure, capture: NAME=VALUE settings; reset: name of the next run; inject: SITE[=STORED] each, "
        words += "none to end; sites: a glob"
        parser.add_argument("words", nargs="*", metavar="ARG", help=words)
        parser.add_argument("--steps", type=int, metavar="N", help="capture: number of steps (default: 1)")
        flight_recorder = parser.add_argument(
            "--flight-recorder", type=int, metavar="N", help="capture: write the last N steps of the flight recorder"
        )
        deprecated_flag(parser, "--past", flight_recorder)
        parser.add_argument("--replace", action="store_true", help="capture: replace a capture in progress")
        parser.add_argument("--table", action="store_true", help="state: print a table, one line per rank")
        parser.add_argument("--json", action="store_true", help="capture: print the full response as JSON")
        text = f"control token; prefer the environment variable {_TOKEN_VARIABLE}, which other users cannot read"
        parser.add_argument("--token", metavar="TOKEN", help=text)

    def run(self, args: argparse.Namespace) -> int:
        """Send one request and print the response."""
        request = self._request(args)
        verb = "configure" if args.verb == "inject" else args.verb
        run = Path(args.where)
        if run.is_dir() and not args.where.isdigit():
            answer = ask_run(run, verb, request)
        else:
            token = args.token or os.environ.get(_TOKEN_VARIABLE)
            answer = ask_http(args.where, verb, request, token)
        if isinstance(answer, str):
            output.write_lines(answer.rstrip("\n"))
        elif args.table:
            _write_table(answer)
        elif args.verb == "capture" and not args.json:
            output.write_lines(_captured(answer))
        else:
            output.write_lines(json.dumps(answer, indent=1, ensure_ascii=False))
        if args.verb == "verdict":
            return {"differs": ExitCode.DIFFERENT, "unknown": ExitCode.DATA}.get(answer["verdict"], ExitCode.OK)
        return ExitCode.OK

    def _request(self, args: argparse.Namespace) -> dict[str, Any] | str | None:
        """Return the body of a POST request, the glob of ``sites``, or None."""
        _check_flags(args)
        if args.verb == "inject":
            if not args.words:
                raise UsageError("inject: name the sites to overwrite, or 'inject none' to end")
            return {"inject": [] if args.words == ["none"] else args.words}
        if args.verb in ("configure", "capture"):
            from tapscope.dumper.environment import parse_words

            flags = {"steps": args.steps, "past": args.flight_recorder, "replace": args.replace or None}
            return parse_words(args.words) | {name: value for name, value in flags.items() if value is not None}
        if len(args.words) > (args.verb in ("reset", "sites")):
            raise UsageError(f"{args.verb}: unexpected argument {' '.join(args.words)!r}; see tapscope ctl --help")
        if args.verb == "reset":
            return {"run": args.words[0]} if args.words else {}
        return args.words[0] if args.words else None


def _check_flags(args: argparse.Namespace) -> None:
    owners = {
        "steps": "capture",
        "flight_recorder": "capture",
        "replace": "capture",
        "json": "capture",
        "table": "state",
    }
    for flag, verb in owners.items():
        if getattr(args, flag) not in (None, False) and args.verb != verb:
            raise UsageError(f"--{flag.replace('_', '-')} is an option of {verb}, not of {args.verb}")
    if args.flight_recorder is not None and (args.steps is not None or args.replace):
        raise UsageError("--flight-recorder writes steps that are already recorded; remove --steps and --replace")


def control_of(where: str) -> Callable[[str, dict[str, Any] | None], Any]:
    """Return a function that sends requests to the recorder at ``[HOST:]PORT`` or of the run directory ``where``."""
    if Path(where).is_dir() and not where.isdigit():
        return lambda verb, body: ask_run(Path(where), verb, body)
    return lambda verb, body: ask_http(where, verb, body, os.environ.get(_TOKEN_VARIABLE))


def ask_run(run: Path, verb: str, content: dict[str, Any] | str | None) -> Any:
    """Send a request to the recorder of ``run`` over ZeroMQ and return the response; raises TapscopeError."""
    with extras.requiring(f"tapscope ctl RUN {verb}", "capture"):
        from tapscope.dumper.control.control_client import ControlClient
        from tapscope.dumper.pipeline.recorder_process import find
        from tapscope.dumper.transport.network import Endpoint

    body = {"glob": content} if isinstance(content, str) else content
    status, answer = ControlClient(Endpoint.of(find(run))).call("state" if verb == "metrics" else verb, body)
    if status != 200:
        raise _refusal(status, str(answer["error"]))
    if verb == "metrics":
        with extras.requiring("tapscope ctl RUN metrics", "capture"):
            from tapscope.dumper.control.metrics import exposition
        return exposition(answer).decode()
    return answer


def ask_http(address: str, verb: str, content: dict[str, Any] | str | None, token: str | None) -> Any:
    """Send a request to the server at ``address`` over HTTP and return the response; raises TapscopeError."""
    address = address.removeprefix("http://").rstrip("/")
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535) or "/" in host:
        raise UsageError(f"{address!r} is neither the directory of a run nor [HOST:]PORT, such as 127.0.0.1:8000")
    url = f"http://{f'127.0.0.1:{address}' if address.isdigit() else address}"
    url += "/metrics" if verb == "metrics" else f"/dumper/{verb}"
    if isinstance(content, str):
        url += "?" + urllib.parse.urlencode({"glob": content})
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = json.dumps(content).encode() if isinstance(content, dict) else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, data=data, headers=headers), timeout=_TIMEOUT_S) as reply:
            return reply.read().decode() if verb == "metrics" else json.load(reply)
    except urllib.error.HTTPError as error:
        raise _http_refusal(error, url) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason  # without the errno
        text = (
            f"no response from {address}: {reason}; is the server running? (tapscope serve; a run directory works too)"
        )
        raise UnreachableError(text) from None


def _http_refusal(error: urllib.error.HTTPError, url: str) -> Exception:
    try:
        text = json.load(error)["error"]
    except (ValueError, KeyError, TypeError):
        return DataError(f"{url} responded with {error.code} {error.reason}; is this a tapscope server?")
    return _refusal(error.code, str(text))


def _refusal(status: int, text: str) -> Exception:
    return RankLostError(text) if status in (502, 503, 504) else UsageError(text)


_NOT_APPLIED = {
    "pending": "from its next step",  # the rank has not started a step since
    "disk": "is not recorded: its recorder could not write (see: tapscope info RUN)",
    "stopped": "is not recorded: its recorder has ended",
    "closed": "has closed its Dumper",
    "died": "has died",
    "silent": "does not respond",
    "missing": "has not joined",
}
"""Status of a rank that has not applied a change -> wording for the report."""


def _captured(answer: dict[str, Any]) -> str:
    """Format the response to ``capture``: per rank, the first step or the released steps; then rules without a
    match."""
    past = answer.get("past")
    num_steps = past or answer["config"]["capture_steps"]
    ranks_by_state: dict[str, list[int]] = {}
    for rank, result in answer["ranks"].items():
        if isinstance(result, dict):
            words = f"released {plural(result['steps'], 'step')}, {size(result['bytes'])}"
        else:
            words = f"from step {result}" if isinstance(result, int) else _NOT_APPLIED.get(str(result), str(result))
        ranks_by_state.setdefault(words, []).append(int(rank))
    ranks = ", ".join(
        f"rank{'s' * (len(some) > 1)} {compact_ranges(some)} {words}" for words, some in ranks_by_state.items()
    )
    lines = [f"{'flight recorder,' if past else 'capture of'} {plural(num_steps, 'step')}: {ranks}"]
    lines += [f"ended: {answer['ended']}"] if answer.get("ended") else []
    lines += [f"no site matches on rank {r}: {', '.join(rules)}" for r, rules in answer.get("unmatched", {}).items()]
    return "\n".join(lines)


def _write_table(state: dict[str, Any]) -> None:
    names = (
        "rank",
        "status",
        "step",
        "epoch",
        "records",
        "bytes",
        "capture_steps_left",
        "dropped",
        "failed",
        "queue_bytes",
    )
    shown = [name for name in names if any(name in rank for rank in state["ranks"])]
    rows = [[name.replace("_", " ") for name in shown]]
    rows += [["-" if rank.get(name) is None else str(rank[name]) for name in shown] for rank in state["ranks"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    output.write_line(f"{state['run']}  epoch {state['epoch']}  {len(state['ranks'])} of {state['world_size']} ranks")
    for row in rows:
        output.write_line("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
    reasons: dict[str, list[int]] = {}
    for rank in state["ranks"]:
        if rank.get("stopped"):
            reasons.setdefault(str(rank["stopped"]), []).append(int(rank["rank"]))
    for reason, ranks in reasons.items():
        who = f"rank {ranks[0]} does" if len(ranks) == 1 else f"ranks {compact_ranges(ranks)} do"
        output.write_line(f"{who} not capture: {reason}")
    for hint in state["hints"]:
        output.write_line(f"hint: {hint}")
