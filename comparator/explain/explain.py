"""Explain: try every hypothesis on the values of the divergences, and keep the one that clearly wins."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.alignment.prepare import Preparer
from tapscope.comparator.explain.activations import activations
from tapscope.comparator.explain.attended import attended
from tapscope.comparator.explain.biased import scaled_channels, scaled_weights
from tapscope.comparator.explain.casts import casts, missing, overflow
from tapscope.comparator.explain.columns import input_columns, is_linear
from tapscope.comparator.explain.context import Kin
from tapscope.comparator.explain.error_region import Damage, find_damage, visible
from tapscope.comparator.explain.experts import expert_weights
from tapscope.comparator.explain.hypothesis_test import Trial, remains, share_of
from tapscope.comparator.explain.input_ranges import input_ranges, is_constant_by_step, shifted_inputs
from tapscope.comparator.explain.limits import caps, clamps, clamps_of_tokens
from tapscope.comparator.explain.masks import masks
from tapscope.comparator.explain.moves import moves, shifts
from tapscope.comparator.explain.norms import norms
from tapscope.comparator.explain.order import orders
from tapscope.comparator.explain.positions import positions
from tapscope.comparator.explain.region_text import describe
from tapscope.comparator.explain.related_sites import lost_summand, relatives, summands, unsummed
from tapscope.comparator.explain.rotary import turns
from tapscope.comparator.explain.router import routed
from tapscope.comparator.explain.sample import Sample, has_one_width, take
from tapscope.comparator.explain.scale import constants, offsets, scales
from tapscope.comparator.explain.tables import table
from tapscope.comparator.explain.trained import trained
from tapscope.comparator.explain.weights import other_weights
from tapscope.comparator.noise_floor.node import Inputs
from tapscope.comparator.pair_analysis.pair_result import Examined
from tapscope.comparator.runs.modules import is_within
from tapscope.comparator.verdict.explanation import Explanation, Tested
from tapscope.comparator.verdict.localise import Divergence
from tapscope.core.errors import DataError

Array = np.ndarray[Any, Any]

WINS = 0.9
"""Share of the error that a hypothesis must remove to be reported."""
MARGIN = 2.0
"""What a less flexible hypothesis leaves over may be this many times what a more flexible one leaves."""
MAX_LEFT = 2.5
"""What a hypothesis leaves over may be this many times what rounding leaves: else something else is wrong, too."""
ALL = 0.999
"""A share of the error beyond which that does not matter: what errors of inputs become is not known so well."""
SLACK = 0.01
"""Share that is left over anyhow, so that two hypotheses that both leave less are equally good."""
MAX_EXPLAINED = 6
"""Divergences that are explained; later ones are rarely anybody's question."""
MAX_LISTED = 8
_BY_LINE = ("channel", "token")
"""Families with a number for each line: theirs is 1 or 0 wherever nothing differs."""
MIN_DIFFERENT = 4
"""Values that must differ from each other before agreement means anything."""


class Context(Struct, frozen=True):
    """What explaining needs of a comparison."""

    examined: Sequence[Examined]
    matched: Sequence[int]
    """Indices of the examined sites that are nodes."""
    inputs: Sequence[Inputs]
    """By node."""
    preparer: Preparer


def explain(divergences: Sequence[Divergence], context: Context) -> list[Divergence]:
    """The divergences, the first ones with an explanation where there is one."""
    found = []
    for number, divergence in enumerate(divergences):
        why = _explain(divergence, context) if number < MAX_EXPLAINED else None
        found.append(_blamed(structs.replace(divergence, explanation=why)))
    return found


def _blamed(divergence: Divergence) -> Divergence:
    """Of a part or the module around it, the one around where the error is another site's value: it adds them up."""
    why, module, others = divergence.explanation, divergence.module, divergence.others
    if why is None or why.name != "summand" or len(others) != 1 or not is_within(module, others[0]):
        return divergence
    return structs.replace(divergence, module=others[0], others=())


def _explain(divergence: Divergence, context: Context) -> Explanation | None:
    order = divergence.finding.order
    if divergence.finding.basis != "values" or order not in context.matched:
        return None
    one, node = context.examined[order], context.matched.index(order)
    ready = context.preparer.prepare(one.pair)
    if not ready.plan.joins:
        return None
    try:
        runs = context.preparer.baseline, context.preparer.target
        found = masks(one.site, ready, context.preparer.row_map) or trained(one, runs, divergence.step)
        if found is not None:
            return found
        if "bool" in {ready.left[0].dtype, ready.right[0].dtype}:
            return None
        if not has_one_width(ready):
            return None
        sample = take(ready, context.preparer.row_map, divergence.place, is_integer=one.is_exact)
        sample = replace(sample, site=one.site)
        kin = Kin(
            context.preparer, context.examined, [context.matched[i] for i in context.inputs[node].nodes], one, sample
        )
        rank = None if divergence.place is None else divergence.place.rank
        replica = kin.replica(rank)
        if replica is not None:
            sample = replace(sample, target=replica, ranks=np.full(len(sample.ranks), rank))
        if (counted := positions(sample, context.preparer.row_map.requests)) is not None:
            return counted
        inherited = _inherited(context, node)
        known = attended(one, kin.sites, kin)
        if replica is None:
            return known or _of_summand(sample, inherited, kin)
        known = known or _try_all(sample, inherited, kin, is_replica=True)
        return None if known is None else _of_rank(known, rank)
    except DataError:  # bytes that cannot be read are a finding of their own
        return None


