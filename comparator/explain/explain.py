"""Explain: test every hypothesis on the values of the divergences, and report a hypothesis that clearly wins."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.explain.activations import activations
from tapscope.comparator.explain.attention_output import explain_attention
from tapscope.comparator.explain.casts import casts, missing, overflow
from tapscope.comparator.explain.clamping import caps, clamps, clamps_of_tokens
from tapscope.comparator.explain.column_order import column_orders
from tapscope.comparator.explain.context import SiteContext
from tapscope.comparator.explain.error_region import (
    ErrorRegion,
    find_error_region,
    fitted_columns,
    visible_columns,
)
from tapscope.comparator.explain.experts import expert_weights
from tapscope.comparator.explain.hypothesis_test import Hypothesis, explained_share, residual_ratio
from tapscope.comparator.explain.input_columns import input_columns, is_linear
from tapscope.comparator.explain.input_ranges import input_ranges, is_constant_by_step, shifted_inputs
from tapscope.comparator.explain.masks import explain_mask
from tapscope.comparator.explain.norm_weights import other_weights
from tapscope.comparator.explain.norms import norms
from tapscope.comparator.explain.parameter_updates import explain_batch, explain_parameter
from tapscope.comparator.explain.position_ids import explain_position_ids
from tapscope.comparator.explain.region_text import describe
from tapscope.comparator.explain.related_sites import missing_all_reduce, partial_sums, related_sites, zero_partial_sum
from tapscope.comparator.explain.rope import rope_rotations
from tapscope.comparator.explain.rope_tables import explain_rope
from tapscope.comparator.explain.router import explain_router
from tapscope.comparator.explain.row_moves import row_moves, row_shifts
from tapscope.comparator.explain.sample import Sample, has_one_width, take
from tapscope.comparator.explain.scale import constants, offsets, scales
from tapscope.comparator.explain.weight_scale import scaled_channels, scaled_weights
from tapscope.comparator.noise_floor.node import Inputs
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.modules import is_within
from tapscope.comparator.verdict.explanation import Explanation, Tested
from tapscope.comparator.verdict.localise import Divergence
from tapscope.core.errors import DataError

MIN_EXPLAINED = 0.9
"""Minimum fraction of the error that a hypothesis must explain to be reported."""
SIMPLER_RESIDUAL_RATIO = 2.0
"""A less flexible hypothesis may leave up to this many times the residual of a more flexible one."""
MAX_LEFT = 2.5
"""A hypothesis may leave up to this many times the rounding error; beyond that, something else is wrong too."""
FULLY_EXPLAINED = 0.999
"""Explained share beyond which :data:`MAX_LEFT` does not apply: the propagated input error is not known that
precisely."""
EQUAL_RESIDUAL = 0.01
"""Two hypotheses that both leave less than this fraction are equally good."""
MAX_EXPLAINED = 6
"""Maximum number of divergences that are explained; only the first ones matter."""
MAX_LISTED = 8
_BY_LINE = ("channel", "token")
"""Families with one number per channel or token, which is neutral where nothing differs."""
_ANY_VALUES = ("row permuted", "permuted", "computed in")
"""Families whose prediction is the target itself: they hold in every row and column that agrees."""
_ONE_NUMBER = ("zeroed", "sign", "scale", "offset")
"""Families with at most one number for all values."""
_SUMMAND_FAMILIES = ("offset", "channel offset", "token offset")
"""Families of added terms: adding a term to a sum over ranks, or to any of its summands, gives the same values."""
ADDED_SOMEWHERE = " (added to one rank's partial sum, or to the sum)"
_BY_CHANNEL = {"channel scale": (True, False), "channel offset": (False, True), "norm channels": (True, True)}
"""Families with numbers per channel -> (whether a factor is fitted, whether a summand is fitted)."""
MIN_DIFFERENT = 4
"""Minimum number of distinct values: fewer fit any hypothesis."""


class ComparedSites(Struct, frozen=True):
    """The results of a comparison and their data flow, as needed for explanations."""

    results: Sequence[PairResult]
    matched: Sequence[int]
    """Indices of the results that are nodes of the data flow."""
    inputs: Sequence[Inputs]
    """Inputs of each node."""
    preparer: PairPreparer


def explain(divergences: Sequence[Divergence], sites: ComparedSites) -> list[Divergence]:
    """Return the divergences, adding explanations to the first ones where possible."""
    explained = []
    for number, divergence in enumerate(divergences):
        why = _explain(divergence, sites) if number < MAX_EXPLAINED else None
        explained.append(_with_enclosing_module(structs.replace(divergence, explanation=why)))
    return explained


def _with_enclosing_module(divergence: Divergence) -> Divergence:
    """Replace the culprit by its enclosing module if the error is another site's value, which the enclosing module
    adds."""
    why, module, others = divergence.explanation, divergence.module, divergence.alternatives
    if why is None or why.name != "summand" or len(others) != 1 or not is_within(module, others[0]):
        return divergence
    return structs.replace(divergence, module=others[0], alternatives=())


def _explain(divergence: Divergence, sites: ComparedSites) -> Explanation | None:
    order = divergence.finding.order
    if divergence.finding.basis != "values" or order not in sites.matched:
        return None
    result, node = sites.results[order], sites.matched.index(order)
    prepared = sites.preparer.prepare(result.pair)
    if not prepared.plan.joins:
        return None
    try:
        runs = sites.preparer.baseline, sites.preparer.target
        rows, place = sites.preparer.row_map, divergence.place
        steps = divergence.step if place is None else place.baseline_step, divergence.step
        explanation = explain_mask(result.site, prepared, rows) or explain_batch(result.site, rows, steps)
        explanation = explanation or explain_parameter(result, runs, divergence.step)
        if explanation is not None:
            return explanation
        if "bool" in {prepared.left[0].dtype, prepared.right[0].dtype}:
            return None
        if not has_one_width(prepared):
            return None
        sample = take(prepared, sites.preparer.row_map, divergence.place, is_integer=result.is_exact)
        sample = replace(sample, site=result.site)
        context = SiteContext(
            sites.preparer,
            sites.results,
            [sites.matched[i] for i in sites.inputs[node].nodes],
            result,
            sample,
        )
        rank = None if divergence.place is None else divergence.place.rank
        replica = context.replica(rank)
        if replica is not None:
            sample = replace(sample, target=replica, ranks=np.full(len(sample.ranks), rank))
        if (position_ids := explain_position_ids(sample, sites.preparer.row_map.requests)) is not None:
            return position_ids
        inherited = _inherited(sites, node)
        found = explain_attention(result, context.sites, context)
        if replica is None:
            return found or _of_partial_sum(sample, inherited, context)
        found = found or _try_all(sample, inherited, context, is_replica=True)
        return None if found is None else _of_rank(found, rank)
    except DataError:  # unreadable bytes are a separate finding
        return None


def _of_rank(explanation: Explanation, rank: int | None) -> Explanation:
    """Return the explanation of one rank's values with that rank added to its extent."""
    extent = explanation.extent
    if not explanation.is_clear:
        return explanation
    extent_text = extent if "rank" in extent else f"{extent} (of rank {rank})" if extent else f"rank {rank}"
    return structs.replace(explanation, extent=extent_text)


