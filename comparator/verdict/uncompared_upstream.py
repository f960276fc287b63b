"""Doubts: culprits in front of which sites were recorded and not compared, so that it may be one of these instead.

Where what went into a culprit was not captured, the latest sites in front of it stand in. What was left out from the
first of these to the culprit may be where the error begins: by ``--site``, ``--skip`` or ``--layers``, or since its
rows or shapes do not meet.
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
"""What divergences say of inputs that others stand in for."""


def doubted(
    divergences: Sequence[Divergence],
    everything: Sequence[PairResult],
    inputs: Mapping[int, Sequence[str]],
    target: Run,
) -> list[Divergence]:
    """The divergences, those not certain that have such a site right in front; ``inputs``: order of a finding -> the
    target's names of what stands in for its inputs."""
    if not any(each.is_certain and each.inputs in _GUESSED for each in divergences):
        return list(divergences)
    known = {name for one in everything if not (one.apart or one.problem) for name in one.names}
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
    evidence = f"{one.evidence}; {between[-1]}{more} in front of it were recorded and not compared"
    return structs.replace(
        one, is_certain=False, evidence=evidence.replace(" were", " was", 1) if not more else evidence
    )
