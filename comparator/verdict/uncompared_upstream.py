"""Uncompared upstream: culprits downstream of sites that were recorded but not compared, and may be to blame.

If the inputs of a culprit were not captured, the latest preceding sites stand for them. The error may begin at a site
between these and the culprit that was excluded: by ``--site``, ``--skip`` or ``--layers``, or because its rows or
shapes do not match.
"""

from collections.abc import Mapping, Sequence

from msgspec import structs

from tapscope.comparator.alignment.layout import is_parameter
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.localise import Divergence
from tapscope.core import formatting
from tapscope.core.dtypes import is_float
from tapscope.run_format.run import Run

_GUESSED = ("not captured", "unknown")
"""States of a divergence's inputs for which other sites stand in."""


def doubted(
    divergences: Sequence[Divergence],
    everything: Sequence[PairResult],
    inputs: Mapping[int, Sequence[str]],
    target: Run,
) -> list[Divergence]:
    """The divergences, uncertain if such a site directly precedes them; ``inputs``: order of a finding -> the target's
    names of the sites that stand for its inputs."""
    if not any(each.is_certain and each.inputs in _GUESSED for each in divergences):
        return list(divergences)
    known = {name for one in everything if not (one.exclusion_reason or one.problem) for name in one.names}
    begun: dict[str, int] = {}
    left_out: dict[str, int] = {}
    for place, site in enumerate(target.records.sites):
        begun.setdefault(site, seq := target.records.seq_at(place))
        kind = target.records.kinds[target.records.kind[place]]
        if site not in known and is_float(kind.dtype) and kind.pass_ == "forward" and not is_parameter(site):
            left_out.setdefault(site, seq)
    return [_doubted(each, begun, left_out, inputs.get(each.finding.order, ())) for each in divergences]


def _doubted(
    one: Divergence, begun: Mapping[str, int], left_out: Mapping[str, int], before: Sequence[str]
) -> Divergence:
    side = one.finding.target
    if not one.is_certain or one.inputs not in _GUESSED or side is None or side.site not in begun:
        return one
    first = min((begun[name] for name in before if name in begun), default=-1)
    between = [site for site, seq in left_out.items() if first < seq < begun[side.site]]
    if not between:
        return one
    more = f" and {formatting.plural(len(between) - 1, 'more site')}" if len(between) > 1 else ""
    evidence = f"{one.evidence}; {between[-1]}{more} upstream of it were recorded but not compared"
    return structs.replace(
        one, is_certain=False, evidence=evidence.replace(" were", " was", 1) if not more else evidence
    )
