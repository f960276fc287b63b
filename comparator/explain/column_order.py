"""Column order: the target has the baseline's columns in another order, as from a wrong head or RoPE layout."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.experts import distinct
from tapscope.comparator.explain.hypothesis_test import Hypothesis, explained_share
from tapscope.comparator.explain.region_text import spans

Array = np.ndarray[Any, Any]

MAX_BLOCKS = 512
"""Maximum number of blocks whose order is searched."""
SEARCH_ROWS = 32
"""Maximum number of affected rows used in the search."""
MIN_EVIDENCE = 16
"""Minimum number of values per block over these rows; fewer could match by chance."""
MIN_ROWS = 2
"""Minimum number of distinct rows for an order of single columns: in one row, several columns hold nearly equal
values."""
MIN_EXPLAINED = 0.9
FULLY_EXPLAINED = 0.999
"""Explained share beyond which smaller blocks are not tried."""
_MAX_LIST_LENGTH = 90
"""Maximum length of a list of columns, in characters; longer lists are abbreviated."""
_MAX_COLUMNS_SHOWN = 6
_NAMED_BLOCKS = 8
"""Maximum number of blocks whose order is listed."""


def column_orders(region: ErrorRegion) -> Iterator[Hypothesis]:
    """Yield orders of the columns: permuted blocks, the other RoPE layout, transposed heads, or any other order."""
    width = region.sample.baseline.shape[1]
    if width < 4 or width != region.sample.width:
        return
    yield from _blocks(region, width)
    yield from _moved(region)
    if len(region.columns) < 2:
        return
    for size in _sizes(region, width):
        yield from _layouts(region, width, size)
    reverse = np.arange(width)[::-1]
    if np.isin(np.flatnonzero(reverse != np.arange(width)), region.columns).all():
        yield _columns(region, "order", "target = baseline with its columns reversed", reverse, 0)
    yield from _any_order(region)


def _columns(region: ErrorRegion, name: str, sentence: str, source: Array, freedom: int) -> Hypothesis:
    """Return the hypothesis that target columns are the baseline columns ``source`` [width]."""
    return Hypothesis(name, sentence, region.cut(region.sample.baseline[:, source]), freedom)


def _sizes(region: ErrorRegion, width: int) -> list[int]:
    """Return possible head dims: those of the model configs, the usual ones, and the whole row."""
    usual = (64, 128, 32, 16, 8, 96, 80, 256, width)
    return [n for n in dict.fromkeys((*region.head_dims, *usual)) if 2 <= n <= width and width % n == 0]


def _layouts(region: ErrorRegion, width: int, size: int) -> Iterator[Hypothesis]:
    heads = np.arange(width).reshape(-1, size)
    each = f"each block of {size}" if size < width else "each row"
    if size % 2 == 0 and size > 2:
        halves = heads.reshape(-1, 2, size // 2).swapaxes(1, 2).reshape(-1)
        text = f"target holds the pairs of {each} interleaved, baseline as two halves (rope layout)"
        yield _columns(region, "rope layout", text, halves, 0)
        pairs = heads.reshape(-1, size // 2, 2).swapaxes(1, 2).reshape(-1)
        text = f"target holds the pairs of {each} as two halves, baseline interleaved (rope layout)"
        yield _columns(region, "rope layout", text, pairs, 0)
    if len(heads) > 1 and size > 1:
        text = f"target has the {len(heads)} × {size} values of each row transposed to {size} × {len(heads)}"
        yield _columns(region, "transposed rows", text, heads.T.reshape(-1), 0)
        back = np.arange(width).reshape(size, -1).T.reshape(-1)
        text = f"target has the {size} × {len(heads)} values of each row transposed to {len(heads)} × {size}"
        yield _columns(region, "transposed rows", text, back, 0)


def _blocks(region: ErrorRegion, width: int) -> Iterator[Hypothesis]:
    """Yield the largest blocks that were moved or copied as a whole."""
    rows = region.rows[:: max(len(region.rows) // SEARCH_ROWS, 1)][:SEARCH_ROWS]
    scale = region.sample.size[rows]
    before, after = (np.nan_to_num(v[rows] / scale) for v in (region.sample.baseline, region.sample.target))
    for count in [n for n in range(2, min(width, MAX_BLOCKS) + 1) if width % n == 0]:
        size = width // count
        if size * len(rows) < MIN_EVIDENCE or count * width * len(rows) > 1 << 27:
            return
        source = _nearest(before, after, count)
        if np.array_equal(source, np.arange(count)):
            continue
        columns = np.arange(width).reshape(count, size)[source].reshape(-1)
        one_to_one = len(set(source.tolist())) == count
        moved = region.columns[columns[region.columns] != region.columns]
        is_whole = len(moved) == int((columns != np.arange(width)).sum())
        natural = _block_order_text(source, size) if one_to_one and is_whole else ""
        is_order = set(moved.tolist()) == set(columns[moved].tolist())
        sentence = natural or _order_sentence(moved, columns[moved])[0] if len(moved) else ""
        if not sentence:
            continue
        hypothesis = _columns(
            region, "block order" if is_order else "block copies", sentence, columns, 1 if is_order else 2
        )
        yield hypothesis
        if explained_share(region, hypothesis.values) > FULLY_EXPLAINED:
            return


def _moved(region: ErrorRegion) -> Iterator[Hypothesis]:
    """Yield an order of affected columns, each of which holds another column of the baseline."""
    baseline, columns = region.sample.baseline[region.rows] * region.weight, region.columns
    after = region.after * region.weight
    if not np.isfinite(baseline).all() or not np.isfinite(after).all() or len(distinct(baseline)) < MIN_ROWS:
        return
    if len(columns) * baseline.size > 1 << 26:
        return
    distance = (baseline**2).sum(axis=0)[None, :] - 2.0 * (after.T @ baseline)
    source = distance.argmin(axis=1)
    own = distance[np.arange(len(columns)), columns]
    source = np.where(own <= distance[np.arange(len(columns)), source], columns, source)
    moved = source != columns
    if not moved.any():
        return
    off = np.abs(after - baseline[:, source])[:, moved]
    if float((off**2).sum()) > (1.0 - MIN_EXPLAINED) * float(
        (np.abs(after - baseline[:, columns])[:, moved] ** 2).sum()
    ):
        return
    values = region.sample.baseline[np.ix_(region.rows, source)]
    sentence, is_order = _order_sentence(columns[moved], source[moved])
    yield Hypothesis("block order" if is_order else "block copies", sentence, values, 1 if is_order else 2)


def _order_sentence(columns: Array, source: Array) -> tuple[str, bool]:
    """Return (sentence, whether the columns are a permutation)."""
    is_order = set(columns.tolist()) == set(source.tolist())
    is_plain, text = order_text(columns, source)
    return f"target {'has' if is_plain else 'holds'} {text}", is_order


def order_text(columns: Array, source: Array) -> tuple[bool, str]:
    """Return (whether the order is a swap or a rotation, text that says which columns hold which)."""
    holds = dict(zip(columns.tolist(), source.tolist(), strict=True))
    ordered = sorted(holds)
    is_order = set(holds) == set(holds.values())
    if is_order and all(holds[holds[column]] == column for column in holds):
        first = [column for column in ordered if column < holds[column]]
        return True, f"{_listed(first)} and {_listed([holds[c] for c in first])} swapped"
    if is_order and len(holds) > 2:
        by = -ordered.index(holds[ordered[0]]) % len(ordered)
        by = by if 2 * by <= len(ordered) else by - len(ordered)
        if all(holds[column] == ordered[(i - by) % len(ordered)] for i, column in enumerate(ordered)):
            return True, f"{_listed(ordered)} rotated by {str(by).replace('-', '−')}"
    return False, f"baseline's {_listed([holds[column] for column in ordered])} in {_listed(ordered)}"


def _listed(columns: Sequence[int]) -> str:
    text = spans("column", columns)
    if len(text) <= _MAX_LIST_LENGTH:
        return text
    some = ", ".join(map(str, columns[:_MAX_COLUMNS_SHOWN]))
    return f"{len(columns)} columns ({some}, …)"


def _nearest(before: Array, after: Array, count: int) -> Array:
    """Return the baseline block nearest to each target block, as [blocks]."""
    one, two = (v.reshape(len(v), count, -1).swapaxes(0, 1).reshape(count, -1) for v in (before, after))
    distance = (one * one).sum(axis=1)[None, :] - 2.0 * (two @ one.T)  # |after|^2 is constant within a row: omitted
    best = distance.argmin(axis=1)
    own = np.diagonal(distance)
    nearest: Array = np.where(own <= distance[np.arange(count), best], np.arange(count), best)
    return nearest


def _block_order_text(source: Array, size: int) -> str:
    """Return the order of blocks in words; empty if the order has no name, or if a list of columns is clearer."""
    count = len(source)
    moved = np.flatnonzero(source != np.arange(count))
    if count == 2:
        return f"target has the two halves of each row swapped ({size} columns each: gate and up, or two ranks' shards)"
    if len(moved) == 2 and size > 1:
        return f"target has blocks {moved[0]} and {moved[1]} of {size} columns swapped (heads, or shards of ranks)"
    if np.array_equal(source, np.arange(count)[::-1]):
        return f"target has the {count} blocks of {size} columns in reverse"
    shift = int(source[0])
    if size > 1 and np.array_equal(source, (np.arange(count) + shift) % count):
        return f"target has the {count} blocks of {size} columns rotated by {count - shift}"
    for inner in [n for n in range(2, count) if count % n == 0]:
        if np.array_equal(source, np.arange(count).reshape(-1, inner).T.reshape(-1)):
            return (
                f"target has the {count} blocks of {size} columns in the order of {inner} × {count // inner} "
                f"instead of {count // inner} × {inner} (repeated heads, as in grouped queries)"
            )
    if len(moved) <= 2 or size == 1 or count > _NAMED_BLOCKS:
        return ""
    return f"target has the {count} blocks of {size} columns in the order {', '.join(map(str, source))}"


def _any_order(region: ErrorRegion) -> Iterator[Hypothesis]:
    """Yield the same values, within each row or overall, in an order that the other hypotheses do not describe."""
    before, after = region.before, region.after
    if np.isnan(before).any() or np.isnan(after).any() or np.unique(after).size < 8:
        return
    if before.shape[1] > 1 and np.array_equal(np.sort(before, axis=1), np.sort(after, axis=1)):
        source = np.empty(before.shape[1], np.int64)
        source[np.argsort(after[0], kind="stable")] = np.argsort(before[0], kind="stable")
        moved = source != np.arange(len(source))
        if np.array_equal(after, before[:, source]) and np.unique(before[0]).size == len(source):
            sentence, is_order = _order_sentence(region.columns[moved], region.columns[source[moved]])
            yield Hypothesis("block order" if is_order else "block copies", sentence, after, 1)
            return
        yield Hypothesis("row permuted", "target holds each row's values in another order", after, 3)
    elif np.array_equal(np.sort(before, axis=None), np.sort(after, axis=None)):
        yield Hypothesis("permuted", "target holds the same values in another order", after, 4)
