"""Overlap check: an error for two runs that have nothing in common."""

from collections.abc import Sequence

from tapscope.comparator.alignment.layout import is_mask
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.matching.match import Pair
from tapscope.core.errors import NothingInCommonError
from tapscope.run_format.run import Run


def _differ(pair: Pair) -> bool:
    """Whether the first firings of both sides differ, as far as hashes tell."""
    assert pair.baseline is not None
    assert pair.target is not None
    one, two = pair.baseline.first, pair.target.first
    return one.hash is not None and two.hash is not None and (one.hash, one.shape) != (two.hash, two.shape)


def check_overlap(baseline: Run, target: Run, pairs: Sequence[Pair], rows: RowMap, hint: str = "") -> None:
    """Raise NothingInCommonError if no record, site or token row of the runs matches.

    ``hint`` says what would make names match.
    """
    for run in (baseline, target):
        if not run.records:
            came = run.problems[0] if run.problems else f"see tapscope info {run.path}"
            raise NothingInCommonError(
                f"{run.path} holds no record{'' if run.closed and run.ranks else ' yet'}; {came}"
            )
    if not any(p.baseline and p.target for p in pairs):
        examples = [next((s.site for p in pairs if (s := getattr(p, side))), "none") for side in ("baseline", "target")]
        advice = hint or (
            "were they captured from models of one architecture? (--map FILE states which names correspond)"
        )
        raise NothingInCommonError(
            f"{baseline.path} and {target.path} have no site in common: "
            f"e.g. {examples[0]} against {examples[1]}; {advice}"
        )
    if rows.known and not rows.num_pairs:
        facts = [*rows.problems, *(f"request {f.request} diverges at position {f.position}" for f in rows.forks)]
        why = facts[0] if facts else "their steps hold different positions"
        if masks := [p for p in pairs if p.baseline and p.target and is_mask(p.baseline.site) and _differ(p)]:
            why = f"{masks[0].baseline.site if masks[0].baseline else ''} marks different tokens in each run; {why}"
        raise NothingInCommonError(
            f"{baseline.path} and {target.path} have no token row in common: {why}; capture both with the same prompts "
            "and request ids"
        )
