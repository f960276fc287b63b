"""Table: the records of a run as a polars frame, for notebooks and queries of one's own."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tapscope.record import Record
from tapscope.site import layer_of

if TYPE_CHECKING:
    import polars as pl


def table(records: Iterable[Record]) -> "pl.DataFrame":
    """One row a record: key, order, type, shape and statistics; null where nothing was kept."""
    import polars as pl

    schema: dict[str, Any] = {
        "rank": pl.Int32,
        "seq": pl.Int64,
        "step": pl.Int64,
        "site": pl.String,
        "layer": pl.Int32,
        "occurrence": pl.Int32,
        "micro": pl.Int32,
        "model": pl.String,
        "pass": pl.String,
        "dtype": pl.String,
        "shape": pl.List(pl.Int64),
        "dims": pl.String,
        "mean": pl.Float64,
        "rms": pl.Float64,
        "min": pl.Float64,
        "max": pl.Float64,
        "nonfinite": pl.Int64,
        "hash": pl.String,
        "bag": pl.String,
        "nbytes": pl.Int64,
    }
    return pl.DataFrame([_row(record) for record in records], schema=schema, orient="row")


def _row(record: Record) -> tuple[object, ...]:
    key, stats = record.key, record.stats
    numbers = (None,) * 5 if stats is None else (stats.mean, stats.rms, stats.min, stats.max, stats.nonfinite)
    layer = layer_of(key.site.rpartition(":")[0])
    where = (key.rank, record.seq, key.step, key.site, layer, key.occurrence, key.micro, key.model, key.pass_)
    return (*where, record.dtype, list(record.shape), record.dims, *numbers, record.hash, record.bag, record.nbytes)
