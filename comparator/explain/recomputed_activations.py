"""Recomputed activations: check whether each run's output of ReLU or a similar function matches the run's own input.

ReLU clears values. The remaining values of a channel may be much smaller than its inputs, while their error is as large
as before: no factor bounds the output error relative to the input error. But function and input are known. If both
outputs are the same function of the run's own input in every element, the module adds no error.
"""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.detectors.activation_functions import CLEARING, FUNCTIONS, Function
from tapscope.comparator.detectors.activation_mismatch import place_of, rounding_of
from tapscope.comparator.detectors.linear_gradients import MAX_ELEMENTS, chunks_of
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.core.errors import DataError

NOTE = "each run's values are the same function of its own input: their difference is inherited"


def inherited_activations(
    findings: Sequence[Finding],
    judged: Sequence[PairResult],
    matched: Sequence[int],
    graph: Graph,
    preparer: PairPreparer,
) -> frozenset[str]:
    """Return the sites of activation outputs whose error is inherited, although it exceeds the floor.

    Considers activations that clear values, such as ReLU, and checks that the inputs of both runs reproduce their
    outputs. ``findings`` belong to ``judged``; ``matched`` holds the index of each node of ``graph``.
    """
    inherited = set()
    for node, order in enumerate(matched):
        this, given, finding = graph.nodes[node], graph.inputs(node), findings[order]
        is_output = this.is_pointwise and not this.is_input and not this.is_backward
        if not is_output or given.source != "captured" or len(given.nodes) != 1 or not _adds_error(finding):
            continue
        ready = [preparer.prepare(judged[matched[i]].pair) for i in (*given.nodes, node)]
        sides = [each.left for each in ready], [each.right for each in ready]
        with suppress(DataError):
            if any(all(_is_of(FUNCTIONS[name], *side) for side in sides) for name in CLEARING):
                inherited.add(finding.site)
    return frozenset(inherited)


def _adds_error(finding: Finding) -> bool:
    is_by_floor = finding.verdict is Verdict.DIFFERS and finding.judged_by == "rounding"
    return is_by_floor and finding.added_error_ratio > 1.0


def _is_of(function: Function, inputs: Sequence[AssembledTensor], outputs: Sequence[AssembledTensor]) -> bool:
    """Return whether every output of one run is ``function`` of its input, up to one rounding."""
    given = {place_of(whole): whole for whole in inputs}
    for whole in outputs:
        x = given.get(place_of(whole))
        if x is None or x.shape != whole.shape or not (x.has_values and whole.has_values) or not _is_small(whole):
            return False
        for (_, values, columns), (_, recorded, at) in zip(chunks_of(x), chunks_of(whole), strict=False):
            if values.shape != recorded.shape or columns != at:
                return False
            made = function(values)
            most = rounding_of(made, whole.dtype or "", np.maximum(np.abs(values), np.abs(made)))
            if not (np.abs(recorded - made) <= most).all():
                return False
    return bool(outputs)


def _is_small(whole: AssembledTensor) -> bool:
    return 0 < int(np.prod(whole.shape)) <= MAX_ELEMENTS
