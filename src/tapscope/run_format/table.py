"""Table: convert records to a polars DataFrame, for notebooks and queries."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tapscope.core.extras import requiring
from tapscope.core.site import layer_of, module_of
from tapscope.run_format.records import Records

if TYPE_CHECKING:
    import polars as pl


def table(records: Records) -> "pl.DataFrame":
    """Return one row per record with key, sequence number, dtype, shape, dims, statistics, digests and payload size.

    Fields that were not recorded are null. Uses the columns of :class:`.Records`, without creating record objects for
    regular records. Raises MissingExtraError without polars.
    """
    with requiring("a table of records", "table"):
        import polars as pl

    sites, site_of = pl.Series(records.site_names, dtype=pl.String), pl.Series(records.site)
    layers = pl.Series([layer_of(module_of(site)) for site in records.site_names], dtype=pl.Int32)
    hashes, bags = records.hashes()
    columns = {
        "rank": _of_kind(records, "rank", pl.Int32),
        "seq": pl.Series(records.seq, dtype=pl.Int64),
        "step": pl.Series(records.step, dtype=pl.Int64),
        "site": sites.gather(site_of),
        "layer": layers.gather(site_of),
        "occurrence": _of_kind(records, "occurrence", pl.Int32),
        "micro": _of_kind(records, "micro", pl.Int32),
        "model": _of_kind(records, "model", pl.String),
        "pass": _of_kind(records, "pass_", pl.String),
        "dtype": _of_kind(records, "dtype", pl.String),
        "shape": _of_kind(records, "shape", pl.List(pl.Int64)),
        "dims": _of_kind(records, "dims", pl.String),
        **_statistics(records),
        "hash": pl.Series(hashes, dtype=pl.String),
        "bag": pl.Series(bags, dtype=pl.String),
        "nbytes": pl.Series(records.nbytes, dtype=pl.Int64),
    }
    return pl.DataFrame(columns)


def _of_kind(records: Records, member: str, dtype: Any) -> "pl.Series":
    import polars as pl

    values = [getattr(kind, member) for kind in records.kinds]
    values = [list(value) for value in values] if member == "shape" else values
    return pl.Series(values, dtype=dtype).gather(pl.Series(records.kind, dtype=pl.UInt32))


def _statistics(records: Records) -> dict[str, "pl.Series"]:
    """Return the columns mean, rms, min and max of the finite elements, and the number of non-finite elements."""
    import polars as pl

    counts, sums = records.counts.copy(), records.sums.copy()
    has = records.of_kinds(lambda kind: kind.has_stats).astype(bool)
    for place in records.irregular_places:
        stats = records[place].stats
        has[place] = stats is not None
        if stats is not None:
            counts[place, :4] = [stats.count, stats.nan, stats.posinf, stats.neginf]
            ends = [np.nan if value is None else value for value in (stats.min, stats.max, stats.absmax)]
            sums[place] = [*ends, stats.sum, stats.sumsq]
    nonfinite = counts[:, 1:4].sum(1)
    finite = counts[:, 0] - nonfinite
    with np.errstate(all="ignore"):
        mean = sums[:, 3] / finite
    some = has & (finite > 0)
    numbers = {"mean": mean, "rms": records.rms, "min": sums[:, 0], "max": sums[:, 1]}
    columns = {name: pl.Series(np.where(some, column, np.nan)).fill_nan(None) for name, column in numbers.items()}
    return columns | {"nonfinite": pl.Series([n if h else None for n, h in zip(nonfinite.tolist(), has, strict=True)])}
