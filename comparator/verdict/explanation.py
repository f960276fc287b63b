"""Explanation: the transformation of the baseline's values into the target's, if one hypothesis is clear."""

from msgspec import Struct


class Tested(Struct, frozen=True):
    """A tested hypothesis and its success in explaining the error."""

    name: str
    """Family of the hypothesis: ``scale``, ``shift``, ``cast``, …; only the best member of a family is listed."""
    sentence: str
    share: float
    """Fraction of the error's energy that the hypothesis removes, beyond the part that rounding explains; 0 if it does
    not help."""


class Explanation(Struct, frozen=True):
    """Result of the hypothesis tests on one divergence."""

    name: str
    """Family of the winning hypothesis; empty if none is clear."""
    sentence: str
    """``target = 1.041 × baseline``, without extent and share."""
    share: float
    """Fraction of the error's energy that the hypothesis removes; 0 if the cause was found in values of other sites."""
    extent: str = ""
    """Region of the tensor that contains the error: ``columns 32–63 (rank 1)``; empty if the error is everywhere."""
    tested: tuple[Tested, ...] = ()
    """Tested hypotheses, best first, without those that remove no error."""
    num_rows: int = 0
    """Number of rows examined."""

    @property
    def is_clear(self) -> bool:
        """Whether there is a clear cause."""
        return bool(self.name)

    @property
    def text(self) -> str:
        """The full sentence; empty if no cause is clear."""
        if not self.name:
            return ""
        where = f"in {self.extent}: " if self.extent else ""
        return f"{where}{self.sentence}" + (f" (removes {percent(self.share)} of the error)" if self.share else "")


def percent(share: float) -> str:
    """Format a fraction as ``99.9 %``, without rounding it up to 100."""
    if share >= 1.0 - 1e-12:
        return "100 %"
    return f"{min(100.0 * share, 99.99):.2f} %" if share > 0.999 else f"{100.0 * share:.1f} %"
