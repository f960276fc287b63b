"""Spans: a sequence as consecutive parts of nearly equal length, for charts with fewer cells than items."""

from itertools import pairwise


def even_spans(length: int, count: int) -> list[tuple[int, int]]:
    """``length`` items as at most ``count`` half-open spans, none of them empty; none at all for no items."""
    num = min(length, max(count, 1))
    return list(pairwise(i * length // num for i in range(num + 1))) if num else []
