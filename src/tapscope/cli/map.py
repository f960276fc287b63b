"""`tapscope map`: show how the sites of two runs match and propose a map file for unmatched sites."""

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tapscope.cli import compare_flags, diagnostics, output
from tapscope.cli.pattern_flag import add_pattern_flag, with_pattern
from tapscope.core.errors import ConfigError
from tapscope.core.formatting import plural
from tapscope.core.gc_control import gc_paused
from tapscope.sources import open_run

if TYPE_CHECKING:
    from tapscope.comparator.matching.map_proposal import MapProposal

SCHEMA = "tapscope.map/1"


class MapCommand:
    """Propose a map file for two runs whose names differ.

      $ tapscope map base target -o names.yaml
      $ tapscope diff base target --map names.yaml
      $ tapscope map base target --map names.yaml --list

    Two sites correspond if their modules have the same layer numbers and if, in every layer, their outputs have equal
    values, or the same width and statistics. Comments in the file give the evidence and list undecided sites: edit
    the file, then check it with --list.

    Exit codes: 0 everything matches or a map is proposed, 1 sites remain unmatched, 2 usage, 3 unreadable data.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("baseline", metavar="BASELINE", help="reference run, dump, checkpoint or tensor files")
        parser.add_argument("target", metavar="TARGET", help="run under test")
        parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the map file (default: stdout)")
        parser.add_argument("--list", action="store_true", help="list the matched sites and how each was matched")
        parser.add_argument("--json", action="store_true", help="print the proposal as one JSON object")
        parser.add_argument("--force", action="store_true", help="replace an existing FILE")
        add_pattern_flag(parser)
        compare_flags.add_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Propose a map, print or write it, and return the exit code."""
        from tapscope.comparator.matching.map_proposal import to_json
        from tapscope.comparator.propose_map import propose_map

        if args.out is not None and args.out.exists() and not args.force:
            raise ConfigError(f"{args.out} exists; choose another file or replace it with --force")
        options = compare_flags.options_of(args)
        paths = with_pattern(args.baseline, args), with_pattern(args.target, args)
        with gc_paused(), open_run(paths[0]) as baseline, open_run(paths[1]) as target:
            proposal = propose_map(baseline, target, options)
        if args.list:
            _list(proposal)
        elif args.json:
            output.write_json({"type": "map", "schema": SCHEMA, **to_json(proposal)})
        elif text := proposal.yaml():
            _write(args, proposal, text)
        _report(args, proposal)
        is_done = not any(proposal.num_unmatched) or bool(proposal.renames or proposal.splits or proposal.prefix)
        return diagnostics.ExitCode.OK if is_done else diagnostics.ExitCode.DIFFERENT


def _list(proposal: "MapProposal") -> None:
    width = max((len(baseline) for baseline, _, _ in proposal.pairs), default=0)
    for baseline, target, how in proposal.pairs:
        output.write_line(f"{baseline:<{width}}  {target}  ({how})")


def _write(args: argparse.Namespace, proposal: "MapProposal", text: str) -> None:
    if args.out is None:
        output.write_lines(text)
        return
    if not (proposal.renames or proposal.splits):
        diagnostics.warn(f"no correspondence was found, so {args.out} was not written")
        output.write_lines(text)
        return
    temporary = args.out.with_name(f".{args.out.name}.{os.getpid()}")
    try:
        temporary.write_text(text + "\n")
        temporary.replace(args.out)
    except OSError as error:
        raise ConfigError(f"cannot write {args.out}: {error.strerror}") from None


def _report(args: argparse.Namespace, proposal: "MapProposal") -> None:
    baseline, target = proposal.num_unmatched
    diagnostics.note(
        f"{plural(proposal.num_matched, 'site')} matched by name; {baseline:,} of the baseline and {target:,} of the "
        "target unmatched"
    )
    proposed = f"{proposal.summary} proposed"
    if proposal.ambiguous:
        proposed += f", {len(proposal.ambiguous):,} undecided"
    if any(proposal.num_unmatched):
        diagnostics.note(proposed)
    words = ["tapscope", "diff", args.baseline, args.target]
    words += ["--strip-prefix", proposal.prefix] if proposal.prefix else []
    words += ["--map", str(args.out)] if args.out is not None and (proposal.renames or proposal.splits) else []
    if len(words) > 4:
        diagnostics.note(f"next: {shlex.join(words)}")
