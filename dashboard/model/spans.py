"""Division of a sequence into parts of nearly equal length, for charts with fewer cells than items."""

from itertools import pairwise


def even_spans(length: int, count: int) -> list[tuple[int, int]]:
    """Divide ``length`` items into at most ``count`` non-empty half-open spans; empty if there are no items."""
    num = min(length, max(count, 1))
    return list(pairwise(i * length // num for i in range(num + 1))) if num else []
