"""Conditions: how much a module may amplify the error of its inputs, learned from the same module in other layers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tapscope.comparator.metrics.elementwise import hypot
from tapscope.comparator.noise_floor.constants import (
    CONDITION_RANGE,
    DEFAULT_CONDITION,
    LEARNED_CONDITION_MARGIN,
    NARROW_ROW_WIDTH,
    PARAMETER_CONDITION,
)
from tapscope.comparator.noise_floor.effect import Effect, Unit
from tapscope.comparator.noise_floor.inherited_error import InheritedError
from tapscope.comparator.noise_floor.local_error import LocalError
from tapscope.comparator.noise_floor.near_zero_rows import UnevenRows
from tapscope.core.formatting import plural

Array = np.ndarray[Any, Any]

_LAYER = re.compile(r"(?<=\.)\d+(?=[.:])")


def site_of_all_layers(site: str) -> str:
    """Return the site's name with its layer number replaced by ``*``."""
    return _LAYER.sub("*", site, count=1)


def learned_conditions(observed: Sequence[float]) -> list[float]:
    """Return the condition k of the same module in several layers.

    For each layer, k is the median of the amplification in the other layers, times
    :data:`~.constants.LEARNED_CONDITION_MARGIN`; the default for fewer than three layers.
    """
    if len(observed) < 3:
        return [DEFAULT_CONDITION] * len(observed)
    low, high = CONDITION_RANGE
    order = sorted(range(len(observed)), key=observed.__getitem__)
    middle = (len(observed) - 1) // 2
    # The median without one layer below the middle, and without one above it.
    upper = observed[order[middle + 1]], observed[order[middle]]
    learned = [DEFAULT_CONDITION] * len(observed)
    for rank, index in enumerate(order):
        learned[index] = min(max(LEARNED_CONDITION_MARGIN * upper[rank > middle], low), high)
    return learned


class LearnedCondition(Effect[float]):
    """Amplification of errors by the same module in other layers: ``k = 2.5 median(error / hypot(error of the inputs,
    local error))``, from 2.5 to 6. Rows of w < 5 elements are products with w rows of a weight; if token rows share a
    direction, all of them cancel the same way in one layer. There k is at least the default, 4
    (:data:`~.constants.NARROW_ROW_WIDTH`).
    """

    name = "learned_condition"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, float]:
        """Compute node -> k, if at least three layers show an amplification."""
        inputs, errors = self.inputs, self.effects[UnevenRows].judged.errors
        local, typical = self.effects[LocalError].column, self.effects[InheritedError].typical
        has_inputs = np.array([bool(inputs.graph.inputs(node).nodes) for node in inputs.nodes], bool)
        is_finite = np.isfinite(errors[0]) & np.isfinite(typical)  # one infinite layer does not affect the others
        shows = np.flatnonzero((local != 0.0) & has_inputs & (errors[-1] != 0.0) & is_finite)
        observed = errors[0][shows] / hypot(typical[shows], local[shows])
        layers: dict[str, list[int]] = {}
        for at, case in enumerate(shows.tolist()):
            layers.setdefault(site_of_all_layers(inputs.site(inputs.nodes[case])), []).append(at)
        width = inputs.spreads.width
        least = np.where((width > 0) & (width < NARROW_ROW_WIDTH), DEFAULT_CONDITION, 0.0).tolist()
        conditions: dict[int, float] = {}
        for same in layers.values():
            if len(same) >= 3:
                cases = shows[same].tolist()
                learned = learned_conditions(observed[same].tolist())
                conditions |= {inputs.nodes[case]: max(k, least[case]) for case, k in zip(cases, learned, strict=True)}
        return conditions

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        site = site_of_all_layers(self.inputs.site(node))
        return f"2.5 × the median amplification at {site} in the other layers"


class Condition(Effect[float]):
    """Condition number k of a module, by which it multiplies the error of its inputs: 4 unless learned, and 1.5 for a
    parameter and a row of an embedding table, which are copied."""

    name = "condition"
    unit = Unit.FACTOR
    is_optional = False

    def find(self) -> Mapping[int, float]:
        """Compute node -> k."""
        learned, nodes, inputs = self.effects[LearnedCondition].values, self.inputs.graph.nodes, self.inputs
        return {
            node: PARAMETER_CONDITION
            if nodes[node].is_state or inputs.is_lookup(node)
            else learned.get(node, DEFAULT_CONDITION)
            for node in inputs.nodes
        }

    @property
    def column(self) -> Array:
        """[cases]: k."""
        return self.inputs.columns(self.values, DEFAULT_CONDITION)

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        inputs = self.inputs.graph.inputs(node)
        given = plural(len(inputs.nodes), "input")
        return f"the most by which the module may amplify the errors of {given} and its own"
