"""`tapscope bisect`: find the modules whose weights, dtype, attention or kernels must be switched for the outputs to
agree."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from msgspec import structs

from tapscope.cli import compare_flags, diagnostics, output, prompts, reference
from tapscope.core import extras
from tapscope.core.errors import DataError, UsageError
from tapscope.core.formatting import plural
from tapscope.sources import open_run

SCHEMA = "tapscope.bisect/1"
_SEARCH = (
    "baseline", "model", "reference", "reference_dtype", "reference_attention", "reference_kernel",
    "dtype", "attention", "kernel", "output",
)  # fmt: skip
"""Flags that define the search; a state file is only valid for the same values."""
_DTYPES = ("float32", "bfloat16", "float16")
_UNITS = {"weights": "differing module", "dtype": "block", "attention": "attention module", "kernels": "module"}
"""Kind of switch -> noun for the candidate modules."""


class BisectCommand:
    """Find the modules that make a model differ from a run of its reference.

      $ tapscope dump MODEL -o base --backend hf --prompt 'def main():'
      $ tapscope bisect base --model CHANGED --reference MODEL
      $ tapscope bisect base --model M --dtype bfloat16 --reference-dtype float32
      $ tapscope bisect base --model M --attention sdpa --reference-attention eager
      $ tapscope bisect base --model M --kernel ops:f=ops:g --reference-kernel ops:f

    --model runs on the tokens of BASELINE with some modules switched to the reference's weights, dtype, attention or
    kernels. Its logits (--output) are judged as in diff; the search finds the modules that must be switched for them
    to agree.

    Weights are switched per module; dtypes per block (norm, attention, MLP, ...), whose inputs and outputs are cast;
    attention implementations per attention module; kernels (any function that the model calls) per calling module.
    Finding k of n modules takes at most k * (log2 n + 2) + 2 forward passes over the tokens, plus one for dtype,
    attention and kernels. --state resumes an interrupted search.

    Exit codes: 0 agrees with no module switched, 1 modules were found, 2 usage, 3 another cause or unreadable data.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument(
            "baseline", metavar="BASELINE", help="run of the reference, with values or sketches of --output"
        )
        parser.add_argument("--model", required=True, metavar="MODEL", help="checkpoint under test")
        parser.add_argument(
            "--dtype",
            default="auto",
            choices=("auto", *_DTYPES),
            help="dtype of the model (default: auto, as in the checkpoint)",
        )
        parser.add_argument(
            "--attention",
            default="eager",
            metavar="NAME",
            help="attn_implementation of transformers, such as eager, sdpa, flash_attention_2, or a kernel of the Hub "
            "(default: eager)",
        )
        parser.add_argument(
            "--kernel",
            action="append",
            default=[],
            metavar="FUNCTION=OTHER",
            help="call OTHER in place of FUNCTION; each is MODULE:NAME, of a package or a file here (repeatable)",
        )
        switch = parser.add_argument_group("what to switch (exactly one)").add_mutually_exclusive_group(required=True)
        switch.add_argument("--reference", metavar="MODEL", help="weights: checkpoint with the correct ones")
        switch.add_argument("--reference-dtype", choices=_DTYPES, help="dtype: the dtype of the baseline")
        switch.add_argument("--reference-attention", metavar="NAME", help="attention: implementation of the baseline")
        switch.add_argument(
            "--reference-kernel",
            action="append",
            metavar="FUNCTION[=OTHER]",
            help="kernels: the baseline calls OTHER in place of FUNCTION, or FUNCTION itself (repeatable)",
        )
        parser.add_argument(
            "--output", default="lm_head:out", metavar="SITE", help="site to judge (default: lm_head:out)"
        )
        parser.add_argument(
            "--max-runs", type=int, metavar="N", help="run the model at most N times (default: no limit)"
        )
        parser.add_argument(
            "--state",
            type=Path,
            metavar="FILE",
            help="store the result of each run in FILE, and resume its search",
        )
        parser.add_argument("--json", action="store_true", help="one JSON object: modules, num_runs, num_modules")
        compare_flags.add_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Run the search and print the modules; returns the exit code."""
        extras.require("hf", "tapscope bisect")
        from tapscope.bisect import BisectState, bisect
        from tapscope.comparator import compare_open_runs
        from tapscope.dumper import Dumper

        _check_flags(args)
        options = structs.replace(compare_flags.options_of(args), sites=(args.output,))
        work = prompts.of_run(Path(args.baseline))
        if not (args.map or args.strip_prefix):  # with a map or prefix, the baseline may use another name
            with open_run(args.baseline) as baseline:
                baseline.select([args.output])
        ids = [list(map(int, prompt)) for prompt in work.prompts]

        @contextmanager
        def computed(model: Any, *rules: str) -> Iterator[str]:
            with tempfile.TemporaryDirectory(prefix="tapscope-bisect-") as folder:
                with Dumper(model, f"{folder}/run", keep="off", rules=rules) as dumper:
                    try:
                        reference.generate(model, ids, work, dumper)
                    except (RuntimeError, TypeError, ValueError) as error:  # e.g. attention lacks the dtype
                        reason = reference.reason(error)
                        raise DataError(f"{args.model} cannot compute this: {reason}") from None
                yield f"{folder}/run"

        model = reference.load(args.model, args.dtype, attention=args.attention)
        what, names, switched_to = _switch(args, model, computed)
        state = None
        if args.state is not None:
            search = {each: getattr(args, each) for each in _SEARCH}
            state = BisectState(args.state, search | {"options": repr(options), "modules": names})
        num_runs = 0

        def agrees(switched: frozenset[str]) -> bool:
            nonlocal num_runs
            num_runs += 1
            diagnostics.note(f"run {num_runs}: {len(switched)} of {plural(len(names), _UNITS[what])} switched")
            with switched_to(switched), computed(model, f"{args.output}=full") as folder, open_run(folder) as run:
                answer = compare_open_runs(baseline, run, options).report.num_bad == 0
            if state is not None:
                state.add(switched, answer)
            return answer

        with open_run(args.baseline) as baseline:
            modules = bisect(names, agrees, args.max_runs, None if state is None else state.answers)
        _write(args, what, modules, len(names), num_runs)
        return int(bool(modules))


_Switched = Callable[[frozenset[str]], AbstractContextManager[object]]
"""Module paths -> context manager inside which these modules are switched."""


def _check_flags(args: argparse.Namespace) -> None:
    if args.max_runs is not None and args.max_runs < 1:
        raise UsageError(f"--max-runs {args.max_runs}: must be at least 1")
    if args.kernel and not args.reference_kernel:
        raise UsageError("--kernel needs --reference-kernel: what to switch it to")
    if args.site:
        raise UsageError("bisect judges one site: give --output SITE instead of --site")


def _write(args: argparse.Namespace, what: str, modules: Sequence[str], num_candidates: int, num_runs: int) -> None:
    if args.json:
        output.write_json(
            {
                "type": "summary",
                "schema": SCHEMA,
                "switched": what,
                "modules": list(modules),
                "num_runs": num_runs,
                "num_modules": num_candidates,
            }
        )
    elif modules:
        output.write_line(f"what      {what} of {', '.join(modules)}")
        output.write_line(f"runs      {num_runs}, for {len(modules)} of {plural(num_candidates, _UNITS[what])}")
    else:
        output.write_line(f"what      {args.model} agrees with {args.baseline} with no module switched")


def _switch(
    args: argparse.Namespace, model: Any, computed: Callable[[Any], AbstractContextManager[str]]
) -> tuple[str, list[str], _Switched]:
    """Return the kind of switch, the candidate modules and a function that applies a switch.

    ``computed`` is a context manager factory that runs the recorded tokens through a model.
    """
    from tapscope import bisect

    if args.reference is not None:
        right = reference.load(args.reference, args.dtype, attention=args.attention)
        names = bisect.differing_modules(model, right)
        bisect.check_related(model, right)
        return "weights", names, lambda paths: bisect.switched_weights(model, right, paths)
    if args.reference_kernel:
        return "kernels", *_kernels(args, model, computed)
    right = reference.load(
        args.model, args.reference_dtype or args.dtype, attention=args.reference_attention or args.attention
    )
    with bisect.recorded_masks(right) as masks, computed(right):
        pass
    what = "dtype" if args.reference_dtype else "attention"
    names = bisect.blocks(model) if args.reference_dtype else bisect.attention_modules(masks)
    return what, names, lambda paths: bisect.switched_modules(model, right, paths, masks)


def _kernels(
    args: argparse.Namespace, model: Any, computed: Callable[[Any], AbstractContextManager[str]]
) -> tuple[list[str], _Switched]:
    """Return the modules that call the kernels and a function that switches them."""
    from tapscope.kernel_switch import find_kernels, switched_kernels

    if "" not in sys.path:
        sys.path.append("")  # like python -m, allow kernels defined in the current directory
    kernels = find_kernels(args.kernel, args.reference_kernel)
    with switched_kernels(model, kernels, frozenset()) as callers, computed(model):
        pass
    unused = next((function for function, paths in callers.items() if not paths), None)
    if unused is not None:
        raise DataError(f"no module of {args.model} calls {unused}; name the function as its modules look it up")
    names = list(dict.fromkeys(path for paths in callers.values() for path in paths))
    return names, lambda paths: switched_kernels(model, kernels, paths)
