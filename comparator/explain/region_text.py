"""Region text: describe the rows and columns of an error region in words."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.sample import Sample
from tapscope.core import formatting

Array = np.ndarray[Any, Any]
_NAMED = 4
_MAX_LISTED = 60
"""Maximum length of a list of columns, in characters; for longer lists only the count is given."""
_ATTENTION = re.compile(r"attn|attention|\b[qkvo]_proj|qkv")
_OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "linear_proj", "dense", "c_proj")


def describe(region: ErrorRegion, requests: Sequence[str], padded: frozenset[int]) -> str:
    """Return where the error region is, in words; empty if it is everywhere. ``padded`` are the indices of padded
    requests."""
    if region.sample.request[0] < 0 and len(region.rows) == len(region.columns) == 1 < region.sample.baseline.size:
        return "one element"  # without token rows, the flattened row and column do not identify tensor axes
    return " of ".join(part for part in (_columns(region), _rows(region, requests, padded)) if part)


def spans(what: str, indices: Sequence[int] | Array) -> str:
    """Return indices in words: ``row 3``, ``rows 0–7``, ``every second row from 1 to 15``, ``rows 0–7 and 32–39``."""
    numbers = [int(i) for i in indices]
    steps = set(np.diff(numbers).tolist())
    if len(numbers) > 2 and len(steps) == 1 and min(steps) > 1:
        return f"every {ordinal(steps.pop())} {what} from {numbers[0]} to {numbers[-1]}"
    ends = [i for i in range(len(numbers)) if i + 1 == len(numbers) or numbers[i + 1] != numbers[i] + 1]
    starts = [0, *(i + 1 for i in ends[:-1])]
    parts = [f"{numbers[a]}" if a == b else f"{numbers[a]}–{numbers[b]}" for a, b in zip(starts, ends, strict=True)]
    listed = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    return f"{what}{'s' if len(numbers) > 1 else ''} {listed}"


def _columns(region: ErrorRegion) -> str:
    columns, sample = region.columns, region.sample
    if len(columns) == sample.baseline.shape[1]:
        return ""
    first, last = int(columns[0]) + sample.first_column, int(columns[-1]) + sample.first_column
    listed = spans("column", columns + sample.first_column)
    if len(listed) > _MAX_LISTED:
        listed = _of_each_head(region) or f"{len(columns):,} of {sample.baseline.shape[1]:,} columns"
    is_range = 1 < len(columns) == last - first + 1
    listed = f"at least {listed}" if region.is_lower_bound else listed
    return listed + (_rank(region) or (_head(region, first, last) if is_range else ""))


def has_heads(site: str) -> bool:
    """Return whether the columns of a site are attention heads: projected q, k and v, or attention outputs before the
    output projection."""
    path, _, port = site.rpartition(":")
    parent, _, last = path.rpartition(".")
    if last in _OUTPUT_PROJECTIONS:
        return _ATTENTION.search(path) is not None and port.startswith("in")
    if "attn" in last or "attention" in last:  # a kernel inside an attention module, or the module itself
        return _ATTENTION.search(parent) is not None or (last == "c_attn" and port.startswith("out"))
    return _ATTENTION.search(path) is not None and port.startswith("out")


def _of_each_head(region: ErrorRegion) -> str:
    """Return text such as ``columns 2 and 6 of each head of 16``; empty if the heads differ."""
    columns, sample = region.columns, region.sample
    for size in region.head_dims if has_heads(sample.site) and not sample.first_column else ():
        one = np.unique(columns % size)
        if 1 < size < sample.width == sample.baseline.shape[1] and len(columns) * size == len(one) * sample.width:
            listed = spans("column", one)
            return f"{listed} of each head of {size}" if len(listed) <= _MAX_LISTED else ""
    return ""


def _rank(region: ErrorRegion) -> str:
    """Return text on the rank whose shard holds all affected columns; empty if there are several ranks."""
    ranks = region.sample.ranks
    here = np.unique(ranks[region.columns])
    if len(here) != 1 or here[0] < 0:
        return ""
    whole = int((ranks == here[0]).sum()) == len(region.columns)
    return f" (the shard of rank {here[0]})" if whole else f" (of rank {here[0]})"


def _head(region: ErrorRegion, first: int, last: int) -> str:
    for size in region.head_dims if has_heads(region.sample.site) else ():
        if size > 1 and first % size == 0 and (last + 1) % size == 0:
            heads = first // size, last // size
            return f" (head {heads[0]})" if heads[0] == heads[1] else f" (heads {heads[0]}–{heads[1]})"
    return ""


def _rows(region: ErrorRegion, requests: Sequence[str], padded: frozenset[int]) -> str:
    sample = region.sample
    if len(region.rows) == len(sample.baseline):
        return ""
    off = np.zeros(len(sample.baseline), bool)
    off[region.rows] = True
    if sample.request[0] < 0:
        return _plain_rows(off, sample)
    if off.sum() == 1:
        at = int(region.rows[0])
        return f"request {requests[int(sample.request[at])]}, position {sample.position[at]}"
    return (
        _by_request(sample.request, off, requests, padded)
        or _by_position(sample.request, sample.position, off)
        or _by_step(sample.step, off)
        or _counted(sample.request, off, sample, requests)
    )


def _plain_rows(off: Array, sample: Sample) -> str:
    """Return rows without requests, in words. If a site has several steps, steps are named instead of row indices."""
    rows, total = np.flatnonzero(off), sample.num_rows
    if len(np.unique(sample.step)) > 1:
        return _by_step(sample.step, off) or f"{len(rows):,} of {len(off):,} rows{_sampled(len(off), total)}"
    if len(rows) == 1:
        return f"row {rows[0]}"
    if len(off) == total and rows[-1] - rows[0] + 1 == len(rows):
        return f"rows {rows[0]}–{rows[-1]}"
    return f"{len(rows):,} of {len(off):,} rows{_sampled(len(off), total)}"


def _by_request(request: Array, off: Array, requests: Sequence[str], padded: frozenset[int]) -> str:
    """Return the affected requests in words, if all of their rows are affected; otherwise empty."""
    hit = set(request[off].tolist())
    if any(not off[request == one].all() for one in hit):
        return ""
    if len(hit) > 1 and hit == padded & set(request.tolist()):
        return "the requests that are padded"
    names = [requests[one] for one in sorted(hit)]
    if len(names) > _NAMED:
        return f"{formatting.plural(len(names), 'request')}, first {names[0]}"
    padding = ", which is padded" if len(names) == 1 and hit == padded & set(request.tolist()) else ""
    return f"request{'s' if len(names) > 1 else ''} {', '.join(names)}{padding}"


def _by_position(request: Array, position: Array, off: Array) -> str:
    """Return the affected positions in words, if they are the same in every request; otherwise empty."""
    hit, spared = position[off], position[~off]
    if set(hit.tolist()) & set(spared.tolist()):
        return _by_end(request, position, off)
    if len(set(hit.tolist())) == 1:
        return f"position {hit[0]}"
    if spared.max() < hit.min():
        return f"positions from {hit.min()} on"
    if spared.min() > hit.max():
        return f"positions up to {hit.max()}"
    return ""


def _by_step(step: Array, off: Array) -> str:
    """Return the affected steps in words, if all rows of one step, or of all steps from one on, are affected; otherwise
    empty."""
    hit, spared = step[off], step[~off]
    if set(hit.tolist()) & set(spared.tolist()):
        return ""
    if len(set(hit.tolist())) == 1:
        return f"step {hit[0]}"
    return f"steps from {hit.min()} on" if spared.max() < hit.min() else ""


def _by_end(request: Array, position: Array, off: Array) -> str:
    """Return text if the first or last token of every request is affected, or all others; otherwise empty."""
    for word, pick in (("last", np.max), ("first", np.min)):
        at = np.zeros(len(off), bool)
        for one in np.unique(request):
            at |= (request == one) & (position == pick(position[request == one]))
        if np.array_equal(off, at):
            return f"the {word} token of every request"
        if np.array_equal(off, ~at):
            return f"all but the {word} token of every request"
    return ""


def _counted(request: Array, off: Array, sample: Any, requests: Sequence[str]) -> str:
    hit = np.unique(request[off])
    positions = sample.position[off]
    if len(hit) == 1:
        where = f"request {requests[int(hit[0])]}"
        span = int(positions.max() - positions.min())
        spared = sample.position[~off & (request == hit[0])]
        if span + 1 == off.sum():
            last = "" if (spared > positions.max()).any() else " (its end)"
            return f"{where}, positions {positions.min()}–{positions.max()}{last}"
    return f"{int(off.sum()):,} of {len(off):,} rows{_sampled(len(off), sample.num_rows)}"


def _sampled(looked_at: int, total: int) -> str:
    return " looked at" if looked_at < total else ""


def ordinal(number: int) -> str:
    """Return the number as an ordinal: ``second``, ``third``, ``4th``."""
    return {2: "second", 3: "third"}.get(number, f"{number}th")