def _of_partial_sum(sample: Sample, inherited: float, context: SiteContext) -> Explanation | None:
    """Return the explanation of a site's values, testing individual partial sums if necessary.

    That is the case for a sum over ranks that no hypothesis (or only part of a weight) explains. Each rank's partial
    sum is then tested against the baseline minus the other ranks' partial sums. A term added to the sum may have been
    added to any of them.
    """
    whole = _try_all(sample, inherited, context, is_replica=False)
    if whole is not None and whole.name in _SUMMAND_FAMILIES and any(context.parts()):
        return structs.replace(whole, sentence=f"{whole.sentence}{ADDED_SOMEWHERE}")
    is_settled = whole is not None and whole.is_clear and whole.name != "input columns"
    parts = [] if is_settled else list(context.parts())
    total = np.sum([part.values for part in parts], axis=0)
    explanations = []
    for part in parts:
        rest = sample.baseline - (total - part.values)
        if not np.isfinite(rest).all() or not rest.any():
            continue
        size = float(np.sqrt((sample.baseline**2).sum() / (rest**2).sum()))
        alone = replace(sample, baseline=rest, target=part.values)
        region = find_error_region(
            alone, float(np.hypot(inherited, size * inherited)), context.sizes, context.head_dims
        )
        winner, tested = (None, ()) if region is None else choose(region, _of_values(region, context))
        if region is not None and winner is not None:
            extent = describe(region, context.requests, context.padded)
            whose = f"the partial sum of rank {part.rank}"
            extent = f"{extent} of {whose}" if extent else whose
            explanations.append(Explanation(winner.name, winner.sentence, winner.share, extent, tested, len(rest)))
    return explanations[0] if len(explanations) == 1 else whole


def _of_values(region: ErrorRegion, context: SiteContext) -> Iterator[Hypothesis]:
    """Return the hypotheses about a partial sum, which exclude a doubled or missing all-reduce."""
    return (
        hypothesis
        for hypothesis in hypotheses(region, context.requests, context.thetas)
        if hypothesis.name != "all-reduce"
    )


