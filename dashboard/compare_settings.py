"""Way: how two runs are compared, as keys change it: which is the baseline, and by what is judged."""

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from msgspec import structs

from tapscope.comparator import CompareOptions
from tapscope.comparator.options.map_file import DimsEntry, RenameEntry
from tapscope.comparator.options.overrides import MeshEntry
from tapscope.core.errors import ConfigError

_OTHER_SIDE = {"baseline": "target", "target": "baseline"}
_Sided = TypeVar("_Sided", RenameEntry, DimsEntry, MeshEntry)


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """How the runs are compared, as keys change it."""

    swapped: bool = False
    tolerance: tuple[float, float] | Literal["floor"] | None = None
    """(rtol, atol), or the floor; None: as the flags say."""

    def of(self, options: CompareOptions) -> CompareOptions:
        """The options of the flags with that tolerance; raises ConfigError."""
        if self.swapped:
            options = _turned(options)
        if self.tolerance is None:
            return options
        rtol, atol = (None, None) if self.tolerance == "floor" else self.tolerance
        return structs.replace(options, rtol=rtol, atol=atol)


def _turned(options: CompareOptions) -> CompareOptions:
    """Swap the sides of one setting. A noise run of the baseline says nothing about the target, so it is dropped."""

    def turn(entries: tuple[_Sided, ...]) -> tuple[_Sided, ...]:
        return tuple(structs.replace(entry, side=_OTHER_SIDE.get(entry.side, entry.side)) for entry in entries)

    mapping = structs.replace(options.mapping, rename=turn(options.mapping.rename), dims=turn(options.mapping.dims))
    own: dict[str, Any] = {"dims": turn(options.dims), "mesh": turn(options.mesh), "mapping": mapping}
    return structs.replace(options, **own, steps=options.steps_of(1), shift_steps=-options.shift_steps, noise_run=None)


def parse_tolerance(text: str) -> tuple[float, float] | Literal["floor"]:
    """``1e-3``, ``1e-3, 1e-5`` or nothing, which means the floor; raises ConfigError."""
    words = text.replace(",", " ").split()
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = [math.nan]
    if len(numbers) > 2 or not all(0.0 <= number < math.inf for number in numbers):
        raise ConfigError(f"invalid tolerance {text!r}: expected rtol, or rtol and atol, e.g. 1e-3 1e-5")
    return "floor" if not numbers else (numbers[0], numbers[1] if len(numbers) > 1 else 0.0)
