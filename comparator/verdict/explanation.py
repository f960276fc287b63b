"""Explanation: what turns the baseline's values into the target's, if one hypothesis is clear."""

from msgspec import Struct


class Tested(Struct, frozen=True):
    """One hypothesis and how well it explains the error."""

    name: str
    """Its family: ``scale``, ``shift``, ``cast``, …; only the best member of a family is listed."""
    sentence: str
    share: float
    """Share of the error's energy that it removes, beyond what rounding explains; 0 if it does not help."""


class Explanation(Struct, frozen=True):
    """The result of the hypotheses on one divergence."""

    name: str
    """Family of the winner; empty if none is clear."""
    sentence: str
    """``target = 1.041 × baseline``, without the extent and the share."""
    share: float
    """Share of the error's energy that it removes; 0 if the cause was found in values of other sites."""
    extent: str = ""
    """Region of the tensor with the error, if not everywhere: ``columns 32–63 (rank 1)``; else empty."""
    tested: tuple[Tested, ...] = ()
    """Best first, without those that remove nothing."""
    num_rows: int = 0
    """Number of rows examined."""

    @property
    def is_clear(self) -> bool:
        """Whether there is a clear cause."""
        return bool(self.name)

    @property
    def text(self) -> str:
        """The full sentence; empty if none is clear."""
        if not self.name:
            return ""
        where = f"in {self.extent}: " if self.extent else ""
        return f"{where}{self.sentence}" + (f" (removes {percent(self.share)} of the error)" if self.share else "")


def percent(share: float) -> str:
    """``99.9 %``; never rounded up to 100."""
    if share >= 1.0 - 1e-12:
        return "100 %"
    return f"{min(100.0 * share, 99.99):.2f} %" if share > 0.999 else f"{100.0 * share:.1f} %"
