"""InheritedError: the errors of each site's inputs, as they arrive at the site."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tapscope.comparator.metrics.elementwise import largest_in
from tapscope.comparator.metrics.error_columns import ErrorColumns, LargestErrors
from tapscope.comparator.metrics.error_distribution import NO_ERROR, ErrorDistribution
from tapscope.comparator.noise_floor.attention import AttentionMean
from tapscope.comparator.noise_floor.batch_norm_offset import BatchNormOffset
from tapscope.comparator.noise_floor.derivative_error import DerivativeJump, DerivativeValues
from tapscope.comparator.noise_floor.effect import Effect
from tapscope.comparator.noise_floor.float16_underflow import FlushedElement
from tapscope.comparator.noise_floor.kv_cache_error import KVCacheRounding
from tapscope.comparator.noise_floor.loss_gradient import LossGradient, LossHead
from tapscope.comparator.noise_floor.near_zero_rows import NormOfNearZeroRows
from tapscope.comparator.noise_floor.optimizer_params import OptimizerUpdates
from tapscope.comparator.noise_floor.site_form import PointwiseChannel
from tapscope.core.formatting import number, plural

Array = np.ndarray[Any, Any]

_EXTRA_INPUTS: tuple[type[Effect[list[ErrorDistribution]]], ...] = (
    LossGradient,
    LossHead,
    DerivativeValues,
    DerivativeJump,
    FlushedElement,
    BatchNormOffset,
)
"""Effects that enter a gradient in addition to other gradients."""


class InheritedError(Effect[float]):
    """Errors of a site's inputs: the maximum over the inputs, at each quantile over rows."""

    name = "inherited_error"
    is_optional = False
    given: LargestErrors
    """The largest errors of the inputs of each case, as they arrive there."""
    typical: Array
    """[cases]: error of the typical row."""
    are_equal: Array
    """[cases]: whether all inputs are equal."""

    def find(self) -> Mapping[int, float]:
        """Compute node -> error of the typical row."""
        norms = self.effects[NormOfNearZeroRows]
        propagated = np.zeros((len(self.inputs.spreads.propagated), len(self.inputs.pairs)))
        propagated[:, self.inputs.nodes] = self.inputs.spreads.propagated
        others = sorted({*norms.errors.replaced, *norms.values})
        propagated[:, others] = ErrorColumns.of([self._propagated(node) or NO_ERROR for node in others]).propagated
        extra, places = list[ErrorDistribution](), list[Sequence[int]]()
        for node in self.inputs.nodes:
            origins: Sequence[int] = self._origins(node)
            more = self._extra(node)
            if more:
                first = propagated.shape[1] + len(extra)
                origins = *origins, *range(first, first + len(more))
                extra += more
            places.append(origins)
        propagated = np.concatenate((propagated, ErrorColumns.of(extra).propagated), axis=1)
        measured = self.effects[PointwiseChannel].apply(largest_in(propagated, places))
        (differ,) = largest_in((LargestErrors(propagated).errors[-1:] != 0.0).astype(np.float64), places)
        self.typical, self.are_equal = LargestErrors(measured).errors[0], differ == 0.0
        mixed = self.effects[AttentionMean].apply(measured)
        self.given = LargestErrors(self.effects[KVCacheRounding].apply(mixed))
        return dict(zip(self.inputs.nodes, self.given.errors[0].tolist(), strict=True))

    def spreads(self, node: int) -> tuple[ErrorDistribution, ...]:
        """Return the error distributions of the inputs of a node."""
        if self.inputs.graph.nodes[node].is_trained:
            return tuple(self._updates(node))
        passed = tuple(spread for spread in map(self._propagated, self._origins(node)) if spread is not None)
        return *passed, *self._extra(node)

    def _propagated(self, node: int) -> ErrorDistribution | None:
        """Return the errors that a node propagates to the sites computed from it."""
        norms = self.effects[NormOfNearZeroRows]
        spread = norms.errors[node]
        return spread.scaled(norms.values[node]) if spread is not None and node in norms.values else spread

    def _origins(self, node: int) -> Sequence[int]:
        return () if self.inputs.graph.nodes[node].is_trained else self.inputs.graph.inputs(node).nodes

    def _extra(self, node: int) -> Sequence[ErrorDistribution]:
        """Return the errors that enter a node in addition to those of its inputs in the graph."""
        own = self._updates(node)
        if not self.inputs.graph.is_backward[node]:
            return own
        return [*own, *(each for kind in _EXTRA_INPUTS for each in self.effects[kind].values.get(node, ()))]

    def _updates(self, node: int) -> list[ErrorDistribution]:
        updates = self.effects[OptimizerUpdates].values
        return [updates[node]] if node in updates else []

    def applies(self, node: int) -> bool:
        """Return whether any input differs."""
        return self.values.get(node, 0.0) > 0.0

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        graph = self.inputs.graph
        inputs, case = graph.inputs(node), self.inputs.case_of[node]
        worst = number(self.given.errors[-1].item(case))
        errors = {i: spread.errors[0] for i in inputs.nodes if (spread := self._propagated(i)) is not None}
        largest = max(errors, key=errors.__getitem__, default=None)
        which = f", most of {self.inputs.site(largest)}" if largest is not None else ""
        how = {
            "captured": "as captured",
            "submodules": "and of its parts",
            "enclosing_module": "that stand in for those not captured",
            "preceding": "that fired before, since none was captured",
            "aliased": "that holds the same bytes",
        }.get(inputs.source, "")
        return f"error of {plural(len(inputs.nodes), 'input')} {how}{which}; {worst} in the worst row"
