"""Flags that select the records of a run."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tapscope.core.errors import RuleError, SiteError
from tapscope.core.site import compact_ranges, describe_layers, parse_ranges

if TYPE_CHECKING:
    from tapscope.run_format.records import Records
    from tapscope.run_format.run import Run


def add_selection_flags(parser: argparse.ArgumentParser) -> None:
    """Add --site, --skip, --layers, --steps and --ranks."""
    group = parser.add_argument_group("selection")
    group.add_argument(
        "--site",
        action="append",
        default=[],
        metavar="GLOB",
        help="only matching sites, e.g. 'layers.3.*:out', or 're:REGEX' (repeatable)",
    )
    group.add_argument("--skip", action="append", default=[], metavar="GLOB", help="skip matching sites (repeatable)")
    group.add_argument("--layers", metavar="LIST", help="only these layers, e.g. 0-3,27")
    group.add_argument("--steps", metavar="LIST", help="only these steps, e.g. 0-4")
    group.add_argument("--ranks", metavar="LIST", help="only these ranks, e.g. 0,2")


def numbers(args: argparse.Namespace, name: str) -> frozenset[int] | None:
    """Return the parsed value of ``--layers``, ``--steps`` or ``--ranks``, or None if not given. Raises RuleError."""
    text = getattr(args, name)
    if text is None:
        return None
    with _named(f"--{name}"):
        return parse_ranges(text)


def select(run: "Run", args: argparse.Namespace) -> "Records":
    """Return the records selected by the flags, ordered by rank and sequence; record objects are created on access.

    Raises RuleError if a glob, layer, step or rank matches no record, or if no record matches all flags.
    """
    layers, steps, ranks = (numbers(args, name) for name in ("layers", "steps", "ranks"))
    _check_known(run, "step", steps, {step for _, step in run.records.per_step()} | set(run.steps))
    _check_known(run, "rank", ranks, set(run.ranks))
    with _named("--site or --skip"):
        records = run.matching(args.site, skip=args.skip, layers=layers, steps=steps, ranks=ranks)
    if not records and run.records and (args.site or args.skip or layers or steps or ranks):
        hint = describe_layers(run.records.distinct_sites())
        raise RuleError(f"no record of {run.path} matches all selection flags; {hint} (see: tapscope ls {run.path})")
    return records


def _check_known(run: "Run", noun: str, wanted: frozenset[int] | None, known: set[int]) -> None:
    unknown = sorted((wanted or frozenset()) - known)
    if unknown:
        have = compact_ranges(known) or "none"
        raise RuleError(f"no {noun} {compact_ranges(unknown)} in {run.path}; {noun}s are {have}")


@contextmanager
def _named(flag: str) -> Iterator[None]:
    """Context manager: prefix the error for an invalid pattern or list with the name of the flag."""
    try:
        yield
    except SiteError as error:
        raise RuleError(f"{flag}: {error}") from None
