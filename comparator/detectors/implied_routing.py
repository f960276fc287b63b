"""Implied routing: expert choices that were not recorded, inferred from the router's scores.

JetMoE's routers return rows sorted by expert, others return only scores: the experts of a token were not recorded. The
detector takes the k largest scores in both runs. If these differ, the error of the scores decided a near tie. The
token's rows are then not comparable around that router, as for recorded choices (:mod:`.near_ties`).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.detectors.chosen_scores import largest, rows_of
from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.routers import ROUTERS
from tapscope.comparator.verdict.choice_change import ChoiceChange
from tapscope.core.site import module_of, port_of


class ImpliedRouting(Detector):
    """Infers expert choices from the router's scores where no choices were recorded."""

    name = "implied_routing"
    stage = Stage.SCREEN

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        changes = implied_changes(evidence.pairs, evidence.preparer)
        return structs.replace(evidence, changes={**evidence.changes, **changes})


def implied_changes(everything: Sequence[PairResult], preparer: PairPreparer) -> Mapping[str, ChoiceChange]:
    """Return site -> change for routers whose choices were not recorded per token.

    The sites are the router's scores, and integers that the router returns in another order.
    """
    config = preparer.baseline.model_config
    num_experts, count = int(config.get("num_experts") or 0), int(config.get("num_experts_per_tok") or 0)
    if not 0 < count < num_experts or int(config.get("n_group") or 1) > 1:
        return {}
    changes: dict[str, ChoiceChange] = {}
    called = {module_of(one.site) for one in everything}
    for router, sites in _routers(everything).items():
        scores = next((one for one in sites if _is_scores(one, num_experts)), None)
        if scores is None or any(_decides(one) for one in sites):
            continue
        moved = _moved(preparer, scores, count)
        if not moved:
            continue
        block = router.rpartition(".")[0]
        while block and block not in called:
            block = block.rpartition(".")[0]
        sentence = f"{len(moved)} token rows went to other experts: the scores of {scores.site} are near ties there"
        rerouted = frozenset(moved)
        changes[scores.site] = ChoiceChange(sentence, scores.site, rerouted, rerouted, count, block=block)
        changes |= {one.site: ChoiceChange(sentence, scores.site) for one in sites if one.is_exact and one.num_unequal}
    return changes


def _routers(everything: Sequence[PairResult]) -> dict[str, list[PairResult]]:
    """Map each router to the outputs of the router and its submodules."""
    by_router: dict[str, list[PairResult]] = {}
    for one in everything:
        path, _, port = one.site.rpartition(":")
        names = path.split(".")
        at = next((i for i, name in enumerate(names) if name in ROUTERS), None)
        if at is not None and port.startswith(("out", "buffer[")) and not port.endswith(".grad"):
            by_router.setdefault(".".join(names[: at + 1]), []).append(one)
    return by_router


def _is_scores(result: PairResult, num_experts: int) -> bool:
    is_compared = (
        result.distribution is not None
        and not result.is_exact
        and result.rows.num_compared > 0
        and not result.exclusion_reason
    )
    return is_compared and result.baseline is not None and result.baseline.shape[-1] == num_experts


def _decides(result: PairResult) -> bool:
    """Return whether the site records the choices per token, or is a buffer that influences them."""
    return (result.is_exact and result.rows.num_compared > 0) or port_of(result.site).startswith("buffer[")


def _moved(preparer: PairPreparer, scores: PairResult, count: int) -> list[int]:
    """Return the row pairs with different sets of largest scores."""
    rows = rows_of(preparer, scores, np.arange(preparer.row_map.num_pairs))
    if rows is None or not (np.isfinite(rows.baseline).all() and np.isfinite(rows.target).all()):
        return []
    is_moved = (largest(rows.baseline, count) != largest(rows.target, count)).any(axis=1)
    moved: list[int] = rows.pairs[is_moved].tolist()
    return moved