def _of_rank(explanation: Explanation, rank: int | None) -> Explanation:
    """What was found in one rank's values, with that rank."""
    extent = explanation.extent
    if not explanation.is_clear:
        return explanation
    said = extent if "rank" in extent else f"{extent} (of rank {rank})" if extent else f"rank {rank}"
    return structs.replace(explanation, extent=said)


def _of_summand(sample: Sample, inherited: float, kin: Kin) -> Explanation | None:
    """What explains the site's values; of a sum over ranks that nothing explains as a whole what the one rank's
    summand is beside what the other ranks leave of the baseline."""
    whole = _try_all(sample, inherited, kin, is_replica=False)
    parts = list(kin.parts()) if whole is None or not whole.is_clear else []
    total = np.sum([part.values for part in parts], axis=0)
    found = []
    for part in parts:
        rest = sample.baseline - (total - part.values)
        if not np.isfinite(rest).all() or not rest.any():
            continue
        size = float(np.sqrt((sample.baseline**2).sum() / (rest**2).sum()))
        alone = replace(sample, baseline=rest, target=part.values)
        damage = find_damage(alone, float(np.hypot(inherited, size * inherited)), kin.sizes, kin.head_dims)
        winner, tested = (None, ()) if damage is None else choose(damage, _of_values(damage, kin))
        if damage is not None and winner is not None:
            extent = describe(damage, kin.requests, kin.padded)
            whose = f"the summand of rank {part.rank}"
            extent = f"{extent} of {whose}" if extent else whose
            found.append(Explanation(winner.name, winner.sentence, winner.share, extent, tested, len(rest)))
    return found[0] if len(found) == 1 else whole


def _of_values(damage: Damage, kin: Kin) -> Iterator[Trial]:
    """Hypotheses about a summand: its ranks' sum is no scale of it."""
    return (trial for trial in hypotheses(damage, kin.requests, kin.thetas) if trial.name != "all-reduce")


def _inherited(context: Context, node: int) -> float:
    """Relative error of what went into the culprit."""
    found = [context.examined[context.matched[i]] for i in context.inputs[node].nodes]
    errors = [one.numbers.rel_l2 for one in found if one.numbers is not None and one.spread is not None]
    return max((e for e in errors if np.isfinite(e)), default=0.0)


@np.errstate(all="ignore")  # values may be as large as their type allows: what overflows explains nothing
def _try_all(sample: Sample, inherited: float, kin: Kin, *, is_replica: bool) -> Explanation | None:
    damage = find_damage(sample, inherited, kin.sizes, kin.head_dims)
    if damage is None:
        return None
    lost = overflow(damage.before, damage.after)
    if lost:
        return Explanation("overflow", lost, 1.0, "", (), len(sample.baseline))
    if said := missing(damage.before, damage.after, damage.noise):
        where = describe(damage, kin.requests, kin.padded)
        return Explanation("not finite", said, 0.0, where, (), len(sample.baseline))
    if (told := table(damage, kin.thetas, kin.requests, kin.padded)) is not None:
        return told
    if (known := routed(damage, kin.sites, kin.configs)) is not None:
        where = describe(replace(damage, columns=np.arange(sample.baseline.shape[1])), kin.requests, kin.padded)
        return Explanation(known.name, known.sentence, known.share, where, (), len(sample.baseline))
    winner, tested = choose(damage, _trials(damage, kin, is_replica=is_replica))
    if winner is not None and winner.name == "token offset" and is_linear(sample.site):
        if (added := shifted_inputs(damage, kin.sites)) is not None:
            winner = Tested("input columns", added, winner.share)
        elif not is_constant_by_step(damage):
            winner = None  # an output's summand is no function of its token
    if winner is not None:
        extent = describe(_extended(damage, winner, kin), kin.requests, kin.padded)
        return Explanation(winner.name, winner.sentence, winner.share, extent, tested, len(sample.baseline))
    parts = list(kin.parts())
    if (rank := lost_summand(damage, parts)) is not None:
        whole = replace(damage, rows=np.arange(len(sample.baseline)))
        where = describe(whole if lost_summand(whole, parts) == rank else damage, kin.requests, kin.padded)
        said = f"the summand of rank {rank} is zero"
        return Explanation("lost summand", said, 0.0, where, tested, len(sample.baseline))
    if (known := expert_weights(damage, kin.sites)) is not None:
        return Explanation(known.name, known.sentence, known.share, "", tested, len(sample.baseline))
    extent = describe(damage, kin.requests, kin.padded)
    if (known := input_ranges(damage, kin.sites)) is not None:
        where = describe(replace(damage, rows=np.arange(len(sample.baseline))), (), frozenset())
        return Explanation(known.name, known.sentence, known.share, where, tested, len(sample.baseline))
    return Explanation("", "", 0.0, extent, tested, len(sample.baseline))


