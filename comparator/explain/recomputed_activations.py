"""Recomputed activations: whether each run's output of a ReLU or the like is that function of the run's own input.

Such a function clears values. What it leaves of a channel may be much smaller than what the channel received, and its
error is as large as before: no factor bounds one error relative to the other. But the function and its input are known.
Where every element of both outputs is the same function of the run's own input, the module adds no error.
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
    """Sites of outputs of activations that clear values which seem to add an error, and which the inputs of both runs
    reproduce. ``findings`` are those of ``judged``, and ``matched`` their indices by node of the graph."""
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
