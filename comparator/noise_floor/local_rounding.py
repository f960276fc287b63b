"""Local rounding: the error that one pass through a module adds, from dtypes, reduction length and operations."""

import math
from collections.abc import Mapping
from functools import lru_cache

from tapscope.comparator.noise_floor.compute_dtype import ComputeDtype
from tapscope.comparator.noise_floor.constants import FLOAT32_STEP, FLOAT64_STEP, ROUND_TO_NEAREST, TWO_SIDES
from tapscope.comparator.noise_floor.effect import Effect, Unit
from tapscope.comparator.noise_floor.node import NO_INPUTS
from tapscope.comparator.noise_floor.reduction_length import batch_norm_reduction, gradient_reduction
from tapscope.core import dtypes
from tapscope.core.formatting import number, plural

_SCALE = ROUND_TO_NEAREST * TWO_SIDES


@lru_cache(maxsize=4096)
def rounding_error(baseline: str, target: str, reduction: int) -> float:
    """Return the relative error that a module adds if both sides compute in these dtypes and sum ``reduction``
    products."""
    return _SCALE * math.hypot(_coarser(baseline, target), _accumulation(baseline, target) * math.sqrt(reduction))


def _coarser(baseline: str, target: str) -> float:
    return max(dtypes.epsilon(baseline), dtypes.epsilon(target))


def _accumulation(baseline: str, target: str) -> float:
    """Return the epsilon in which sums are accumulated: float32's, or float64's for tensors of that dtype."""
    return FLOAT64_STEP if _coarser(baseline, target) <= FLOAT64_STEP else FLOAT32_STEP


class DtypeRounding(Effect[float]):
    """Rounding to the coarser dtype of both sides: ``0.2 sqrt(2) eps`` of the row."""

    name = "dtype_rounding"
    is_optional = False

    def find(self) -> Mapping[int, float]:
        """Compute node -> error."""
        names = self.effects[ComputeDtype].names
        return {node: _SCALE * _coarser(*names(node)) for node in self.inputs.nodes}

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        one, two = map(dtypes.short, self.effects[ComputeDtype].names(node))
        eps = number(_coarser(*self.effects[ComputeDtype].names(node)))
        return f"{one} against {two}: 0.2 × sqrt(2) × eps, with eps = {eps}"


class ReductionOrder(Effect[float]):
    """Different summation order: a sum of n products in another order differs by ``0.2 sqrt(2) 2^-23 sqrt(n)``, a
    random walk of n float32 roundings (Higham and Mary 2019)."""

    name = "reduction_order"

    def find(self) -> Mapping[int, float]:
        """Compute node -> error."""
        return {node: self._error(node) for node in self.inputs.nodes}

    def _error(self, node: int) -> float:
        step = _accumulation(*self.effects[ComputeDtype].names(node))
        return _SCALE * step * math.sqrt(max(self.length(node), 1))

    def length(self, node: int) -> int:
        """Return the reduction length: that of the module's parameters or of its sums over token rows.

        The length is 1 for a pointwise function, and the longest of the comparison for a module without parameters.
        """
        this = self.inputs.graph.nodes[node]
        unknown = 1 if this.is_pointwise or this.is_state else self.inputs.longest_reduction
        return max(self.inputs.reductions[node] or unknown, self._over_rows(node))

    def _over_rows(self, node: int) -> int:
        this, shape = self.inputs.graph.nodes[node], self.inputs.shape(node)
        if not this.is_summed:
            return batch_norm_reduction(this.cls, shape, self.inputs.params[node])
        nodes, origins = self.inputs.graph.nodes, self.inputs.graph.inputs(node).nodes
        outputs = [i for i in origins if nodes[i].port.startswith("out")]
        return max((gradient_reduction(self.inputs.shape(i), shape) for i in outputs), default=0)

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        return f"sums of {plural(self.length(node), 'product')} accumulated in float32 in another order"


class RankSum(Effect[float]):
    """Sum over a different number of ranks: each rank's part is rounded to the narrow dtype, and then the total. With
    two roundings, the local error is ``sqrt(2)`` times as large. A row of an embedding table is on one rank, and the
    others add zeros. If partial sums were recorded, their sizes are known: parts that cancel are rounded relative to
    their own size (Higham, section 4.2).
    """

    name = "rank_sum"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, float]:
        """Compute node -> factor on the number of sequential roundings."""
        energies = {}
        for node in self.inputs.nodes:
            about = self.inputs.pairs[node].meta
            if about.baseline is None or about.target is None or self.inputs.is_lookup(node):
                continue
            if (energy := self._energy_of_parts(node)) > 2.0:
                energies[node] = energy
            elif len(about.baseline.ranks) != len(about.target.ranks) and self.inputs.params[node]:
                energies[node] = 2.0
        return energies

    def _energy_of_parts(self, node: int) -> float:
        """Return the energy of all partial sums together, relative to that of their sum: about 1 if they are
        independent."""
        return self.inputs.pairs[node].extras.summand_ratio ** 2

    def contribution(self, node: int) -> float:
        """Return the factor on the local error."""
        return math.sqrt(self.values[node])

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        about = self.inputs.pairs[node].meta
        assert about.baseline is not None
        assert about.target is not None
        one, two = (plural(len(side.ranks), "rank") for side in (about.baseline, about.target))
        if (energy := self._energy_of_parts(node)) > 2.0:
            return f"parts of the sum over ranks cancel: they are {number(math.sqrt(energy))} times as large as the sum"
        return f"{one} against {two}: each rank's part is rounded, and then their sum"


class OpsInSequence(Effect[float]):
    """Sequential roundings that were not captured: if there are n between the captured inputs and the site, their
    variances add up, and the local error is ``sqrt(n)`` times as large."""

    name = "ops_in_sequence"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, float]:
        """Compute node -> number of roundings, unless it is one."""
        counts = ((node, self.inputs.graph.inputs(node).ops) for node in self.inputs.nodes)
        return {node: float(ops) for node, ops in counts if ops != 1}

    def contribution(self, node: int) -> float:
        """Return the factor on the local error."""
        return math.sqrt(self.values[node])

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        count = plural(int(self.values[node]), "rounding")
        source = self.inputs.graph.inputs(node).source
        since = "inputs of the module" if source in ("captured", "submodules") else "nearest values that were captured"
        since = "values that the host passed" if source == NO_INPUTS else since
        return f"{count} in sequence since the {since}"
