"""Facts: the value types of findings: sides, places, step results, row counts and error metrics."""

from msgspec import Struct


class Side(Struct, frozen=True, gc=False):
    """One run's side of a finding."""

    site: str
    """As recorded; for a part of a fused tensor the fused site, for a sum the site of the first summand."""
    dtype: str | None
    shape: tuple[int, ...]
    """Of the first firing, assembled over ranks."""
    num_records: int
    dims: str | None = None
    ranks: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()
    """The sites that were joined or summed; empty if it is :attr:`site` alone."""


class ErrorMetrics(Struct, frozen=True, gc=False):
    """Global metrics over all values that were read; differences are over positions that are finite on both sides."""

    max_abs: float
    mean_abs: float
    rel_l2: float
    rel: float
    """1 - 2 a.b / (a.a + b.b), from 0 to 2; the metric by which SGLang's comparator judges."""
    cosine: float
    equal: int
    count: int
    over: int
    """Elements beyond --atol/--rtol; 0 if the noise floor decided."""
    nonfinite_baseline: int
    nonfinite_target: int
    nonfinite_mismatch: int


class Place(Struct, frozen=True, gc=False):
    """A place in a tensor: step, and token row or index."""

    step: int
    """Target step."""
    baseline_step: int
    request: str | None = None
    position: int | None = None
    visit: int = 0
    index: tuple[int, ...] = ()
    """(row, column) for a tensor compared whole, (column,) within a token row."""
    rank: int | None = None
    """Target rank, if a single one holds it."""
    element: tuple[int, ...] = ()
    """Index along all axes of a tensor compared whole, in the form of ``tapscope show --slice``; empty if unknown, or
    |within a token row."""
    in_shard: tuple[int, ...] = ()
    """The same index within the shard of :attr:`rank`, if several ranks hold the tensor; also within a token row."""

    def text(self) -> str:
        """``request 0, position 6``, with the visit if it is not the first; ``[0,6,2,21]`` without token rows."""
        if self.position is None:
            return f"[{','.join(map(str, self.element or self.index))}]"
        again = f", visit {self.visit}" if self.visit else ""
        return f"request {self.request}, position {self.position}{again}"


class StepResult(Struct, frozen=True, gc=False):
    """The rows of a finding in one target step."""

    step: int
    rows: int
    max_abs: float
    rel_l2: float
    error: float
    """Largest error of a row, relative to its size."""
    nonfinite: int = 0
    """Places where one side is not finite and the other is different."""


class RowCounts(Struct, frozen=True, gc=False):
    """What became of a finding's token rows."""

    compared: int = 0
    forked: int = 0
    """Excluded because the tokens of the request had diverged."""
    unaligned: int = 0
    """Token never computed by the other run."""
    absent: int = 0
    """Computed by both runs, but recorded by only one at this site."""
