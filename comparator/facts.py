"""Value types of a finding: sides, places, step results, row counts and error metrics."""

import math

from msgspec import Struct, structs

from tapscope.core.deprecation import deprecated_attributes
from tapscope.core.observe import again_words


class Side(Struct, frozen=True, gc=False):
    """One run's side of a finding."""

    site: str
    """The recorded site: the fused site for a part of a fused tensor, and the first summand's site for a sum."""
    dtype: str | None
    shape: tuple[int, ...]
    """Shape of the first firing, assembled over ranks."""
    num_records: int
    dims: str | None = None
    ranks: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()
    """The sites that were concatenated or summed; empty if the side is :attr:`site` alone."""


def sqnr_of(rel_l2: float) -> float:
    """Return the signal-to-quantization-noise ratio in dB, -20 log10(rel_l2); infinite where all values are equal."""
    if rel_l2 == 0.0:
        return math.inf
    return -20.0 * math.log10(rel_l2) if math.isfinite(rel_l2) else math.nan


@deprecated_attributes(
    {
        "equal": "num_equal",
        "count": "num_elements",
        "over": "num_over_tolerance",
        "nonfinite_baseline": "num_nonfinite_baseline",
        "nonfinite_target": "num_nonfinite_target",
        "nonfinite_mismatch": "num_nonfinite_mismatch",
    }
)
class ErrorMetrics(Struct, frozen=True, gc=False):
    """Error metrics over all values that were read.

    In a :class:`.PairResult`, differences cover the positions that are finite on both sides. In a :class:`.Finding`,
    they are nan if a value is nonfinite in only one run, see :meth:`over_all_values`.
    """

    max_abs: float
    mean_abs: float
    rel_l2: float
    rel: float
    """1 - 2 a.b / (a.a + b.b), from 0 to 2: the metric of SGLang's comparator."""
    cosine: float
    num_equal: int
    num_elements: int
    num_over_tolerance: int
    """Elements beyond --atol/--rtol; 0 if the noise floor decided."""
    num_nonfinite_baseline: int
    num_nonfinite_target: int
    num_nonfinite_mismatch: int

    @property
    def sqnr(self) -> float:
        """Signal-to-quantization-noise ratio, see :func:`sqnr_of`."""
        return sqnr_of(self.rel_l2)

    def over_all_values(self) -> "ErrorMetrics":
        """Return the metrics with nan for every difference that includes a value that is nonfinite in only one run.

        NumPy and :func:`torch.testing.assert_close` give the same result. Equal infinities, and NaN on both sides,
        count as equal.
        """
        if not self.num_nonfinite_mismatch:
            return self
        names = ("max_abs", "mean_abs", "rel_l2", "rel", "cosine")
        return structs.replace(self, **dict.fromkeys(names, math.nan))


class Place(Struct, frozen=True, gc=False):
    """A place in a tensor: a step, and a token row or an index."""

    step: int
    """Target step."""
    baseline_step: int
    request: str | None = None
    position: int | None = None
    visit: int = 0
    index: tuple[int, ...] = ()
    """(row, column) for a tensor compared as a whole, (column,) within a token row."""
    rank: int | None = None
    """The only target rank with this place; None if several ranks have it."""
    element: tuple[int, ...] = ()
    """Index along all axes of a tensor compared as a whole, in the form of ``tapscope show --slice``; empty if unknown,
    or within a token row."""
    in_shard: tuple[int, ...] = ()
    """Index of the element within the shard of :attr:`rank`, if several ranks hold the tensor; also set within a token
    row."""
    token_id: int | None = None
    """The token id at the position, if a tokenizer is known; set only for the places of divergences."""
    token_text: str = ""
    """Decoded text of the token."""
    branch: int = 0
    """Branch of a row in a draft model's tree, see :attr:`.RowSpan.branch`."""

    def text(self) -> str:
        """Return the place as text: ``request 0, position 6``, or ``[0,6,2,21]`` without token rows.

        The text includes the visit if it is not the first, the branch of a draft model's tree, and the token (``'
        the'``) if known.
        """
        if self.position is None:
            return f"[{','.join(map(str, self.element or self.index))}]"
        again = again_words(self.visit, self.branch)
        token = f" ({self.token_text!r})" if self.token_text else ""
        return f"request {self.request}, position {self.position}{again}{token}"


@deprecated_attributes({"rows": "num_rows", "nonfinite": "num_nonfinite_mismatch"})
class StepResult(Struct, frozen=True, gc=False):
    """Errors of a finding's rows in one target step."""

    step: int
    num_rows: int
    max_abs: float
    rel_l2: float
    error: float
    """Largest error of a row, relative to the norm of the row."""
    num_nonfinite_mismatch: int = 0
    """Positions where one side is nonfinite and the other side has a different value."""

    def over_all_values(self) -> "StepResult":
        """Return the result with nan for errors, see :meth:`ErrorMetrics.over_all_values`."""
        if not self.num_nonfinite_mismatch:
            return self
        return structs.replace(self, **dict.fromkeys(("max_abs", "rel_l2", "error"), math.nan))


@deprecated_attributes({name: f"num_{name}" for name in ("compared", "forked", "unaligned", "absent")})
class RowCounts(Struct, frozen=True, gc=False):
    """Counts of a finding's token rows: compared, forked, unaligned and so on."""

    num_compared: int = 0
    num_forked: int = 0
    """Rows excluded because the tokens of the request had already diverged."""
    num_unaligned: int = 0
    """Rows whose token the other run never computed."""
    num_absent: int = 0
    """Rows that both runs computed but only one run recorded at this site."""


class ChoiceDifference(Struct, frozen=True, gc=False):
    """Set differences between the experts or keys that the two runs chose for each row."""

    k: int
    """Choices per row."""
    num_rows: int
    """Rows that were compared."""
    num_rows_different: int
    """Rows whose sets of choices differ, regardless of order."""
    num_different: int
    """Choices that only one run made, summed over all rows."""
    max_different: int
    """Choices that only one run made, in the row with the most of them."""