def _inherited(sites: ComparedSites, node: int) -> float:
    """Return the largest relative error of the culprit's inputs."""
    results = [sites.results[sites.matched[i]] for i in sites.inputs[node].nodes]
    errors = [one.metrics.rel_l2 for one in results if one.metrics is not None and one.distribution is not None]
    return max((e for e in errors if np.isfinite(e)), default=0.0)


@np.errstate(all="ignore")  # values may reach the limits of their dtype; a hypothesis that overflows does not fit
def _try_all(sample: Sample, inherited: float, context: SiteContext, *, is_replica: bool) -> Explanation | None:
    region = find_error_region(sample, inherited, context.sizes, context.head_dims)
    if region is None:
        return None
    every_row, every_column = map(np.arange, sample.baseline.shape)

    def extent_of(region: ErrorRegion) -> str:
        return describe(region, context.requests, context.padded)

    def explanation(cause: Tested, extent: str = "", tested: tuple[Tested, ...] = ()) -> Explanation:
        return Explanation(cause.name, cause.sentence, cause.share, extent, tested, len(sample.baseline))

    # Causes visible in the region itself, or in other sites
    if sentence := overflow(region.before, region.after):
        return explanation(Tested("overflow", sentence, 1.0))
    if sentence := missing(region.before, region.after, region.noise):
        return explanation(Tested("not finite", sentence, 0.0), extent_of(region))
    if (rope := explain_rope(region, context.sites, context.thetas, context.requests, context.padded)) is not None:
        return rope
    if (cause := explain_router(region, context.sites, context.configs)) is not None:
        return explanation(cause, extent_of(replace(region, columns=every_column)))
    # Hypotheses
    winner, tested = choose(region, _trials(region, context, is_replica=is_replica))
    if winner is not None and winner.name in _SUMMAND_FAMILIES and (is_linear(sample.site) or "experts" in sample.site):
        if winner.name == "token offset" and (added := shifted_inputs(region, context.sites)) is not None:
            winner = Tested("input columns", added, winner.share)
        elif not is_constant_by_step(region):  # a number added to an output does not depend on the token
            added = None if winner.name == "channel offset" else shifted_inputs(region, context.sites)
            winner = None if added is None else Tested("input columns", added, winner.share)
    if winner is not None:
        region, winner = _extended(region, winner, context)
        return explanation(winner, extent_of(region), tested)
    # Causes for which no hypothesis predicts the values
    parts = list(context.parts())
    if (rank := zero_partial_sum(region, parts)) is not None:
        whole = replace(region, rows=every_row)
        extent = extent_of(whole if zero_partial_sum(whole, parts) == rank else region)
        return explanation(Tested("lost summand", f"the partial sum of rank {rank} is zero", 0.0), extent, tested)
    if (cause := expert_weights(region, context.sites)) is not None:
        return explanation(cause, tested=tested)
    ranks = context.num_summands if sample.ranks.max(initial=-1) < 0 else 1
    if (cause := input_ranges(region, context.sites, ranks)) is not None:
        return explanation(cause, describe(replace(region, rows=every_row), (), frozenset()), tested)
    return explanation(Tested("", "", 0.0), extent_of(region), tested)


def _extended(region: ErrorRegion, winner: Tested, context: SiteContext) -> tuple[ErrorRegion, Tested]:
    """Return the largest region in which the winner holds, and the winner refitted there.

    Includes unaffected rows and columns in which the change is invisible. If the winner has a number per channel or
    token, columns without a visible change are excluded.
    """
    line = winner.name.partition(" ")[0]
    by_line = line in _BY_LINE or winner.name in _BY_CHANNEL
    if winner.name in _ANY_VALUES:
        return region, winner  # the prediction holds in all unaffected rows and columns
    rows, columns = map(np.arange, region.sample.baseline.shape)
    wider = [] if line == "token" else [replace(region, rows=rows)]
    wider = wider if by_line else [replace(region, rows=rows, columns=columns), *wider]
    for one in wider if not region.is_everywhere else ():
        if _again(one, winner, context) is not None:
            region = one
            break
    if winner.name in _BY_CHANNEL:
        is_scaled, is_offset = _BY_CHANNEL[winner.name]
        shown = fitted_columns(region, is_scaled=is_scaled, is_offset=is_offset)
        again = _again(shown, winner, context)
        return (visible_columns(region), winner) if again is None else (shown, again)
    if winner.name in _ONE_NUMBER:
        region = _with_faint_columns(region, winner, context)
    return visible_columns(region) if by_line else region, winner


