"""`tapscope bisect`: which modules' weights must be switched for the outputs to agree."""

import argparse
import tempfile
from pathlib import Path

from msgspec import structs

from tapscope.cli import compare_flags, diagnostics, output, prompts, reference
from tapscope.core import extras
from tapscope.core.errors import UsageError
from tapscope.core.formatting import plural
from tapscope.sources import open_run

SCHEMA = "tapscope.bisect/1"


class BisectCommand:
    """Find the modules whose weights must be replaced by the reference's for the outputs to agree with a run.

      $ tapscope dump MODEL -o base --backend hf --prompt 'def main():'
      $ tapscope bisect base --model CHANGED --reference MODEL

    CHANGED computes the tokens of the run with some modules switched to the weights of MODEL, and its logits
    (--output) are judged as in diff. To find k of n modules whose weights differ, it computes the tokens at most
    k * (log2 n + 2) + 2 times. With --state an interrupted search goes on where it was.

    Exit codes: 0 agree with no module switched, 1 modules were found, 2 usage, 3 another cause or
    unreadable data.
    """

    name = "bisect"

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument(
            "baseline", metavar="BASELINE", help="run of the reference, with values or sketches of --output"
        )
        parser.add_argument("--model", required=True, metavar="MODEL", help="checkpoint under test")
        parser.add_argument("--reference", required=True, metavar="MODEL", help="checkpoint with the right weights")
        parser.add_argument(
            "--dtype",
            default="auto",
            choices=("auto", "float32", "bfloat16", "float16"),
            help="dtype of both models (default: auto, as in the checkpoint)",
        )
        parser.add_argument(
            "--output", default="lm_head:out", metavar="SITE", help="site to judge (default: lm_head:out)"
        )
        parser.add_argument(
            "--max-runs", type=int, metavar="N", help="compute the tokens at most N times (default: no limit)"
        )
        parser.add_argument(
            "--state",
            type=Path,
            metavar="FILE",
            help="keep the answer of each run in FILE, and resume its search",
        )
        parser.add_argument("--json", action="store_true", help="one JSON object: modules, num_runs, num_modules")
        compare_flags.add_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Search and print; returns the exit code."""
        extras.require("hf", "tapscope bisect")
        from tapscope.bisect import BisectState, bisect, check_related, differing_modules, switched_weights
        from tapscope.comparator import compare_open_runs
        from tapscope.dumper import Dumper

        if args.max_runs is not None and args.max_runs < 1:
            raise UsageError(f"--max-runs {args.max_runs}: must be at least 1")
        if args.site:
            raise UsageError("bisect judges one site: give --output SITE instead of --site")
        options = structs.replace(compare_flags.options_of(args), sites=(args.output,))
        work = prompts.of_run(Path(args.baseline))
        if not (args.map or args.strip_prefix):  # otherwise it may have another name there
            with open_run(args.baseline) as baseline:
                baseline.select([args.output])
        ids = [list(map(int, prompt)) for prompt in work.prompts]
        model, right = reference.load(args.model, args.dtype), reference.load(args.reference, args.dtype)
        names = differing_modules(model, right)
        check_related(model, right)
        state = None
        if args.state is not None:
            search = {each: getattr(args, each) for each in ("baseline", "model", "reference", "dtype", "output")}
            state = BisectState(args.state, search | {"options": repr(options), "modules": names})
        num_runs = 0

        def agrees(switched: frozenset[str]) -> bool:
            nonlocal num_runs
            num_runs += 1
            diagnostics.note(f"run {num_runs}: {len(switched)} of {plural(len(names), 'differing module')} switched")
            with (
                tempfile.TemporaryDirectory(prefix="tapscope-bisect-") as folder,
                switched_weights(model, right, switched),
            ):
                with Dumper(model, f"{folder}/run", keep="off", rules=[f"{args.output}=full"]) as dumper:
                    reference.generate(model, ids, work, dumper)
                with open_run(f"{folder}/run") as run:
                    answer = compare_open_runs(baseline, run, options).report.num_bad == 0
            if state is not None:
                state.add(switched, answer)
            return answer

        with open_run(args.baseline) as baseline:
            found = bisect(names, agrees, args.max_runs, None if state is None else state.answers)
        if args.json:
            output.write_json(
                {
                    "type": "summary",
                    "schema": SCHEMA,
                    "modules": list(found),
                    "num_runs": num_runs,
                    "num_modules": len(names),
                }
            )
        elif found:
            output.write_line(f"what      weights of {', '.join(found)}")
            output.write_line(f"runs      {num_runs}, for {len(found)} of {len(names)} differing modules")
        else:
            output.write_line(f"what      {args.model} agrees with {args.baseline} with no module switched")
        return int(bool(found))
