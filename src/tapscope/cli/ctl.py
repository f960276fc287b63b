"""`tapscope ctl`: steer a running dumper over HTTP."""

import argparse
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from tapscope.cli import output
from tapscope.cli.diagnostics import ExitCode
from tapscope.errors import DataError, RankLostError, UnreachableError, UsageError

_TIMEOUT_S = 30.0


class CtlCommand:
    """Steer a running dumper; every answer is JSON.

    tapscope ctl 127.0.0.1:8000 state
    tapscope ctl 127.0.0.1:8000 configure enabled=true keep=stats 'rules=layers.3.*:out=full'
    tapscope ctl 127.0.0.1:8000 capture --steps 4
    tapscope ctl 127.0.0.1:8000 reset next-run
    tapscope ctl 127.0.0.1:8000 sites 'layers.0.*'
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("address", metavar="[HOST:]PORT", help="where the server or recorder listens")
        verbs = ("state", "configure", "capture", "reset", "sites")
        parser.add_argument("verb", choices=verbs, metavar="VERB", help=", ".join(verbs))
        words = "NAME=VALUE for configure and capture, a run name for reset, a glob for sites"
        parser.add_argument("words", nargs="*", metavar="WORD", help=words)
        parser.add_argument("--steps", type=int, metavar="N", help="capture: how many steps (default: 1)")

    def run(self, args: argparse.Namespace) -> int:
        """Ask once and print the answer."""
        answer = _call(args.address, args.verb, self._request(args))
        output.write_line(json.dumps(answer, indent=1, ensure_ascii=False))
        return ExitCode.OK

    def _request(self, args: argparse.Namespace) -> dict[str, Any] | str | None:
        from tapscope.dumper.config import parse_words

        if args.steps is not None and args.verb != "capture":
            raise UsageError(f"--steps goes with capture, not with {args.verb}")
        if args.verb in ("configure", "capture"):
            steps = {} if args.steps is None else {"steps": args.steps}
            return parse_words(args.words) | steps
        if len(args.words) > (args.verb in ("reset", "sites")):
            raise UsageError(f"{args.verb} does not take {' '.join(args.words)!r}; see tapscope ctl --help")
        if args.verb == "reset":
            return {"run": args.words[0]} if args.words else {}
        return args.words[0] if args.words else None


def _call(address: str, verb: str, content: dict[str, Any] | str | None) -> Any:
    url = f"http://{f'127.0.0.1:{address}' if address.isdigit() else address}/dumper/{verb}"
    if isinstance(content, str):
        url += "?" + urllib.parse.urlencode({"glob": content})
    data = json.dumps(content).encode() if isinstance(content, dict) else None
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise _refusal(error, url) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UnreachableError(
            f"nothing answers at {address}: {reason}; is it serving? (see: tapscope serve)"
        ) from None


def _refusal(error: urllib.error.HTTPError, url: str) -> Exception:
    try:
        text = json.load(error)["error"]
    except (ValueError, KeyError, TypeError):
        return DataError(f"{url} answered {error.code} {error.reason}: is this a tapscope server?")
    if error.code in (503, 504):
        return RankLostError(text)
    return UsageError(text)
