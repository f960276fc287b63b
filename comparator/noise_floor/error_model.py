"""Model: the floor of every site of a comparison, modelled from dtypes, reduction lengths and execution order."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.metrics.columns import smaller
from tapscope.comparator.metrics.error_distribution import Quantiles
from tapscope.comparator.metrics.near_zero_rows import NO_LIFT
from tapscope.comparator.noise_floor.attention import NONE, Beside
from tapscope.comparator.noise_floor.conditions import (
    CONDITION,
    CONDITION_TWIN,
    kind_of,
    learned_conditions,
    observed_conditions,
)
from tapscope.comparator.noise_floor.floor import local_floors, path_floors, summed_gain, worst_limit
from tapscope.comparator.noise_floor.floor_inputs import Cases
from tapscope.comparator.noise_floor.floors import NAMES, Floors
from tapscope.comparator.noise_floor.gradients import shared_gain
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.lifts import UNMET
from tapscope.comparator.noise_floor.optimizer_params import STATE
from tapscope.comparator.noise_floor.reduction_length import Params
from tapscope.comparator.noise_floor.row_concentrated_floor import wide_floors
from tapscope.comparator.pair_analysis.pair_result import Examined

Array = np.ndarray[Any, Any]


class Judged(NamedTuple):
    """A site beside its floor: the test that is furthest beyond it."""

    error: float
    floor: float
    test: str
    row_floor: float
    """Of a single row."""
    growth: float
    """error / floor of the site alone, given the errors of its own inputs."""


class _Columns(NamedTuple):
    """The members of :class:`Judged`, one element a case."""

    errors: Array
    floors: Array
    tests: Array
    row_floors: Array
    growths: Array


class Rounding:
    """The model of one comparison: floors depend on inputs and on the same site in other layers."""

    def __init__(
        self,
        examined: Sequence[Examined],
        graph: Graph,
        params: Sequence[Params],
        unmet: frozenset[str] = frozenset(),
        beside: Beside = NONE,
    ) -> None:
        """``examined`` are those of the graph's nodes, ``params`` the parameters of their modules; ``unmet`` is of
        :func:`.lifts.unmet`."""
        self._cases = Cases(examined, graph, params, beside)
        self._graph = graph
        nodes = [graph.nodes[node] for node in self._cases.nodes]
        self._is_back = np.array([node.is_backward for node in nodes], bool)
        self._is_sum = np.array([node.is_summed for node in nodes], bool)
        self._is_state = np.array([node.is_state for node in nodes], bool)
        inputs = [graph.inputs(node) for node in self._cases.nodes]
        self._mixes = np.array([self._cases.attention.mixes(node) for node in self._cases.nodes], bool)
        self._keeps_channels = np.array([self._cases.attention.convolves(node) for node in self._cases.nodes], bool)
        self._has_inputs = np.array([bool(each.nodes) for each in inputs], bool)
        self._is_made = self._has_inputs | self._is_state
        """Whether there is something that it was made of."""
        self._unseen = np.array([self._unseen_at(node, unmet) for node in self._cases.nodes]).reshape(-1, 4).T
        """[quantiles, cases]: by how much more than usual a function that nobody saw may enlarge errors."""
        self._condition = self._conditions()
        self._local, self._path = self._floors()

    def is_numeric(self, node: int) -> bool:
        """Whether rounding has a say at all."""
        return self._cases.row[node] >= 0

    def base(self, node: int) -> float:
        """What the module that made a numeric site adds by itself."""
        row = self._cases.row[node]
        return 0.0 if row < 0 else self._cases.terms.base.item(row)

    def judged(self, node: int, *, is_behind_culprit: bool = False) -> Judged:
        """A numeric site beside its floor.

        ``is_behind_culprit``: what went in carries another module's error, which like that of a token that went to
        other experts may be all in a few rows.
        """
        row, columns = self._cases.row[node], self._behind if is_behind_culprit else self._usual
        errors, floors, tests, row_floors, growths = columns
        return Judged(
            errors.item(row), floors.item(row), NAMES[tests.item(row)], row_floors.item(row), growths.item(row)
        )

    @cached_property
    def _usual(self) -> _Columns:
        return self._judged(self._is_made & (self._cases.is_behind_flips | self._is_back), self._cases.is_behind_flips)

    @cached_property
    def _behind(self) -> _Columns:
        return self._judged(self._is_made, np.zeros_like(self._is_made))

    def _judged(self, is_wide: Array, is_open: Array) -> _Columns:
        """All cases; of those that are ``is_wide`` errors may be all in a few rows, and those that are ``is_open`` no
        model of the path bounds. That it does behind a culprit: what is inherited of one is no rounding, though tokens
        that took another way went in as well."""
        tests, local, whole = self._cases.terms.spreads.tests, self._local, self._local.smaller(self._path)
        if is_wide.any():
            rows = np.flatnonzero(is_wide)
            wide = self._widened(rows, is_open[rows])
            local, whole = local.replaced(rows, wide[0]), whole.replaced(rows, wide[1])
        if self._is_sum.any():
            clipped = np.where(self._is_sum, self._cases.trained.clipped, 0.0)
            local, whole = local.scaled(clipped), whole.scaled(clipped)
        if self._cases.trained.nodes:
            at, found, *floors = self._cases.trained.judged(self._cases.terms, self._cases.row)
            tests[:, at], local, whole = found, local.replaced(at, floors[0]), whole.replaced(at, floors[1])
        return _Columns(*whole.worst(tests), whole.errors[-1], local.worst(tests).scores)

    def _floors(self) -> tuple[Floors, Floors]:
        """(given its inputs, by the model of the path): a site must obey both, and the first says who is to blame.
        What is made of nothing has the second alone."""
        cases, given = self._cases, self._cases.given
        lifts = np.where((self._unseen > 1.0).any(0), self._unseen, cases.lifts.of(cases.nodes))
        is_lifted = (lifts > 1.0).any(0)
        open_tail = np.where(self._is_back | is_lifted, np.inf, worst_limit(given))
        path = path_floors(cases.modelled, cases.terms._replace(tail_limit=open_tail)).lifted(lifts)
        terms = cases.terms._replace(tail_limit=np.where(is_lifted, np.inf, 0.0))
        local = local_floors(
            given,
            terms,
            self._condition,
            mixes=self._mixes,
            keeps_channels=self._keeps_channels & ~self._is_back,
            sums_rows=self._is_sum,
        )
        local = local.lifted(self._unseen).where(self._is_made, path)
        summed = path.of_sum(summed_gain(given), cases.terms.spreads.num_rows)
        return local, summed.where(self._is_sum & self._is_made, path)

    def _widened(self, rows: Array, is_open: Array) -> tuple[Floors, Floors]:
        """Both floors of some cases whose errors may be all in a few rows; ``is_open`` as :meth:`_judged`."""
        cases, is_back, mixes = self._cases, self._is_back[rows], self._mixes[rows]
        wide, is_bounded = wide_floors(cases, rows, self._condition[rows], mixes)
        wide = wide.lifted(self._unseen[:, rows])
        shared = np.where(is_back & mixes, shared_gain(cases.terms.spreads.at(rows)), 0.0)
        whole = wide.where(is_back, self._local.at(rows)).smaller(self._path.at(rows).scaled(shared))
        return wide, wide.where(is_open | ~is_bounded, whole)

    def _conditions(self) -> Array:
        """k of every case, learned from the same site of other layers."""
        cases, base, spreads = self._cases, self._cases.terms.base, self._cases.terms.spreads
        found, errors = np.full(len(cases.nodes), CONDITION), spreads.errors
        shows = np.flatnonzero((base != 0.0) & self._has_inputs & (errors[-1] != 0.0))
        observed = observed_conditions(errors[0][shows], cases.typical[shows], base[shows])
        kinds: dict[str, list[int]] = {}
        for at, row in enumerate(shows.tolist()):
            kinds.setdefault(kind_of(cases.examined[cases.nodes[row]].site), []).append(at)
        for likes in kinds.values():
            found[shows[likes]] = learned_conditions(observed[likes].tolist())
        found = np.where(cases.is_twin & cases.are_equal, smaller(found, CONDITION_TWIN), found)
        return np.where(self._is_state, STATE, found)

    def _unseen_at(self, node: int, unmet: frozenset[str]) -> Quantiles:
        """See :attr:`_unseen`: a softmax, or what has a norm in it that was recorded and not compared; never of a
        gradient."""
        if self._graph.is_backward[node]:
            return NO_LIFT
        is_around = bool(unmet) and self._graph.inputs(node).how == "around"
        if is_around and self._graph.enclosing(node) in unmet:
            return UNMET
        return self._cases.attention.lift(node)
