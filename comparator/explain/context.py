"""Site context: data that both runs recorded around one culprit: related sites, partial sums, replicas, head dims,
padding."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tapscope.comparator.alignment.prepare import PairPreparer, PreparedPair
from tapscope.comparator.alignment.row_map import PADDING
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.pieces import Piece, Summed, leaves
from tapscope.comparator.explain.recorded_attention import SiteReader
from tapscope.comparator.explain.related_sites import PartialSum, RelatedSite
from tapscope.comparator.explain.sample import BaselineRows, Sample, read_parts
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.names import all_reduced_site, is_partial
from tapscope.core.site import layer_of, module_of, port_of
from tapscope.run_format.run import Run

Array = np.ndarray[Any, Any]

MAX_RELATED = 16
"""Maximum number of related sites read for one culprit."""
_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon")
"""Config keys for the epsilon of the model's norms."""


class SiteContext:
    """Reads the data that hypotheses need, on demand."""

    def __init__(
        self,
        preparer: PairPreparer,
        examined: Sequence[PairResult],
        inputs: Sequence[int],
        culprit: PairResult,
        sample: Sample,
    ) -> None:
        """Prepare to read around ``culprit``; ``inputs`` are the indices of its inputs in ``examined``."""
        self.preparer, self._examined, self._inputs = preparer, examined, inputs
        self._culprit, self._sample = culprit, sample
        self._ready = preparer.prepare(culprit.pair)
        runs = preparer.baseline, preparer.target
        self.sizes = {axis: n for run in runs for axis, n in run.mesh.items() if n > 1}
        self.requests = preparer.row_map.requests
        self.sites = SiteReader(preparer, examined)
        self.configs = model_configs(runs)
        self.head_dims = tuple(dict.fromkeys(d for run in runs for d in _head_dims(run.manifest)))
        epsilons = (config.get(name) for config in self.configs for name in _EPSILONS)
        self.epsilon = next((float(one) for one in epsilons if isinstance(one, int | float)), 0.0)
        self.thetas = rope_thetas(runs)

    @property
    def cls(self) -> str:
        """Class name of the culprit's module; empty if neither run recorded it."""
        one = self._culprit
        sides = (one.baseline, self.preparer.baseline), (one.target, self.preparer.target)
        known = (run.sites.get(side.site) for side, run in sides if side is not None)
        return next((info.cls for info in known if info is not None and info.cls), "")

    @property
    def num_summands(self) -> int:
        """Number of tensor-parallel ranks of the target, over which a row-parallel layer sums."""
        return int(self.preparer.target.mesh.get("tp", 1))

    @property
    def padded(self) -> frozenset[int]:
        """Requests that share a batch row with padding in some step of either run."""
        row_map = self.preparer.row_map
        requests: set[int] = set()
        sides = row_map.baseline.by_step(), row_map.target.by_step()
        for grid in (grid for side in sides for grids in side.values() for grid in grids):
            if len(grid.grid) != 2 or grid.grid[0] * grid.grid[1] != grid.num_slots:
                continue
            for line in grid.pairs.reshape(grid.grid):
                real = line[line >= 0]
                if len(real) and (line == PADDING).any():
                    requests.add(int(row_map.pair_request[real[0]]))
        return frozenset(requests)

    def related_sites(self) -> Iterator[RelatedSite]:
        """Yield sites with the same rows and width: the culprit's inputs, then other sites of its layer, nearest first.

        For a gradient, only other gradients.
        """
        path, is_gradient = module_of(self._culprit.site), self._culprit.site.endswith(".grad")
        at = next(i for i, one in enumerate(self._examined) if one is self._culprit)
        layer = layer_of(path)
        near = [i for i, one in enumerate(self._examined) if layer_of(module_of(one.site)) == layer]
        near.sort(key=lambda i: abs(i - at))
        rows, num_read = BaselineRows(self._sample, self.preparer), 0
        for i in dict.fromkeys((*self._inputs, *near)):
            one = self._examined[i]
            if one is self._culprit or one.basis not in ("values", "hash") or one.is_exact or num_read >= MAX_RELATED:
                continue
            if is_partial(one.site) or one.baseline is None or one.site.endswith(".grad") != is_gradient:
                continue
            values = rows.of(one.pair)
            if values is not None:
                num_read += 1
                port = port_of(one.site)
                yield RelatedSite(one.site, values, one.site.startswith(f"{path}:") and port.startswith("in["))

    def partial_sums(self) -> Iterator[tuple[str, list[PartialSum]]]:
        """Yield (mesh axis, the target's partial sums) of the culprit, recorded before the all-reduce."""
        for one in self._examined:
            side = one.target
            if (
                side is None
                or one.pair.target is None
                or not is_partial(side.site)
                or all_reduced_site(side.site) != self._site
            ):
                continue
            ready = self.preparer.prepare(one.pair)
            first = ready.right[0].piece
            ranks = [_rank(part) for part in first.parts] if isinstance(first, Summed) else []
            parts = list(self._parts(ready, ranks, _partial_sum))
            if parts:
                yield self._axis(ready.right[0]), parts

    def parts(self) -> Iterator[PartialSum]:
        """Yield the target's partial sums if the culprit itself was assembled as their sum."""
        first = self._ready.right[self._ready.plan.joins[0].target].piece
        if isinstance(first, Summed):
            yield from self._parts(self._ready, [_rank(part) for part in first.parts], _partial_sum)

    def replicas(self) -> Iterator[tuple[str, list[PartialSum]]]:
        """Yield (mesh axis, values of the target's other ranks) for ranks that should hold equal values."""
        first = self._ready.right[self._ready.plan.joins[0].target]
        for axis in dict.fromkeys(name for _, _, name in first.replicas):
            ranks = [_rank(other) for _, other, name in first.replicas if name == axis]
            parts = list(self._parts(self._ready, ranks, _replica))
            if len(parts) == len(ranks):
                yield axis, parts

    def replica(self, rank: int | None) -> Array | None:
        """Return the values of one target rank if they differ from the replica that was compared; otherwise None."""
        if rank is None:
            return None
        wholes = [self._ready.right[join.target] for join in self._ready.plan.joins]
        if not any(_replica(rank, whole) for whole in wholes):
            return None
        return read_parts(
            self._sample, self._ready, self.preparer.row_map, lambda whole: _replica(rank, whole) or whole.piece
        )

    @property
    def _site(self) -> str:
        assert self._culprit.target is not None
        return self._culprit.target.site

    def _parts(
        self, ready: PreparedPair, ranks: Sequence[int], part_of: Callable[[int, AssembledTensor], Piece | None]
    ) -> Iterator[PartialSum]:
        for rank in ranks:
            values = read_parts(self._sample, ready, self.preparer.row_map, partial(part_of, rank))
            if values is not None:
                yield PartialSum(rank, values)

    def _axis(self, whole: AssembledTensor) -> str:
        axes = [shard.axis for dim in (whole.dims.dims if whole.dims else ()) for shard in dim.shards if shard.partial]
        return ", ".join(axes) or "the ranks"


