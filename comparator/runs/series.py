"""Series: all firings of one site of a run, on all ranks and in all steps, in execution order."""

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.facts import Side
from tapscope.comparator.runs.derived_tensor import Derivation
from tapscope.comparator.runs.firings import Firing, Firings, FiringTable, Spans
from tapscope.run_format.record import Record
from tapscope.run_format.records import Records
from tapscope.run_format.run import Run
from tapscope.run_format.validation import MAX_COUNT

Array = np.ndarray[Any, Any]


class Series(Struct, frozen=True, gc=False):
    """All firings of one site in one pass of one model, ordered by step."""

    site: str
    group: tuple[str, str]
    """(model, pass)."""
    firings: Sequence[Firing]
    derivation: Derivation | None = None
    """How to compute the values from :attr:`sources`; None for a recorded site."""
    sources: tuple["Series", ...] = ()

    @property
    def first(self) -> Record:
        """The first record; its dtype and shape represent the site in reports."""
        return self.firings[0].records[0]

    @property
    def dtype(self) -> str | None:
        """The dtype of the first record; None for plain values."""
        return self.firings.kind.dtype if isinstance(self.firings, Firings) else self.first.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first record."""
        return self.firings.kind.shape if isinstance(self.firings, Firings) else self.first.shape

    @property
    def hashes(self) -> list[str | None]:
        """Hashes of all records."""
        if isinstance(self.firings, Firings):
            return self.firings.hashes
        return [record.hash for firing in self.firings for record in firing.records]

    @property
    def bags(self) -> list[str | None]:
        """Multiset hashes of all records."""
        if isinstance(self.firings, Firings):
            return self.firings.bags
        return [record.bag for firing in self.firings for record in firing.records]

    def digest_words(self, what: Literal["hashes", "bags"]) -> Array | None:
        """Return :attr:`hashes` or :attr:`bags` as uint64 [records, words]; None if they are not stored in columns."""
        return self.firings.digest_words(what) if isinstance(self.firings, Firings) else None

    @property
    def is_stored(self) -> bool:
        """Whether all records have a payload."""
        if isinstance(self.firings, Firings):
            return self.firings.is_stored
        return all(record.entry is not None for firing in self.firings for record in firing.records)

    @property
    def num_records(self) -> int:
        """Number of records on all ranks."""
        if isinstance(self.firings, Firings):
            return self.firings.num_records
        return sum([len(f.records) for f in self.firings])

    @property
    def is_tensor(self) -> bool:
        """Whether the site holds tensors rather than plain values."""
        return self.dtype is not None

    @property
    def is_float(self) -> bool:
        """Whether the site holds floating-point tensors."""
        return (self.dtype or "").startswith(("float", "bfloat"))


Key = tuple[tuple[str, str], str]
"""Key of a recorded series within its run: ((model, pass), site)."""


def key_of(one: Series) -> Key:
    """Return the key of a recorded series within its run."""
    return one.group, one.site


def sources_of(one: Series) -> Sequence[Series]:
    """Return the recorded series that this series is derived from, or the series itself if recorded."""
    return [leaf for source in one.sources for leaf in sources_of(source)] if one.sources else (one,)


def source_keys(one: Series) -> Iterator[Key]:
    """Yield the keys of the recorded series behind a series."""
    return map(key_of, sources_of(one))


def derived_series(site: str, recipe: Derivation, sources: Sequence[Series]) -> Series:
    """Return a series derived from ``sources``, with the firings that all of them have.

    Raises ValueError if the sources have no firing in common.
    """
    shared = _shared(sources)
    kept = [
        structs.replace(one, firings=tuple(f for f in one.firings if (f.step, f.call) in shared)) for one in sources
    ]
    if not shared:
        raise ValueError(f"{' and '.join(s.site for s in sources)} never fired together")
    return Series(site, kept[0].group, kept[0].firings, recipe, tuple(kept))


def side_of(one: Series, shape: tuple[int, ...]) -> Side:
    """Return the :class:`.Side` of a finding for a series whose first firing has the assembled ``shape``."""
    first, sources = one.first, sources_of(one)
    ranks = [record.key.rank for firing in one.firings for record in firing.records]
    count = sum(source.num_records for source in sources) if one.sources else len(ranks)
    parts = tuple(dict.fromkeys(source.site for source in sources)) if len(sources) > 1 else ()
    parts = parts if len(parts) > 1 else ()
    return Side(sources[0].site, first.dtype, shape, count, first.dims, _ordered(frozenset(ranks)), parts)


def named_side(side: Side | None, one: Series | None) -> Side | None:
    """Return the side of a template pair transferred to another series with the same shape key."""
    if side is None or one is None or (site := sources_of(one)[0].site) == side.site:
        return side
    return Side(site, side.dtype, side.shape, side.num_records, side.dims, side.ranks, side.parts)


@lru_cache
def _ordered(ranks: frozenset[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))  # cached, so that sites with the same ranks share one object


def spans_of(series: Sequence[Series]) -> Spans:
    """Return the payload locations of series with equally many records, all with payloads
    (:attr:`~Series.is_stored`)."""
    own = [one.firings for one in series if isinstance(one.firings, Firings)]
    if len(own) == len(series) and all(each.table is own[0].table for each in own):
        return own[0].table.spans([each.at for each in own])
    entries = [record.entry for one in series for firing in one.firings for record in firing.records]
    files = dict[str, int]()
    spans = [(files.setdefault(e.file, len(files)), _within(e.offset), e.nbytes) for e in entries if e is not None]
    return Spans(*np.array(spans, np.int64).T)


def _within(offset: int) -> int:
    return offset if 0 <= offset < MAX_COUNT else -1


def fire_together(sources: Sequence[Series]) -> bool:
    """Return whether the series have a firing in common."""
    return bool(_shared(sources))


def _shared(sources: Sequence[Series]) -> set[tuple[int, tuple[int, int]]]:
    return set.intersection(*({(f.step, f.call) for f in one.firings} for one in sources))


def series_of(run: Run, records: Records) -> list[Series]:
    """Group records into series, in execution order."""
    if not records:
        return []
    stages = {rank: run.coords(rank).get("pp", 0) for rank in run.ranks}
    groups: dict[tuple[str, str], tuple[str, str]] = {}  # interned, because there are as many as series
    series, order = list[Series](), list[tuple[bool, int, int, str]]()
    for place, firings in FiringTable(records).series():
        kind, site = firings.kind, records.site_at(place)
        group = groups.setdefault((kind.model, kind.pass_), (kind.model, kind.pass_))
        series.append(Series(site, group, firings))
        order.append((kind.pass_ == "backward", stages.get(kind.rank, 0), records.seq_at(place), site))
    return [series[i] for i in sorted(range(len(series)), key=order.__getitem__)]


def content_id(series: Series | None) -> Hashable:
    """Return an id that is equal for series with equal hashes; None if a hash is unknown."""
    hashes = series.hashes if series else []
    if len(hashes) == 1:
        return hashes[0]
    return None if None in hashes or not hashes else tuple(hashes)


def has_same_content(one: Series, other: Series | None) -> bool:
    """Return whether two series of a run hold the same bytes in every firing."""
    return other is not None and (content := content_id(one)) is not None and content == content_id(other)


def zero_fraction(series: Series) -> float:
    """Return the fraction of elements that are zero, from statistics; 0 if unknown."""
    seen = [r.stats for one in sources_of(series) for firing in one.firings for r in firing.records if r.stats]
    count = sum(stats.count for stats in seen)
    return sum(stats.zeros for stats in seen) / count if count else 0.0
