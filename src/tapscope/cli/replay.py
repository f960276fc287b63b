"""`tapscope replay`: run the target's modules on the inputs recorded in the baseline."""

import argparse
from typing import TYPE_CHECKING

from msgspec import to_builtins

from tapscope.cli import compare_flags, diagnostics, output, prompts, reference
from tapscope.core import extras
from tapscope.core.formatting import listed, number, plural
from tapscope.sources import open_run

if TYPE_CHECKING:
    from tapscope.replay import ReplayReport

SCHEMA = "tapscope.replay/1"


class ReplayCommand:
    """Run the target's modules on the inputs that the baseline recorded.

      $ tapscope dump MODEL -o base --backend hf --prompt 'def main():'
      $ tapscope dump CHANGED -o target --backend hf --tokens-from base
      $ tapscope replay base target --model CHANGED

    A module whose outputs still differ has an error of its own (local), or contains a local module. If its outputs then
    agree, the error is inherited. Both runs need the values of inputs (--keep full). transformers runs the model on one
    rank.

    Exit codes: 0 no module has an error of its own and the runs agree, 1 they differ, 2 usage, 3 unreadable data.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("baseline", metavar="BASELINE", help="run whose inputs are used")
        parser.add_argument("target", metavar="TARGET", help="run of MODEL, under test")
        parser.add_argument("--model", required=True, metavar="MODEL", help="checkpoint that computed TARGET")
        parser.add_argument(
            "--dtype",
            default="auto",
            choices=("auto", "float32", "bfloat16", "float16"),
            help="dtype of the weights (default: auto, as in the checkpoint)",
        )
        parser.add_argument("--json", action="store_true", help="one JSON object per line: module, summary")
        compare_flags.add_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Replay the modules and print the verdicts; returns the exit code."""
        extras.require("hf", "tapscope replay")
        from tapscope.replay import replay

        options = compare_flags.options_of(args)
        work = prompts.of_run(args.baseline)
        with open_run(args.baseline) as baseline, open_run(args.target) as target:
            model = reference.load(args.model, args.dtype)
            ids = [list(map(int, prompt)) for prompt in work.prompts]
            report = replay(
                baseline, target, model, lambda dumper: reference.generate(model, ids, work, dumper), options
            )
        if args.json:
            _print_json(report)
        else:
            _print(report)
        return report.exit_code


def _print(report: "ReplayReport") -> None:
    shown = [one for one in report.modules if one.verdict in ("local", "contains", "inherited")]
    width = max((len(one.module) for one in shown), default=0)
    if shown:
        output.write_line(f"{'verdict':<10} {'module':<{width}}  {'err/floor':>9}  on the baseline's inputs")
    for one in shown:
        output.write_line(
            f"{one.verdict:<10} {one.module:<{width}}  {number(one.ratio):>9}  {number(one.local_ratio)} × the floor"
        )
    skipped = report.of("not_replayed")
    by_reason: dict[str, list[str]] = {}
    for one in skipped:
        by_reason.setdefault(one.reason, []).append(one.module)
    for reason, modules in by_reason.items():
        more = f" and {len(modules) - 1:,} more (--json lists them) were" if len(modules) > 1 else " was"
        diagnostics.warn(f"{modules[0]}{more} not replayed: {reason}")
    verdicts = {"local": "local", "contains": "contain a local one", "inherited": "inherited", "agrees": "agree"}
    counts = ", ".join(f"{len(report.of(verdict))} {words}" for verdict, words in verdicts.items())
    output.write_line(f"modules   {counts}, {len(skipped)} not replayed")
    local = [one.module for one in report.of("local")]
    if local:
        inside = any(one.module.startswith(f"{module}.") for module in local for one in skipped)
        what = "has an error of its own" if len(local) == 1 else "have errors of their own"
        unknown = "; not all modules inside were replayed" if inside else ""
        output.write_line(f"what      {listed(local, 3)} {what}{unknown}")
    elif report.report.num_bad:
        output.write_line(
            "what      no replayed module has an error of its own, but the runs differ: the cause is outside of modules"
        )
    else:
        output.write_line(f"what      {plural(len(report.modules) - len(skipped), 'module')} agree")


def _print_json(report: "ReplayReport") -> None:
    for one in report.modules:
        output.write_json({"type": "module", "schema": SCHEMA, **to_builtins(one)})
    summary = {v: len(report.of(v)) for v in ("local", "contains", "inherited", "agrees", "not_replayed")}
    local = [one.module for one in report.of("local")]
    output.write_json({"type": "summary", "schema": SCHEMA, **summary, "modules": local, "exit_code": report.exit_code})
