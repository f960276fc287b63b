"""Sampled tokens that differ, compared with the logits from which each run sampled them.

Two runs of one request may fork because their logits are closer together than their errors. Each run then took its most
likely token, or one whose logit is within that error of it. Any other token is due to the sampler, which read another
row or sampled randomly. If no sampled tokens were recorded, the next tokens of the request reveal them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.alignment.forks import Fork
from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.facts import Place, RowCounts, Side, StepResult
from tapscope.comparator.metrics import chunks
from tapscope.comparator.pair_analysis.pair_result import PairMeta, PairResult, PairValues
from tapscope.core.errors import DataError

Array = np.ndarray[Any, Any]

SITE = "sampler:out"
"""Site of sampled tokens that were not recorded, but inferred from the next tokens of the requests."""
BASIS = "tokens"
_MAX_SEEDS_SHOWN = 3
"""Maximum number of seeds that a note lists."""
_MAX_TIE_RATIO = 2.0
"""Maximum ratio of (most likely logit - other logit) to the largest error of the row in a near tie."""


class SampledPair(Struct, frozen=True):
    """The tokens that both runs sampled from one row of logits."""

    pair: int
    tokens: tuple[int, int]
    logits: tuple[float, float]
    """Each run's logit of its own token."""
    best: tuple[int, int]
    """Each run's most likely token."""
    tops: tuple[float, float]
    """Each run's logit of its most likely token."""
    error: float
    """Largest error in the row of logits."""
    steps: tuple[int, int] = (0, 0)
    seeds: tuple[str, str] = ("", "")
    """The seed that each run reports; empty if none."""

    @property
    def odd(self) -> tuple[bool, bool]:
        """Whether each run's token is not in a near tie with its most likely token."""
        one, two = (top - own > _MAX_TIE_RATIO * self.error for own, top in zip(self.logits, self.tops, strict=True))
        return one, two or self.is_alike

    @property
    def is_alike(self) -> bool:
        """Whether the logits are equal, so that no error can have swapped their order."""
        return self.error == 0.0 and self.logits[0] == self.logits[1]

    def sentence(self, where: str) -> str:
        """Describe the mismatch in a sentence."""
        if all(self.seeds):
            mine, other = self.seeds
            how = f"with seed {mine}" if mine == other else f"with other seeds, {mine} against {other}"
            return f"the runs drew tokens {self.tokens[0]} and {self.tokens[1]} {where} {how}"
        if self.is_alike:
            one, two = self.tokens
            return f"the runs took tokens {one} and {two} {where}, of equal logits ({self.logits[0]:.3g})"
        if all(self.odd):
            reason = "sampling is random, and no seed was recorded"
            return f"neither run took its most likely token {where}, and they took different ones: {reason}"
        side = int(self.odd[1])
        run, other = ("target", "baseline") if side else ("baseline", "target")
        taken = f"the {run} took token {self.tokens[side]} (logit {self.logits[side]:.3g}) {where}"
        top = f"its most likely token is {self.best[side]} ({self.tops[side]:.3g}), which the {other} took"
        return f"{taken}: {top}" if self.best[side] == self.tokens[1 - side] else f"{taken}: {top.partition(',')[0]}"


class SampledTokens(Detector):
    """Adds a site for the tokens at which requests fork, if neither run recorded them."""

    name = "sampled_tokens"
    stage = Stage.SCREEN

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        return structs.replace(evidence, pairs=with_tokens(evidence.pairs, evidence.preparer))


def is_logits(result: PairResult) -> bool:
    """Return whether the site contains logits from which tokens are sampled."""
    path, _, port = result.site.rpartition(":")
    return port == "out[logits]" or (path.endswith("lm_head") and port == "out")


def sampled_pairs(
    preparer: PairPreparer, result: PairResult, tokens: Mapping[int, tuple[int, int]]
) -> dict[int, SampledPair]:
    """Return row pair -> the tokens of both runs, for those of ``tokens`` whose row is in the logits ``result``."""
    by_token: dict[int, SampledPair] = {}
    if result.basis not in ("values", "hash") or result.is_exact or not result.is_matched:
        return by_token
    wanted = np.fromiter(tokens, np.int64)
    try:
        ready = preparer.prepare(result.pair)
        joins = [j for j in ready.plan.joins if j.pairs is not None and np.isin(j.pairs, wanted).any()]
        ready = structs.replace(ready, plan=structs.replace(ready.plan, joins=tuple(joins)))
        for chunk in chunks.rows(ready, every=True):
            assert chunk.join.pairs is not None
            pairs = chunk.join.pairs[chunk.row : chunk.row + len(chunk.baseline)]
            step = (
                ready.left[chunk.join.baseline].records[0].key.step,
                ready.right[chunk.join.target].records[0].key.step,
            )
            for row in np.flatnonzero(np.isin(pairs, wanted)).tolist():
                sides = chunk.baseline[row].astype(np.float64), chunk.target[row].astype(np.float64)
                if (here := _sampled_pair(pairs.item(row), tokens[pairs.item(row)], sides, step)) is not None:
                    by_token.setdefault(here.pair, here)
    except DataError:  # unreadable bytes are a separate finding
        return {}
    return by_token


