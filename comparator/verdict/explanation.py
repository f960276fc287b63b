"""Explanation: what turns the baseline's values into the target's, as far as one hypothesis says so clearly."""

from msgspec import Struct


class Tested(Struct, frozen=True):
    """One hypothesis and how well it does."""

    name: str
    """Its family: ``scale``, ``shift``, ``cast``, …; of a family only the best member is listed."""
    sentence: str
    share: float
    """Share of the error's energy that it removes, beyond what rounding explains; 0 for what does not help."""


class Explanation(Struct, frozen=True):
    """What the hypotheses say about one divergence."""

    name: str
    """Family of the winner; empty where nothing is clear."""
    sentence: str
    """``target = 1.041 × baseline``, without the extent and the share."""
    share: float
    """Share of the error's energy that it removes; 0 where the cause was read off other values than the site's."""
    extent: str
    """Where in the tensor the error is, where that is not everywhere: ``columns 32–63 (rank 1)``; else empty."""
    tested: tuple[Tested, ...]
    """Best first; those that remove nothing are left out."""
    num_rows: int
    """Rows that were looked at."""

    @property
    def is_clear(self) -> bool:
        """Whether there is anything to say."""
        return bool(self.name)

    @property
    def text(self) -> str:
        """The whole sentence; empty where nothing is clear."""
        if not self.name:
            return ""
        where = f"in {self.extent}: " if self.extent else ""
        return f"{where}{self.sentence}" + (f" (removes {percent(self.share)} of the error)" if self.share else "")


def percent(share: float) -> str:
    """``99.9 %``; never rounded up to a whole that it is not."""
    if share >= 1.0 - 1e-12:
        return "100 %"
    return f"{min(100.0 * share, 99.99):.2f} %" if share > 0.999 else f"{100.0 * share:.1f} %"