def _extended(damage: Damage, winner: Tested, kin: Kin) -> Damage:
    """The damage with the spared rows, and columns, that obey the winner as well: it just changes nothing that shows
    there. Of a number for each channel or token the columns are left out in which nothing shows."""
    line = winner.name.partition(" ")[0]
    by_line = line in _BY_LINE
    rows, columns = map(np.arange, damage.sample.baseline.shape)
    wider = [] if line == "token" else [replace(damage, rows=rows)]
    wider = wider if by_line else [replace(damage, rows=rows, columns=columns), *wider]
    for one in wider if not damage.is_everywhere else ():
        if any(
            trial.name == winner.name and share_of(one, trial.values) > winner.share - SLACK
            for trial in _trials(one, kin, is_replica=False)
        ):
            damage = one
            break
    return visible(damage) if by_line else damage


def hypotheses(damage: Damage, requests: Sequence[str], thetas: Sequence[float]) -> Iterator[Trial]:
    """Every hypothesis that needs the pair's values alone; ``thetas`` are bases of RoPE that the runs name."""
    yield from constants(damage)
    if np.unique(damage.before).size < MIN_DIFFERENT:
        return  # a constant is a scale, an offset and a copy of anything
    yield from scales(damage)
    yield from offsets(damage)
    yield from shifts(damage)
    yield from moves(damage, requests)
    yield from orders(damage)
    yield from casts(damage)
    yield from clamps(damage)
    yield from clamps_of_tokens(damage)
    yield from caps(damage)
    yield from turns(damage, thetas)


def _trials(damage: Damage, kin: Kin, *, is_replica: bool) -> Iterator[Trial]:
    yield from hypotheses(damage, kin.requests, kin.thetas)
    if damage.sample.is_integer or np.unique(damage.before).size < MIN_DIFFERENT:
        return
    others = list(kin.relatives())
    yield from relatives(damage, others)
    yield from norms(damage, others, kin.cls)
    yield from activations(damage, others)
    yield from other_weights(damage, kin.sites)
    yield from input_columns(damage, kin.sites)
    yield from scaled_weights(damage)
    yield from scaled_channels(damage)
    for axis, parts in kin.summands():
        yield from summands(damage, parts, axis)
    for axis, parts in () if is_replica else kin.replicas():
        yield from unsummed(damage, parts, axis)


class _Judged(Struct, frozen=True):
    """A trial without its values."""

    name: str
    sentence: str
    share: float
    freedom: int
    left: float
    """See :func:`.trial.remains`."""

    @property
    def explains_all(self) -> bool:
        """Whether nothing is left that rounding does not explain."""
        return self.left <= MAX_LEFT or self.share > ALL


def choose(damage: Damage, trials: Iterable[Trial]) -> tuple[Tested | None, tuple[Tested, ...]]:
    """(the clear winner or None, the best of every family, best first).

    Of those that leave about as little as the best one the least flexible wins, since a more flexible one can always
    do what it does; two equally flexible ones from different families are no clear answer.
    """
    best: dict[str, _Judged] = {}
    for trial in trials:
        share = trial.discount * share_of(damage, trial.values)
        judged = _Judged(trial.name, trial.sentence, share, trial.freedom, remains(damage, trial.values))
        if judged.share > (best[judged.name].share if judged.name in best else 0.0):
            best[judged.name] = judged
    ranked = sorted(best.values(), key=lambda j: (-j.share, j.freedom))
    tested = tuple(Tested(j.name, j.sentence, j.share) for j in ranked[:MAX_LISTED])
    if not ranked or ranked[0].share <= WINS:
        return None, tested
    limit = max(MARGIN * (1.0 - ranked[0].share), SLACK)
    good = [j for j in ranked if j.share > WINS and 1.0 - j.share <= limit and j.explains_all]
    if any(j.left <= MAX_LEFT and j.freedom <= 1 for j in good):
        good = [j for j in good if j.left <= MAX_LEFT]
    good.sort(key=lambda j: (j.freedom, -j.share))
    if not good or (len(good) > 1 and good[1].freedom == good[0].freedom):
        return None, tested
    return Tested(good[0].name, good[0].sentence, good[0].share), tested
