"""Data flow: which module received the output of which, from what one rank recorded in one step.

Three kinds, from the strongest to the weakest:

- an input holds the bytes of an output;
- an input is a simple function of earlier values (:func:`~tapscope.dashboard.model.flow_proof.function_of`), as the
  recorded values show;
- an input is neither: a function that is not recorded gave it. Its arguments are inferred from the order: the outputs
  that fired before in the same module and that no other module received, or else what that module received itself.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

from tapscope.core.errors import TapscopeError
from tapscope.core.site import module_of, port_of
from tapscope.dashboard.model.flow_proof import function_of, is_evidence
from tapscope.dashboard.module_tree import contains

Array = np.ndarray[Any, Any]

PERMUTE = "permute"
"""The same elements in another order."""
FUNCTION = "function"
"""How an inferred flow goes: through a function that is not recorded."""
MAX_PROOFS = 1_000
"""Inputs whose values are read; those after them are inferred."""
_WINDOW = 24
"""Earlier values that an input may be a function of, next to what the modules around received: the latest ones, and the
latest ones of its shape."""


@dataclass(frozen=True, eq=False, slots=True)
class FlowValue:
    """A recorded tensor."""

    site: str
    dtype: str
    shape: tuple[int, ...]
    hash: str
    bag: str | None = None
    """Of its elements in any order, see docs/reference/run-format.md."""
    read: Callable[[], Array] | None = None
    """Reads its values; None where they were not kept. May raise TapscopeError."""

    @property
    def path(self) -> str:
        """The path of its module."""
        return module_of(self.site)


@dataclass(frozen=True, slots=True)
class Flow:
    """From an output to an input."""

    producer: str
    """Site of the output."""
    consumer: str
    """Site of the input."""
    through: str = ""
    """Empty where the bytes are equal, else the function that was shown, or FUNCTION."""


def is_input(site: str) -> bool:
    """Whether its module received it in the forward."""
    return _port(site).startswith("in[")


def is_output(site: str) -> bool:
    """Whether its module returned it in the forward."""
    return _port(site).partition("[")[0] == "out"


def _port(site: str) -> str:
    """Without the number of the call; empty for a gradient."""
    port = port_of(site).partition("#")[0]
    return "" if port.endswith(".grad") else port


def data_flows(values: Iterable[FlowValue]) -> list[Flow]:
    """``values`` are those of one step on one rank, in execution order.

    Flows between a module and one inside it are left out, as is what the model itself received and returned.
    """
    return list(_Flows().of(values))


class _Flows:
    def __init__(self) -> None:
        self._origins: dict[str, list[tuple[str, str]]] = {}
        """Hash -> (site of an output, through what) that gave these bytes first."""
        self._open: dict[str, dict[str, list[FlowValue]]] = {}
        """Module -> module in it -> the latest outputs in that which no later module in the former received."""
        self._given: dict[str, list[FlowValue]] = {}
        """Module -> what its latest call received."""
        self._latest: deque[FlowValue] = deque(maxlen=_WINDOW)
        self._of_shape: dict[tuple[int, ...], deque[FlowValue]] = {}
        self._arrays: dict[str, Array] = {}
        """Hash -> values, of those that the latest input was compared with: not every format maps its files."""
        self._num_proofs = 0

    def of(self, values: Iterable[FlowValue]) -> Iterator[Flow]:
        """One call of a module after the other."""
        ports = (value for value in values if is_input(value.site) or is_output(value.site))
        for (path, received), group in groupby(ports, key=lambda value: (value.path, is_input(value.site))):
            firings = list(group)
            if received:
                yield from self._received(path, firings)
            else:
                self._returned(path, firings)

    def _received(self, path: str, values: list[FlowValue]) -> Iterator[Flow]:
        self._open.pop(path, None)
        self._given[path] = values
        for value in values:
            if value.hash not in self._origins:
                shown = self._shown(value)
                if shown:
                    self._origins[value.hash] = shown
        unknown = [value for value in values if value.hash not in self._origins and _is_float(value)]
        if len(unknown) == len([value for value in values if _is_float(value)]):  # else they may well be masks
            before = self._before(path)
            for value in unknown:
                self._origins[value.hash] = [(site, FUNCTION) for site in before]
        for value in values:
            self._remember(value)
            for site, through in self._origins.get(value.hash, ()):
                self._take(path, site)
                producer = module_of(site)
                if path and producer and not contains(path, site) and not contains(producer, value.site):
                    yield Flow(site, value.site, through)

    def _returned(self, path: str, values: list[FlowValue]) -> None:
        for value in values:
            self._origins.setdefault(value.hash, [(value.site, "")])
            self._remember(value)
        for around, inner in _around(path):
            self._open.setdefault(around, {})[inner] = [value for value in values if _is_float(value)]

    def _take(self, path: str, site: str) -> None:
        """A module received an output: no later one is taken to have received it by inference."""
        for around, inner in _around(path):
            for module, outputs in self._open.get(around, {}).items():
                if module != inner:
                    outputs[:] = [each for each in outputs if (site, "") not in self._origins.get(each.hash, ())]

    def _before(self, path: str) -> list[str]:
        """Sites of the outputs that a module may have received through a function."""
        for around, inner in _around(path):
            fired = [each for name, outputs in self._open.get(around, {}).items() if name != inner for each in outputs]
            if fired:
                return list(dict.fromkeys(self._first(each) for each in fired))
            given = [each for each in self._given.get(around, ()) if _is_float(each)]
            if given:
                return list(dict.fromkeys(site for each in given for site, _ in self._origins.get(each.hash, ())))
        return []

    def _first(self, value: FlowValue) -> str:
        """Site of the output that held the same bytes first."""
        return next((site for site, through in self._origins.get(value.hash, ()) if not through), value.site)

    def _shown(self, value: FlowValue) -> list[tuple[str, str]]:
        """Where the arguments of the function come from that the values show."""
        if self._num_proofs >= MAX_PROOFS or not _is_float(value) or value.read is None:
            return []
        earlier = self._earlier(value)
        self._num_proofs += 1
        try:
            array = value.read()
            self._arrays = {each.hash: self._read(each) for each in earlier}
            shown = function_of(array, list(self._arrays.values()))
            if shown is None and is_evidence(array):
                shown = next(((PERMUTE, (i,)) for i, each in enumerate(earlier) if _is_permuted(each, value)), None)
        except TapscopeError:  # the run is damaged here, and other screens say so
            return []
        if shown is None:
            return []
        name, arguments = shown
        origins = [each for i in arguments for each in self._origins.get(earlier[i].hash, ())]
        return list(dict.fromkeys((site, FUNCTION if how == FUNCTION else name) for site, how in origins))

    def _earlier(self, value: FlowValue) -> list[FlowValue]:
        """Candidate sources of an input: the inputs of the enclosing modules, and the window."""
        given = (each for around, _ in _around(value.path) for each in self._given.get(around, ()))
        kept = (each for each in given if each.read is not None and _is_float(each))
        by_hash = {each.hash: each for each in [*kept, *self._of_shape.get(value.shape, ()), *self._latest]}
        return [each for each in by_hash.values() if each.hash != value.hash]

    def _read(self, value: FlowValue) -> Array:
        array = self._arrays.get(value.hash)
        if array is None:
            assert value.read is not None
            array = value.read()
        return array

    def _remember(self, value: FlowValue) -> None:
        if value.read is None or not _is_float(value):
            return
        for kept in (self._latest, self._of_shape.setdefault(value.shape, deque(maxlen=_WINDOW))):
            if all(each.hash != value.hash for each in kept):
                kept.append(value)


def _is_permuted(one: FlowValue, other: FlowValue) -> bool:
    """Whether two values with other bytes have the same elements."""
    return (
        one.bag is not None
        and (one.bag, one.dtype) == (other.bag, other.dtype)
        and prod(one.shape) == prod(other.shape)
    )


def _is_float(value: FlowValue) -> bool:
    return value.dtype.startswith(("float", "bfloat"))


def _around(path: str) -> Iterator[tuple[str, str]]:
    """(module, the module in it that is or holds the path), from the inside out."""
    while path:
        around = path.rpartition(".")[0]
        yield around, path
        path = around
