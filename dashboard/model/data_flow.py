"""Data flow between modules: which module received which output, derived from the records of one rank and step.

Three kinds, from the strongest to the weakest:

- an input has the same bytes as an output;
- an input is a simple function of earlier values (:func:`~tapscope.dashboard.model.flow_proof.function_of`), which the
  recorded values prove;
- an input is neither, so an unrecorded function produced it. Its arguments are inferred from the order: the earlier
  outputs in the same parent module that no other module received, or else the inputs of that parent module.
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
"""Kind of an inferred flow: through a function that is not recorded."""
MAX_PROOFS = 1_000
"""Maximum number of inputs whose values are read; flows to later inputs are inferred."""
_WINDOW = 24
"""Number of latest values, overall and of an input's shape, that are candidate arguments of the input's function.

The inputs of the enclosing modules are candidates as well.
"""


@dataclass(frozen=True, eq=False, slots=True)
class FlowValue:
    """A recorded tensor with its hash."""

    site: str
    dtype: str
    shape: tuple[int, ...]
    hash: str
    bag: str | None = None
    """Order-independent hash of the elements, see docs/reference/run-format.md."""
    read: Callable[[], Array] | None = None
    """Reads the values; None if the payload was not recorded. May raise TapscopeError."""

    @property
    def path(self) -> str:
        """Path of the module that the site belongs to."""
        return module_of(self.site)


@dataclass(frozen=True, slots=True)
class Flow:
    """Data flow from an output to an input."""

    producer: str
    """Site of the output."""
    consumer: str
    """Site of the input."""
    through: str = ""
    """Empty if the bytes are equal, else the proven function, or FUNCTION."""


def is_input(site: str) -> bool:
    """Return whether the site is a forward input of its module."""
    return _port(site).startswith("in[")


def is_output(site: str) -> bool:
    """Return whether the site is a forward output of its module."""
    return _port(site).partition("[")[0] == "out"


def _port(site: str) -> str:
    """Return the port without its call number; empty for a gradient."""
    port = port_of(site).partition("#")[0]
    return "" if port.endswith(".grad") else port


def data_flows(values: Iterable[FlowValue]) -> list[Flow]:
    """Derive the data flows of ``values``: one step on one rank, in execution order.

    Flows between a module and its own submodules are left out, as are flows to or from the root module.
    """
    return list(_Flows().of(values))


class _Flows:
    def __init__(self) -> None:
        self._origins: dict[str, list[tuple[str, str]]] = {}
        """Hash -> (site, function) of the outputs that first produced these bytes; an empty function means equal bytes.
        """
        self._unclaimed: dict[str, dict[str, list[FlowValue]]] = {}
        """Module -> child module -> the child's latest outputs that no later child has received."""
        self._inputs: dict[str, list[FlowValue]] = {}
        """Module -> inputs of its latest call."""
        self._latest: deque[FlowValue] = deque(maxlen=_WINDOW)
        self._of_shape: dict[tuple[int, ...], deque[FlowValue]] = {}
        self._arrays: dict[str, Array] = {}
        """Hash -> array of the values that the latest input was compared with; a cache, as not all formats map their
        files."""
        self._num_proofs = 0

    def of(self, values: Iterable[FlowValue]) -> Iterator[Flow]:
        """Process the calls of modules in order and yield their flows."""
        ports = (value for value in values if is_input(value.site) or is_output(value.site))
        for (path, received), group in groupby(ports, key=lambda value: (value.path, is_input(value.site))):
            firings = list(group)
            if received:
                yield from self._take_inputs(path, firings)
            else:
                self._take_outputs(path, firings)

    def _take_inputs(self, path: str, values: list[FlowValue]) -> Iterator[Flow]:
        self._unclaimed.pop(path, None)
        self._inputs[path] = values
        for value in values:
            if value.hash not in self._origins:
                origins = self._proven_origins(value)
                if origins:
                    self._origins[value.hash] = origins
        unknown = [value for value in values if value.hash not in self._origins and _is_float(value)]
        # if the origin of another input is known, these may be masks
        if len(unknown) == len([value for value in values if _is_float(value)]):
            sources = self._inferred_origins(path)
            for value in unknown:
                self._origins[value.hash] = [(site, FUNCTION) for site in sources]
        for value in values:
            self._remember(value)
            for site, through in self._origins.get(value.hash, ()):
                self._claim(path, site)
                producer = module_of(site)
                if path and producer and not contains(path, site) and not contains(producer, value.site):
                    yield Flow(site, value.site, through)

    def _take_outputs(self, path: str, values: list[FlowValue]) -> None:
        for value in values:
            self._origins.setdefault(value.hash, [(value.site, "")])
            self._remember(value)
        for ancestor, child in _ancestors(path):
            self._unclaimed.setdefault(ancestor, {})[child] = [value for value in values if _is_float(value)]

    def _claim(self, path: str, site: str) -> None:
        """Remove a received output from the candidates for inference in later modules."""
        for ancestor, child in _ancestors(path):
            for module, outputs in self._unclaimed.get(ancestor, {}).items():
                if module != child:
                    outputs[:] = [each for each in outputs if (site, "") not in self._origins.get(each.hash, ())]

    def _inferred_origins(self, path: str) -> list[str]:
        """Return the sites of the outputs that a module may have received through an unrecorded function."""
        for ancestor, child in _ancestors(path):
            unclaimed = self._unclaimed.get(ancestor, {})
            fired = [each for name, outputs in unclaimed.items() if name != child for each in outputs]
            if fired:
                return list(dict.fromkeys(self._first_site(each) for each in fired))
            given = [each for each in self._inputs.get(ancestor, ()) if _is_float(each)]
            if given:
                return list(dict.fromkeys(site for each in given for site, _ in self._origins.get(each.hash, ())))
        return []

    def _first_site(self, value: FlowValue) -> str:
        """Return the site of the first output with the same bytes."""
        return next((site for site, through in self._origins.get(value.hash, ()) if not through), value.site)

    def _proven_origins(self, value: FlowValue) -> list[tuple[str, str]]:
        """Return the origins of the arguments of the function that the values of an input prove; empty if there is no
        proof."""
        if self._num_proofs >= MAX_PROOFS or not _is_float(value) or value.read is None:
            return []
        earlier = self._earlier(value)
        self._num_proofs += 1
        try:
            array = value.read()
            self._arrays = {each.hash: self._read(each) for each in earlier}
            proof = function_of(array, list(self._arrays.values()))
            if proof is None and is_evidence(array):
                proof = next(((PERMUTE, (i,)) for i, each in enumerate(earlier) if _is_permuted(each, value)), None)
        except TapscopeError:  # the run is damaged; other screens report it
            return []
        if proof is None:
            return []
        name, arguments = proof
        origins = [each for i in arguments for each in self._origins.get(earlier[i].hash, ())]
        return list(dict.fromkeys((site, FUNCTION if through == FUNCTION else name) for site, through in origins))

    def _earlier(self, value: FlowValue) -> list[FlowValue]:
        """Return the candidate sources of an input: the inputs of the enclosing modules, and the window."""
        given = (each for ancestor, _ in _ancestors(value.path) for each in self._inputs.get(ancestor, ()))
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
    """Return whether two values with different bytes have the same elements."""
    return (
        one.bag is not None
        and (one.bag, one.dtype) == (other.bag, other.dtype)
        and prod(one.shape) == prod(other.shape)
    )


def _is_float(value: FlowValue) -> bool:
    return value.dtype.startswith(("float", "bfloat"))


def _ancestors(path: str) -> Iterator[tuple[str, str]]:
    """Yield (ancestor, its child on the path) from the innermost ancestor to the root."""
    while path:
        ancestor = path.rpartition(".")[0]
        yield ancestor, path
        path = ancestor
