"""Settings of a comparison that keys change while it is on the screen: swapped sides, and tolerance."""

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
    """Changes that the user made on the screen to the options of a comparison."""

    swapped: bool = False
    tolerance: tuple[float, float] | Literal["floor"] | None = None
    """(rtol, atol), or ``"floor"`` to judge by the noise floor; None keeps the command-line flags."""

    def of(self, options: CompareOptions) -> CompareOptions:
        """Return ``options`` with these changes applied. Raises ConfigError."""
        if self.swapped:
            options = _swapped_options(options)
        if self.tolerance is None:
            return options
        rtol, atol = (None, None) if self.tolerance == "floor" else self.tolerance
        return structs.replace(options, rtol=rtol, atol=atol)


def _swapped_options(options: CompareOptions) -> CompareOptions:
    """Swap baseline and target in all options. The noise run is dropped: it describes the baseline only."""

    def swap(entries: tuple[_Sided, ...]) -> tuple[_Sided, ...]:
        return tuple(structs.replace(entry, side=_OTHER_SIDE.get(entry.side, entry.side)) for entry in entries)

    mapping = structs.replace(options.mapping, rename=swap(options.mapping.rename), dims=swap(options.mapping.dims))
    own: dict[str, Any] = {"dims": swap(options.dims), "mesh": swap(options.mesh), "mapping": mapping}
    return structs.replace(options, **own, steps=options.steps_of(1), shift_steps=-options.shift_steps, noise_run=None)


def parse_tolerance(text: str) -> tuple[float, float] | Literal["floor"]:
    """Parse ``1e-3`` or ``1e-3, 1e-5`` to (rtol, atol), or an empty string to ``"floor"``. Raises ConfigError."""
    words = text.replace(",", " ").split()
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = [math.nan]
    if len(numbers) > 2 or not all(0.0 <= number < math.inf for number in numbers):
        raise ConfigError(f"invalid tolerance {text!r}: expected rtol, or rtol and atol, e.g. 1e-3 1e-5")
    return "floor" if not numbers else (numbers[0], numbers[1] if len(numbers) > 1 else 0.0)
