"""Stats: counts, extremes and sums over the elements of a tensor; statistics of shards can be merged."""

import math
from typing import Any

from msgspec import Struct

from tapscope.run_format import validation


class Stats(Struct, frozen=True, gc=False):
    """Mergeable statistics over the finite elements of a tensor; non-finite elements are counted by kind."""

    count: int
    """Number of elements, including non-finite ones."""
    nan: int
    posinf: int
    neginf: int
    zeros: int
    subnormals: int
    min: float | None
    """None when no element is finite."""
    max: float | None
    absmax: float | None
    sum: float
    sumsq: float

    @property
    def nonfinite(self) -> int:
        """Number of NaN and infinite elements."""
        return self.nan + self.posinf + self.neginf

    @property
    def finite(self) -> int:
        """Number of finite elements, the basis of sums and extremes; 0 if the counts are inconsistent."""
        return max(0, self.count - self.nonfinite)

    @property
    def mean(self) -> float | None:
        """Mean of the finite elements; None if there are none."""
        return self.sum / self.finite if self.finite else None

    @property
    def rms(self) -> float | None:
        """Root mean square of the finite elements; None if there are none."""
        return math.sqrt(max(self.sumsq, 0.0) / self.finite) if self.finite else None

    @property
    def std(self) -> float | None:
        """Population standard deviation of the finite elements; None if there are none."""
        mean = self.mean
        return None if mean is None else math.sqrt(max(self.sumsq / self.finite - mean * mean, 0.0))

    def merge(self, other: "Stats") -> "Stats":
        """Return the statistics of the concatenation of two shards; not applicable to partial sums."""
        return Stats(
            self.count + other.count,
            self.nan + other.nan,
            self.posinf + other.posinf,
            self.neginf + other.neginf,
            self.zeros + other.zeros,
            self.subnormals + other.subnormals,
            _pick(min, self.min, other.min),
            _pick(max, self.max, other.max),
            _pick(max, self.absmax, other.absmax),
            self.sum + other.sum,
            self.sumsq + other.sumsq,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the ``stats`` field of a record line; a sum that overflowed becomes null."""
        return {
            "count": self.count,
            "nan": self.nan,
            "posinf": self.posinf,
            "neginf": self.neginf,
            "zeros": self.zeros,
            "subnormals": self.subnormals,
            "min": self.min,
            "max": self.max,
            "absmax": self.absmax,
            "sum": self.sum if math.isfinite(self.sum) else None,
            "sumsq": self.sumsq if math.isfinite(self.sumsq) else None,
        }

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> "Stats":
        """Parse the ``stats`` field of a record line, the inverse of :meth:`to_json`.

        Unknown fields are ignored. Raises KeyError for a missing field, and ValueError for one with an invalid value.
        """
        count, nan, posinf, neginf, zeros, subnormals = counts = (
            line["count"],
            line["nan"],
            line["posinf"],
            line["neginf"],
            line["zeros"],
            line["subnormals"],
        )
        low, high, absmax, total, squares = numbers = (
            line["min"],
            line["max"],
            line["absmax"],
            line["sum"],
            line["sumsq"],
        )
        if {*map(type, counts)} != _INT or min(counts) < 0:
            raise ValueError(f"stats are {validation.short(line)}: counts must be integers ≥ 0")
        if not {*map(type, numbers)} <= _REAL:
            numbers = tuple(validation.number(each, "a number of stats") for each in numbers)
        total, squares = (math.inf if each is None else each for each in (total, squares))
        return cls(count, nan, posinf, neginf, zeros, subnormals, low, high, absmax, total, squares)


_INT = {int}
_REAL = {float, type(None)}


def _pick(choose: Any, a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return b if a is None else a
    return float(choose(a, b))
