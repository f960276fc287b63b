"""PathBound: the roundings of everything upstream of a site, added up as if each module had condition 1."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tapscope.comparator.noise_floor.batch_norm_offset import BatchNormOffset
from tapscope.comparator.noise_floor.constants import PATH_CONDITION
from tapscope.comparator.noise_floor.derivative_error import DerivativeJump
from tapscope.comparator.noise_floor.effect import Effect
from tapscope.comparator.noise_floor.kv_cache_error import KVCacheRounding
from tapscope.comparator.noise_floor.local_error import LocalError
from tapscope.comparator.noise_floor.loss_gradient import LossGradient
from tapscope.comparator.noise_floor.optimizer_params import OptimizerUpdates
from tapscope.comparator.noise_floor.sharp_softmax import SharpSoftmax
from tapscope.core.formatting import number

Array = np.ndarray[Any, Any]


class PathBound(Effect[float]):
    """Roundings along the longest path: ``m = hypot(m of the inputs, local error)``. A site may differ by ``4 m``, so
    an error that grows by slightly less than its condition number in every module does not pass."""

    name = "path_bound"

    def find(self) -> Mapping[int, float]:
        """Compute node -> m."""
        return self._upstream_errors

    @cached_property
    def _upstream_errors(self) -> Mapping[int, float]:
        local, updates, jumps = self.effects[LocalError], self.effects[OptimizerUpdates], self.effects[DerivativeJump]
        softmax, cache, losses = self.effects[SharpSoftmax], self.effects[KVCacheRounding], self.effects[LossGradient]
        offsets = self.effects[BatchNormOffset]
        modelled = [0.0] * len(self.inputs.pairs)
        for node in (n for n in updates.values if self.inputs.case_of[n] >= 0):  # parameters of the next step
            modelled[node] = updates.modelled(node, local.values[node])
        errors_of = {}
        for node in self.inputs.nodes:
            if node in updates.values:
                errors_of[node] = math.hypot(updates.values[node].errors[-1], local.values[node])
                continue
            upstream = self._largest(self.inputs.graph.inputs(node).nodes, modelled)
            upstream = cache.stored(node, softmax.passed(node, upstream))
            here = math.hypot(upstream, local.values[node])
            for loss in losses.values.get(node, ()):
                here = math.hypot(here, loss.errors[-1])
            for offset in offsets.values.get(node, ()):
                here = math.hypot(here, offset.errors[-1])
            errors_of[node] = modelled[node] = math.hypot(here, jumps.jump(node))
        return errors_of

    @cached_property
    def worst_rows(self) -> Array:
        """[cases]: the error that kink crossings upstream may cause in a single row; 0 without crossings."""
        jumps, graph = self.effects[DerivativeJump], self.inputs.graph
        worst = [0.0] * len(self.inputs.pairs)
        for node in self.inputs.nodes:
            if graph.is_backward[node]:
                upstream = max((worst[i] for i in graph.inputs(node).nodes), default=0.0)
                worst[node] = max(upstream, jumps.worst_row(node))
        return np.array([worst[node] for node in self.inputs.nodes])

    def _largest(self, origins: Sequence[int], modelled: Sequence[float]) -> float:
        """Return m of a site's inputs; parameters in training carry independent errors."""
        if not self.effects[OptimizerUpdates].values:
            return max(map(modelled.__getitem__, origins), default=0.0)
        trained = [self.inputs.graph.nodes[i].is_trained for i in origins]
        sides = (
            [modelled[i] for i, is_own in zip(origins, trained, strict=True) if is_own is own] for own in (True, False)
        )
        return math.hypot(*(max(side, default=0.0) for side in sides))

    @cached_property
    def column(self) -> Array:
        """[cases]: m, even if the effect is disabled, because a site without inputs has no other bound."""
        return np.array([self._upstream_errors[node] for node in self.inputs.nodes])

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        most = number(PATH_CONDITION * self.values[node])
        return f"limit: all roundings upstream add up to this, and up to 4 × as much, {most}, may remain"
