"""`tapscope info`: what a run holds, and what looks wrong in it."""

import argparse
from typing import TYPE_CHECKING

from tapscope.cli import diagnostics, output
from tapscope.errors import RunCorruptError, UsageError

if TYPE_CHECKING:
    from tapscope.cli.account import Account
    from tapscope.run import Run

SCHEMA = "tapscope.info/1"


class InfoCommand:
    """say what a run holds, and what looks wrong in it

    $ tapscope info base              exit 1 where values look wrong or something is missing
    $ tapscope info base --verify     read every payload and check it against its recorded hash
    $ tapscope info --env             versions and the native kernels, for a bug report
    """

    name = "info"

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("path", metavar="RUN", nargs="?", help="a run directory")
        parser.add_argument(
            "--verify", action="store_true", help="read every payload and check its hash; exit 3 if bad"
        )
        parser.add_argument("--env", action="store_true", help="print versions instead")
        parser.add_argument("--json", action="store_true", help="one JSON object per line")

    def run(self, args: argparse.Namespace) -> int:
        """Print the account of the run."""
        if args.env:
            return _print_environment(args.json)
        if args.path is None:
            raise UsageError("info needs a RUN; write: tapscope info RUN, or tapscope info --env")
        from tapscope.cli.account import account_of
        from tapscope.run import open_run

        with open_run(args.path) as run:
            account = account_of(run)
            damage = verify(run) if args.verify else []
            if args.json:
                _print_json(account, damage, args.verify)
            else:
                _print_text(account)
                for sentence in damage:
                    output.write_line(f"damaged    {sentence}")
                if args.verify and not damage:
                    output.write_line(f"verified   {_verified(run)}")
        if not args.json and account.num_records:
            diagnostics.note(f"next: tapscope view {args.path}")
        if damage:
            return diagnostics.ExitCode.DATA
        return diagnostics.ExitCode.OK if account.fine else diagnostics.ExitCode.DIFFERENT


def verify(run: "Run") -> list[str]:
    """Read every payload; one sentence per record whose bytes are missing or do not have the recorded hash."""
    from tapscope.kernels.native import summarize_array

    damage = []
    kept = [record for record in run.records if record.entry is not None]
    with diagnostics.progress(len(kept), "verifying") as advance:
        for record in kept:
            where = f"{record.key.site} at step {record.key.step}, rank {record.key.rank}"
            try:
                array = run.array(record)
            except RunCorruptError as error:
                damage.append(f"{where}: {error}")
            else:
                found = summarize_array(array).hash if record.hash else None
                if found != record.hash:
                    damage.append(f"{where}: its bytes have hash {found}, recorded was {record.hash}")
            advance(1)
    return damage


def _verified(run: "Run") -> str:
    kept = [record for record in run.records if record.entry is not None]
    hashed = sum(1 for record in kept if record.hash)
    without = f"; {len(kept) - hashed:,} payloads have no hash and were only read" if hashed < len(kept) else ""
    return f"{hashed:,} payloads have their recorded hash{without}"


def _print_environment(as_json: bool) -> int:
    from tapscope.cli.environment import environment

    facts = environment()
    if as_json:
        output.write_json({"type": "environment", "schema": SCHEMA, **facts})
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            output.write_line(f"{name:<{width}}  {value}")
    return diagnostics.ExitCode.OK


def _print_json(account: "Account", damage: list[str], verified: bool) -> None:
    output.write_json({"type": "run", "schema": SCHEMA, **account.facts()})
    for kind, items in (("metric", account.metrics), ("event", account.events), ("odd", account.odd)):
        for item in items:
            output.write_json({"type": kind, "schema": SCHEMA, **item.to_json()})
    summary = {"complete": account.complete, "odd_sites": len(account.odd), "missing": account.missing}
    if verified:
        summary["damaged"] = damage
    output.write_json({"type": "summary", "schema": SCHEMA, **summary})


def _print_text(account: "Account") -> None:
    for name, lines in account.sections():
        for i, line in enumerate(lines):
            output.write_line(f"{'' if i else name:<10} {line}")