def _with_faint_columns(region: ErrorRegion, winner: Tested, context: SiteContext) -> ErrorRegion:
    """Return the region with additional columns that have a faint but visible error, which the winner explains equally
    well."""
    whole = visible_columns(replace(region, columns=np.arange(region.sample.baseline.shape[1])))
    if not len(np.setdiff1d(whole.columns, region.columns)):
        return region
    for one in _trials(whole, context, is_replica=False):
        if one.name == winner.name:
            error, left = whole.after - whole.before, whole.after - one.values
            holds = (left**2).sum(axis=0) <= (1.0 - MIN_EXPLAINED) * (error**2).sum(axis=0)
            return replace(region, columns=np.union1d(region.columns, whole.columns[holds]))
    return region


def _again(region: ErrorRegion, winner: Tested, context: SiteContext) -> Tested | None:
    """Return the winner refitted to another region; None if it does not hold equally well there."""
    for one in _trials(region, context, is_replica=False):
        if one.name == winner.name and (share := explained_share(region, one.values)) > winner.share - EQUAL_RESIDUAL:
            return Tested(one.name, one.sentence, share)
    return None


def hypotheses(region: ErrorRegion, requests: Sequence[str], thetas: Sequence[float]) -> Iterator[Hypothesis]:
    """Yield every hypothesis that needs only the pair's values; ``thetas`` are the RoPE bases in the runs' model
    configs."""
    yield from constants(region)
    if np.unique(region.before).size < MIN_DIFFERENT:
        return  # a constant fits as a scale, an offset, or a copy of anything
    yield from scales(region)
    yield from offsets(region)
    yield from row_shifts(region)
    yield from row_moves(region, requests)
    yield from column_orders(region)
    yield from casts(region)
    yield from clamps(region)
    yield from clamps_of_tokens(region)
    yield from caps(region)
    yield from rope_rotations(region, thetas)


def _trials(region: ErrorRegion, context: SiteContext, *, is_replica: bool) -> Iterator[Hypothesis]:
    yield from hypotheses(region, context.requests, context.thetas)
    if region.sample.is_integer or np.unique(region.before).size < MIN_DIFFERENT:
        return
    others = list(context.related_sites())
    yield from related_sites(region, others)
    yield from norms(region, others, context.cls, context.epsilon)
    yield from activations(region, others)
    yield from other_weights(region, context.sites)
    yield from input_columns(region, context.sites)
    yield from scaled_weights(region)
    yield from scaled_channels(region)
    for axis, parts in context.partial_sums():
        yield from partial_sums(region, parts, axis)
    for axis, parts in () if is_replica else context.replicas():
        yield from missing_all_reduce(region, parts, axis)


class _Judged(Struct, frozen=True):
    """A tested hypothesis, without its values."""

    name: str
    sentence: str
    share: float
    freedom: int
    left: float
    """See :func:`.hypothesis_test.residual_ratio`."""

    @property
    def explains_all(self) -> bool:
        """Whether the residual is within rounding."""
        return self.left <= MAX_LEFT or self.share > FULLY_EXPLAINED


def choose(region: ErrorRegion, trials: Iterable[Hypothesis]) -> tuple[Tested | None, tuple[Tested, ...]]:
    """Return (clear winner or None, best hypothesis of every family, best first).

    Among the hypotheses with about the smallest residual, the least flexible wins, because a more flexible one can
    imitate it. Two equally flexible hypotheses of different families are ambiguous: there is no winner.
    """
    best: dict[str, _Judged] = {}
    for hypothesis in trials:
        share = hypothesis.discount * explained_share(region, hypothesis.values)
        judged = _Judged(
            hypothesis.name, hypothesis.sentence, share, hypothesis.freedom, residual_ratio(region, hypothesis.values)
        )
        if judged.share > (best[judged.name].share if judged.name in best else 0.0):
            best[judged.name] = judged
    ranked = sorted(best.values(), key=lambda j: (-j.share, j.freedom))
    tested = tuple(Tested(j.name, j.sentence, j.share) for j in ranked[:MAX_LISTED])
    if not ranked or ranked[0].share <= MIN_EXPLAINED:
        return None, tested
    limit = max(SIMPLER_RESIDUAL_RATIO * (1.0 - ranked[0].share), EQUAL_RESIDUAL)
    good = [j for j in ranked if j.share > MIN_EXPLAINED and 1.0 - j.share <= limit and j.explains_all]
    if any(j.left <= MAX_LEFT and j.freedom <= 1 for j in good):
        good = [j for j in good if j.left <= MAX_LEFT]
    good.sort(key=lambda j: (j.freedom, -j.share))
    if not good or (len(good) > 1 and good[1].freedom == good[0].freedom):
        return None, tested
    return Tested(good[0].name, good[0].sentence, good[0].share), tested
