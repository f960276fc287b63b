"""Facts: what findings are made of: sides, places, steps, counts, numbers."""

from msgspec import Struct


class Side(Struct, frozen=True, gc=False):
    """One run's part of a finding."""

    site: str
    """As it was recorded: of a fused tensor's part the whole's, of a sum the first summand's."""
    dtype: str | None
    shape: tuple[int, ...]
    """Of the first firing, put together over ranks."""
    num_records: int
    dims: str | None = None
    ranks: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()
    """The sites that it was joined or added up from; empty where :attr:`site` alone is."""


class ErrorMetrics(Struct, frozen=True, gc=False):
    """Global measures over everything that was read; differences are over positions finite on both sides."""

    max_abs: float
    mean_abs: float
    rel_l2: float
    rel: float
    """1 - 2 a.b / (a.a + b.b), which SGLang's comparator judges by; from 0 to 2."""
    cosine: float
    equal: int
    count: int
    over: int
    """Elements beyond --atol/--rtol; 0 when the noise floor decided."""
    nonfinite_baseline: int
    nonfinite_target: int
    nonfinite_mismatch: int


class Place(Struct, frozen=True, gc=False):
    """Where something is."""

    step: int
    """Target step."""
    baseline_step: int
    request: str | None = None
    position: int | None = None
    visit: int = 0
    index: tuple[int, ...] = ()
    """(row, column) for a tensor compared whole, (column,) within a token row."""
    rank: int | None = None
    """Target rank, where one alone holds it."""
    element: tuple[int, ...] = ()
    """Index along all axes of a tensor compared whole, as ``tapscope show --slice`` takes it; empty where that is not
    known, or within a token row."""
    in_shard: tuple[int, ...] = ()
    """The same in what :attr:`rank` recorded, where several ranks hold the tensor; also within a token row."""

    def text(self) -> str:
        """``request 0, position 6``, with the visit where it is not the first; ``[0,6,2,21]`` without token rows."""
        if self.position is None:
            return f"[{','.join(map(str, self.element or self.index))}]"
        again = f", visit {self.visit}" if self.visit else ""
        return f"request {self.request}, position {self.position}{again}"


class StepResult(Struct, frozen=True, gc=False):
    """A finding's rows in one target step."""

    step: int
    rows: int
    max_abs: float
    rel_l2: float
    error: float
    """Largest error of a row, relative to its size."""
    nonfinite: int = 0
    """Places where one side is not finite and the other is something else."""


class RowCounts(Struct, frozen=True, gc=False):
    """What became of a finding's token rows."""

    compared: int = 0
    forked: int = 0
    """Set aside because the request's tokens had parted."""
    unaligned: int = 0
    """The other run never computed this token."""
    absent: int = 0
    """Both runs computed it, one recorded it here."""
