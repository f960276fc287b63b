"""Comparison flags shared by `diff`, `view` and other commands."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tapscope.core.deprecation import deprecated_flag
from tapscope.core.errors import ConfigError, SiteError
from tapscope.core.site import parse_ranges

if TYPE_CHECKING:
    from tapscope.comparator import CompareOptions


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for selection, matching and tolerances."""
    _add_selection(parser)
    _add_matching(parser)
    _add_tolerances(parser)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    selection = parser.add_argument_group("selection, on both runs")
    selection.add_argument(
        "--site",
        metavar="GLOB",
        action="append",
        default=[],
        help="only matching sites; re:REGEX for a regular expression (repeatable)",
    )
    selection.add_argument(
        "--skip", metavar="GLOB", action="append", default=[], help="skip matching sites (repeatable)"
    )
    selection.add_argument("--layers", metavar="LIST", type=_numbers, help="only these layers, e.g. 0-3,27")
    selection.add_argument("--steps", metavar="LIST", type=_numbers, help="only these steps")
    selection.add_argument(
        "--shift-steps",
        metavar="N",
        type=int,
        default=0,
        help="match step n of the baseline with step n + N of the target (runs without token ids)",
    )
    selection.add_argument(
        "--concat-steps",
        action="store_true",
        help="for runs without token ids: concatenate the steps of each site, so that chunk sizes may differ",
    )
    selection.add_argument("--ranks", metavar="LIST", type=_numbers, help="only these ranks")


def _add_matching(parser: argparse.ArgumentParser) -> None:
    matching = parser.add_argument_group("matching")
    matching.add_argument(
        "--map", metavar="FILE", action="append", default=[], help="YAML: rename, split, join, dims, rules (repeatable)"
    )
    matching.add_argument(
        "--strip-prefix",
        metavar="PREFIX",
        action="append",
        default=[],
        help="remove this prefix from module names; baseline:... or target:... for one run (repeatable)",
    )
    matching.add_argument(
        "--dims",
        metavar="GLOB=DIMS",
        action="append",
        default=[],
        help="axes and shards of these sites, e.g. 'mlp:out=t h[tp:partial]'; baseline:... or target:... for one run",
    )
    matching.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        action="append",
        default=[],
        help="device mesh of a run that records none, e.g. pp=2,tp=4",
    )


def _add_tolerances(parser: argparse.ArgumentParser) -> None:
    tolerances = parser.add_argument_group("tolerances")
    tolerances.add_argument(
        "--rtol",
        metavar="X",
        type=float,
        help="use a fixed tolerance instead of the noise floor: |target - baseline| <= atol + rtol * |baseline|",
    )
    tolerances.add_argument("--atol", metavar="X", type=float, help="absolute part of the fixed tolerance")
    noise_run = tolerances.add_argument(
        "--noise-run",
        metavar="RUN",
        default="auto",
        help="a repeat of the baseline that differs by rounding only (bf16, another batch split); "
        "its distance is the floor; auto (default): a model of rounding",
    )
    deprecated_flag(tolerances, "--floor", noise_run)
    tolerances.add_argument(
        "--margin", metavar="X", type=float, help="tolerance as a multiple of the distance of --noise-run (default: 3)"
    )
    tolerances.add_argument(
        "--rule",
        metavar="REGEX=EXPR",
        action="append",
        default=[],
        help="judge these sites by a condition such as 'lm_head=rel < 1e-3 and max_abs < 0.1'; the first match "
        "decides (repeatable)",
    )
    tolerances.add_argument(
        "--detail",
        action="store_true",
        help="also report ULPs, percentiles, channels, logit agreement and router flips of unequal sites; slower",
    )
    tolerances.add_argument(
        "--allow-differ",
        metavar="GLOB",
        action="append",
        default=[],
        help="sites that may differ, such as '*:in[position_ids]': reported, not counted (repeatable)",
    )
    tolerances.add_argument(
        "--allow-missing",
        metavar="GLOB",
        action="append",
        default=[],
        help="sites that one run may lack, wholly or in some steps: reported, not counted as missing (repeatable)",
    )
    tolerances.add_argument(
        "--verify",
        action="store_true",
        help="read every payload and check its hash, even where both runs recorded the same hash",
    )
    tolerances.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a tokenizer.json, or a directory with one, to show the text of tokens "
        "(default: the one of the run's model, if it is a local directory)",
    )
    tolerances.add_argument(
        "--allow-partial", action="store_true", help="exit 0 if the data are partial but everything compared agrees"
    )
    tolerances.add_argument(
        "--fail-on",
        metavar="LIST",
        help="conditions that make the exit code 1: differs,nonfinite,shape,partial (the default), missing (a site is "
        "in one run only), inexact (not equal, even within rounding), warning; or default, or none",
    )


def row_count(text: str) -> int:
    """Parse the value of ``--top``, an integer of at least 1; for argparse."""
    if not text.isdecimal() or not (value := int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows; give 1 or more")
    return value


def _numbers(text: str) -> frozenset[int]:
    try:
        return parse_ranges(text)
    except SiteError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def options_of(args: argparse.Namespace) -> "CompareOptions":
    """Build the CompareOptions from the flags; raises ConfigError for an invalid tolerance, map file, dims or mesh."""
    from tapscope.comparator import CompareOptions
    from tapscope.comparator.options import fail_on
    from tapscope.comparator.options.map_file import read_maps
    from tapscope.comparator.options.options import MARGIN
    from tapscope.comparator.options.overrides import parse_dims, parse_mesh
    from tapscope.comparator.verdict.rules import parse_rule

    if args.margin is not None and args.noise_run == "auto":
        raise ConfigError("--margin needs --noise-run RUN: it is how many times that run's distance is allowed")
    if args.noise_run != "auto" and (flag := "--rtol" if args.rtol is not None else "--atol" * (args.atol is not None)):
        raise ConfigError(f"{flag} and --noise-run are two ways to judge the same values; give one of them")
    return CompareOptions(
        sites=tuple(args.site),
        skip=tuple(args.skip),
        layers=args.layers,
        steps=args.steps,
        shift_steps=args.shift_steps,
        concat_steps=args.concat_steps,
        ranks=args.ranks,
        rtol=args.rtol,
        atol=args.atol,
        mapping=read_maps(args.map),
        strip_prefix=tuple(args.strip_prefix),
        dims=tuple(map(parse_dims, args.dims)),
        mesh=tuple(map(parse_mesh, args.mesh)),
        noise_run=None if args.noise_run == "auto" else Path(args.noise_run),
        margin=MARGIN if args.margin is None else args.margin,
        rules=tuple(map(parse_rule, args.rule)),
        allow_differ=tuple(args.allow_differ),
        allow_missing=tuple(args.allow_missing),
        verify=args.verify,
        tokenizer=None if args.tokenizer is None else Path(args.tokenizer),
        detail=args.detail,
        allow_partial=args.allow_partial,
        fail_on=fail_on.DEFAULT if args.fail_on is None else fail_on.parse_fail_on(args.fail_on),
    )


def changed_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of :func:`add_flags` whose values differ from the defaults, e.g. ``--rtol``."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    defaults = vars(parser.parse_args([]))
    return [f"--{name.replace('_', '-')}" for name, value in defaults.items() if getattr(args, name) != value]