def _sampled_pair(
    pair: int, tokens: tuple[int, int], sides: tuple[Array, Array], steps: tuple[int, int]
) -> SampledPair | None:
    if sides[0].shape != sides[1].shape or max(tokens) >= len(sides[0]) or min(tokens) < 0:
        return None
    if not all(bool(np.isfinite(side).any()) for side in sides):
        return None
    one, two = (side[token].item() for side, token in zip(sides, tokens, strict=True))
    best = [int(np.nanargmax(side)) for side in sides]
    differences = np.abs(sides[1] - sides[0])
    error = float(differences[np.isfinite(differences)].max(initial=0.0))
    tops = sides[0][best[0]].item(), sides[1][best[1]].item()
    return SampledPair(pair, tokens, (one, two), (best[0], best[1]), tops, error, steps)


def fork_rows(preparer: PairPreparer) -> dict[int, Fork]:
    """Return row pair -> the fork right after it, for runs that generated different tokens."""
    rows = preparer.row_map
    forks = {(fork.index, fork.position - 1): fork for fork in rows.forks if not fork.in_prompt}
    if not forks:
        return {}
    places = zip(rows.pair_request.tolist(), rows.pair_position.tolist(), strict=True)
    return {pair: forks[place] for pair, place in enumerate(places) if place in forks}


def with_tokens(everything: Sequence[PairResult], preparer: PairPreparer) -> list[PairResult]:
    """Return all results, with a site after the logits for the tokens at which requests fork, unless a site contains
    them."""
    others = [one for one in everything if one.basis != BASIS]
    forks = fork_rows(preparer)
    if not forks or any(_holds_tokens(one) for one in others):
        return others
    last = next((i for i in reversed(range(len(others))) if is_logits(others[i])), None)
    if last is None:
        return others
    tokens = {pair: (fork.baseline_token, fork.target_token) for pair, fork in forks.items()}
    known = sampled_pairs(preparer, others[last], tokens)
    if known:
        others.insert(last + 1, _site(others[last], list(known.values()), forks))
    return others


def _holds_tokens(result: PairResult) -> bool:
    """Return whether the site is a sampler's output: one integer for each row of logits."""
    path, _, port = result.site.rpartition(":")
    return (
        result.is_exact
        and result.is_matched
        and not result.exclusion_reason
        and "sampler" in path
        and port.startswith("out")
    )


def _site(logits: PairResult, known: Sequence[SampledPair], forks: Mapping[int, Fork]) -> PairResult:
    """Return the tokens as a compared site; its pair is that of the logits."""
    assert logits.meta.baseline is not None
    assert logits.meta.target is not None
    sides = [Side(side.site, "int64", side.shape[:-1], 0) for side in (logits.meta.baseline, logits.meta.target)]
    first = min(known, key=lambda each: (each.steps[1], each.pair))
    fork = forks[first.pair]
    steps = tuple(StepResult(step, 1, 0.0, 0.0, 1.0) for step in sorted({each.steps[1] for each in known}))
    worst = Place(first.steps[1], first.steps[0], fork.request, fork.position - 1)
    about = PairMeta(
        baseline=sides[0], target=sides[1], layout=logits.meta.layout, rows=RowCounts(num_compared=len(known))
    )
    return PairResult(
        logits.pair, SITE, about, PairValues(basis=BASIS, num_unequal=len(known), worst=worst, steps=steps)
    )


def explained(
    preparer: PairPreparer, before: Iterable[PairResult], tokens: Mapping[int, tuple[int, int]]
) -> tuple[str, str, bool]:
    """Return (why the tokens of some row pairs differ, the site of their logits, whether the reason excuses them).

    The reason is empty if no logits are known. ``before`` contains sites in execution order; the last logits count.
    """
    logits = [one for one in before if is_logits(one)]
    known = next((each for one in reversed(logits) if (each := sampled_pairs(preparer, one, tokens))), {})
    forks = fork_rows(preparer)
    unknown = [pair for pair in tokens if pair not in known and pair not in forks]
    if not known:
        return ("", "", False) if unknown else (f"{len(tokens)} unequal, each where its request forks", "", True)
    site = logits[-1].site
    odd = [each for each in known.values() if any(each.odd)]
    if odd:
        rows = preparer.row_map
        request = rows.requests[rows.pair_request[odd[0].pair]]
        where = f"after position {rows.pair_position[odd[0].pair]} of request {request}"
        return structs.replace(odd[0], seeds=_seeds(preparer, odd[0], request)).sentence(where), site, False
    return (
        f"{len(tokens)} unequal, each a near tie: the logits of {site} are closer together than their own error",
        site,
        not unknown,
    )


def _seeds(preparer: PairPreparer, one: SampledPair, request: str) -> tuple[str, str]:
    """Return the seeds of both runs: that of the request if a run names it, otherwise those of all requests of the
    step."""
    seeds = []
    for run, step in zip((preparer.baseline, preparer.target), one.steps, strict=True):
        known = {name: seed for line in run.steps.get(step, {}).values() for name, seed in line.info.seeds.items()}
        some = [known[request]] if request in known else list(known.values())[:_MAX_SEEDS_SHOWN]
        seeds.append(", ".join(map(str, some)))
    return seeds[0], seeds[1]
