"""`tapscope check-determinism`: run the same steps twice and compare the recorded values bit for bit."""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import to_builtins

from tapscope.cli import capture_flags, diagnostics, dump, output, prompts
from tapscope.core.errors import DataError, UsageError
from tapscope.core.formatting import listed, plural
from tapscope.core.gc_control import gc_paused
from tapscope.run_format.directory import clear_run
from tapscope.sources import open_run

if TYPE_CHECKING:
    from tapscope.determinism import Unequal
    from tapscope.run_format.run import Run

SCHEMA = "tapscope.determinism/1"
_MAX_LISTED = 10
_RUN = "{run}"


class CheckDeterminismCommand:
    """Run the same steps twice, and report the first value that is not bit-equal.

      $ tapscope check-determinism MODEL --prompt 'def main():'
      $ tapscope check-determinism --runs 5 --command python generate.py --batch 8
      $ tapscope check-determinism --command tapscope dump M -o {run} --prompt Hi

    MODEL runs twice in this process. --command is started twice as a process, with TAPSCOPE_ENABLED, TAPSCOPE_DIR
    and TAPSCOPE_EXP_NAME set. Its program calls tapscope.dumper.attach(model), or is vLLM or SGLang with the plugin.
    {run} in an argument is replaced by the directory of the run.

    128-bit hashes are compared, so no values are stored. --keep full -o DIR stores them for tapscope diff.

    Exit codes: 0 bit-equal, 1 not bit-equal, 2 usage, 3 nothing or not everything was recorded.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        capture_flags.add_model_flags(parser, nargs="?")
        dump.add_workload_flags(parser)
        capture_flags.add_selection_flags(parser, keep="stats", against=False)
        parser.add_argument(
            "-o",
            "--out",
            type=Path,
            metavar="DIR",
            help="keep the runs, as DIR/run-1, DIR/run-2, ... (default: delete)",
        )
        parser.add_argument("--runs", type=int, default=2, metavar="N", help="number of runs (default: 2)")
        parser.add_argument("--json", action="store_true", help="one JSON object per line: unequal values, summary")
        parser.add_argument(
            "--command",
            nargs=argparse.REMAINDER,
            metavar="WORD",
            help="the rest of the line is the command to run instead of MODEL",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Run the workload repeatedly, compare and print; returns the exit code."""
        if args.runs < 2:
            raise UsageError(f"--runs {args.runs}: must be at least 2")
        if bool(args.command) == bool(args.model):
            raise UsageError("nothing to run: give MODEL and --prompt, or --command PROGRAM [ARG ...]")
        if args.out is None and args.keep == "full":
            raise UsageError("--keep full stores values; give -o DIR to keep them")
        with tempfile.TemporaryDirectory(prefix="tapscope-determinism-") as folder:
            paths = [(args.out or Path(folder)).absolute() / f"run-{i + 1}" for i in range(args.runs)]
            (_run_command if args.command else _run_model)(args, paths)
            return _compare(args, paths)


def _run_model(args: argparse.Namespace, paths: list[Path]) -> None:
    work = prompts.workload(args)
    for i, path in enumerate(paths):
        diagnostics.note(f"run {i + 1} of {len(paths)}")
        dump.record(argparse.Namespace(**{**vars(args), "out": path}), work)


def _run_command(args: argparse.Namespace, paths: list[Path]) -> None:
    if args.prompt or args.prompts or args.tokens_from or args.max_new_tokens:
        raise UsageError("--command determines the prompts; give --prompt and the like to the command")
    selection = capture_flags.rules(args)
    settings = {"TAPSCOPE_ENABLED": "1", "TAPSCOPE_KEEP": selection["keep"]}
    if selection["rules"]:
        settings["TAPSCOPE_RULES"] = json.dumps(selection["rules"])
    for i, path in enumerate(paths):
        clear_run(path, force=args.force)
        diagnostics.note(f"run {i + 1} of {len(paths)}: {' '.join(args.command)}")
        words = [word.replace(_RUN, str(path)) for word in args.command]
        place = {"TAPSCOPE_DIR": str(path.parent), "TAPSCOPE_EXP_NAME": path.name}
        path.parent.mkdir(parents=True, exist_ok=True)
        output.flush()
        try:  # redirect the command's stdout to stderr: stdout is reserved for the result
            code = subprocess.run(words, env=os.environ | settings | place, stdout=2, check=False).returncode
        except OSError as error:
            raise UsageError(f"--command {words[0]}: {error.strerror}") from None
        if code:
            raise DataError(f"run {i + 1} of the command exited with code {code}; nothing was compared")
        if not (path / "run.json").is_file():
            how = f"its program must call tapscope.dumper.attach(model), or write its run to {_RUN}"
            raise DataError(f"the command recorded nothing: {how}")


def _compare(args: argparse.Namespace, paths: list[Path]) -> int:
    from tapscope.determinism import compare_bits

    with gc_paused(), open_run(paths[0]) as first:
        for number, path in enumerate(paths[1:], 2):
            with open_run(path) as other:
                unequal = compare_bits(first, other)
            if unequal or number == len(paths):
                (_print_json if args.json else _print)(first, unequal, number)
                if unequal and args.out is not None and args.keep != "stats":
                    diagnostics.note(f"next: tapscope diff {paths[0]} {path}")
                return diagnostics.ExitCode.DIFFERENT if unequal else diagnostics.ExitCode.OK
    raise AssertionError("unreachable")


def _print(first: "Run", unequal: "list[Unequal]", number: int) -> None:
    values, steps = plural(len(first.records), "value"), plural(len(first.steps), "step")
    if not unequal:
        output.write_line(f"what      bit-equal: {values} of {steps} in {plural(number, 'run')}")
        return
    sites = dict.fromkeys(one.site for one in unequal)
    output.write_line(f"what      not bit-equal in run {number}: {len(unequal):,} of {values}, {steps}")
    output.write_line(f"where     {unequal[0]}")
    others = [site for site in sites if site != unequal[0].site]
    if others:
        output.write_line(f"then      {listed(others, _MAX_LISTED)}")


def _print_json(first: "Run", unequal: "list[Unequal]", number: int) -> None:
    for one in unequal:
        output.write_json({"type": "unequal", "schema": SCHEMA, **to_builtins(one)})
    output.write_json(
        {
            "type": "summary",
            "schema": SCHEMA,
            "bit_equal": not unequal,
            "num_runs": number,
            "num_values": len(first.records),
            "num_steps": len(first.steps),
            "num_unequal": len(unequal),
            "first": to_builtins(unequal[0]) if unequal else None,
        }
    )
