"""Facts: the value types of findings: sides, places, step results, row counts and error metrics."""

import math

from msgspec import Struct, structs

from tapscope.core.deprecation import deprecated_attributes
from tapscope.core.observe import again_words


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


def sqnr_of(rel_l2: float) -> float:
    """Signal-to-quantization-noise ratio in dB, -20 log10(rel_l2); infinite where all values are equal."""
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
    """Global metrics over all values that were read.

    Differences of a :class:`.PairResult` are over positions that are finite on both sides. Those of a :class:`.Finding`
    are nan where a value is not finite in one run only, see :meth:`over_all_values`.
    """

    max_abs: float
    mean_abs: float
    rel_l2: float
    rel: float
    """1 - 2 a.b / (a.a + b.b), from 0 to 2; the metric by which SGLang's comparator judges."""
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
        """With nan for differences that include a value which is not finite in one run only, as NumPy and
        :func:`torch.testing.assert_close` give. Equal infinities, and NaN on both sides, count as equal."""
        if not self.num_nonfinite_mismatch:
            return self
        names = ("max_abs", "mean_abs", "rel_l2", "rel", "cosine")
        return structs.replace(self, **dict.fromkeys(names, math.nan))


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
    within a token row."""
    in_shard: tuple[int, ...] = ()
    """The same index within the shard of :attr:`rank`, if several ranks hold the tensor; also within a token row."""
    token_id: int | None = None
    """The token at the position, if a tokenizer is known; only at the places of divergences."""
    token_text: str = ""
    """What it decodes to."""
    branch: int = 0
    """Of a row in a draft model's tree: see :attr:`.RowSpan.branch`."""

    def text(self) -> str:
        """``request 0, position 6``, with the visit if it is not the first, the branch of a draft model's tree, and
        the token (``' the'``) if it is known; ``[0,6,2,21]`` without token rows."""
        if self.position is None:
            return f"[{','.join(map(str, self.element or self.index))}]"
        again = again_words(self.visit, self.branch)
        token = f" ({self.token_text!r})" if self.token_text else ""
        return f"request {self.request}, position {self.position}{again}{token}"


@deprecated_attributes({"rows": "num_rows", "nonfinite": "num_nonfinite_mismatch"})
class StepResult(Struct, frozen=True, gc=False):
    """The rows of a finding in one target step."""

    step: int
    num_rows: int
    max_abs: float
    rel_l2: float
    error: float
    """Largest error of a row, relative to its size."""
    num_nonfinite_mismatch: int = 0
    """Places where one side is not finite and the other is different."""

    def over_all_values(self) -> "StepResult":
        """See :meth:`ErrorMetrics.over_all_values`."""
        if not self.num_nonfinite_mismatch:
            return self
        return structs.replace(self, **dict.fromkeys(("max_abs", "rel_l2", "error"), math.nan))


@deprecated_attributes({name: f"num_{name}" for name in ("compared", "forked", "unaligned", "absent")})
class RowCounts(Struct, frozen=True, gc=False):
    """Counts of a finding's token rows: compared, forked, unaligned and so on."""

    num_compared: int = 0
    num_forked: int = 0
    """Excluded because the tokens of the request had diverged."""
    num_unaligned: int = 0
    """Token never computed by the other run."""
    num_absent: int = 0
    """Computed by both runs, but recorded by only one at this site."""


class ChoiceDifference(Struct, frozen=True, gc=False):
    """How the experts or keys that both runs chose for each row differ as sets."""

    k: int
    """Choices per row."""
    num_rows: int
    """Rows that were compared."""
    num_rows_different: int
    """Rows with other choices, in whatever order."""
    num_different: int
    """Choices that only one run has, over all rows."""
    max_different: int
    """The same over the row with the most."""