def model_configs(runs: Sequence[Run]) -> list[Mapping[str, Any]]:
    """Return the model configs of the runs; an empty mapping for a run without one."""
    return [run.manifest.get("model_config") or {} for run in runs]


def rope_thetas(runs: Sequence[Run]) -> tuple[float, ...]:
    """Return the distinct RoPE bases in the model configs of the runs."""
    return tuple(dict.fromkeys(theta for run in runs for theta in _thetas(run.manifest)))


def _rank(piece: Piece) -> int:
    return next(leaves(piece)).key.rank


def _partial_sum(rank: int, whole: AssembledTensor) -> Piece | None:
    parts = whole.piece.parts if isinstance(whole.piece, Summed) else ()
    return next((part for part in parts if _rank(part) == rank), None)


def _replica(rank: int, whole: AssembledTensor) -> Piece | None:
    return next((other for _, other, _ in whole.replicas if _rank(other) == rank), None)


def _head_dims(manifest: Mapping[str, Any]) -> Iterator[int]:
    config = manifest.get("model_config") or {}
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(config.get("head_dim"), int):
        yield config["head_dim"]
    elif isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        yield hidden // heads


def _thetas(manifest: Mapping[str, Any]) -> Iterator[float]:
    theta = (manifest.get("model_config") or {}).get("rope_theta")
    if isinstance(theta, int | float) and theta > 1:
        yield float(theta)
