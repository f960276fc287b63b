"""Parquet: records as typed columns, one table per compaction of a rank (columns: docs/reference/run-format.md).

Missing fields and non-finite numbers are null; the counts give the number of non-finite elements. A record
that the columns cannot represent exactly keeps its JSON line in the column ``line``.
"""

import io
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import fields

from tapscope.core.extras import requiring
from tapscope.core.regular_files import reading
from tapscope.run_format.record import Entry, Key, Record, Slice, Stats, from_json
from tapscope.run_format.record_columns import NO_BAG, NO_HASH, Kind, digests_from
from tapscope.run_format.records import Records

if TYPE_CHECKING:
    import polars as pl

_STATS = tuple(field.name for field in fields(Stats))
_FLOATS = ("min", "max", "absmax", "sum", "sumsq")
_OF_KIND = ("occurrence", "micro", "pass", "model", "dtype", "shape", "dims", "file")
"""Fields of :class:`Kind` except the rank."""
_RARE = ("line", "rows", "slice_rows", "slice_shape", "cap", "tags", "value")
"""Columns that are null for most records."""
_ROWS = 1 << 15
"""Rows per row group and per read."""
_INT64 = 1 << 63
_BLOCK = 1 << 20
_MAGIC = b"PAR1"
"""Last bytes of every Parquet file."""
_MAX_PACKED = 4
"""Maximum plausible number of records per byte of a table; a few bytes can encode billions of nulls."""


def schema() -> dict[str, Any]:
    """Return column name -> polars dtype, in column order."""
    import polars as pl

    whole, text, real = pl.Int64, pl.String, pl.Float64
    key = {"seq": whole, "site": text, "step": whole, "occurrence": whole, "micro": whole, "pass": text, "model": text}
    tensor = {"dtype": text, "shape": pl.List(whole), "dims": text, "rows": pl.List(pl.List(whole))}
    part = {"slice_rows": pl.List(whole), "slice_shape": pl.List(whole), "cap": whole, "tags": text, "value": text}
    stats = {name: real if name in _FLOATS else whole for name in _STATS}
    entry = {"file": text, "offset": whole, "nbytes": whole}
    return key | tensor | part | {"hash": text, "bag": text} | stats | entry | {"line": text}


def write_table(plain: Records, others: Iterable[tuple[Record, dict[str, Any]]], path: Path) -> None:
    """Write records to a Parquet table at ``path``.

    ``plain`` records must be representable by columns; ``others`` are pairs of a record and its parsed JSON line.
    """
    import polars as pl

    if plain.irregular_places:
        raise ValueError(f"{plain.irregular_places[:4]} of the plain records have members without a column")
    types = schema()
    rows = [_row(record, line) for record, line in others]
    columns = zip(*rows, strict=True) if rows else [()] * len(types)
    series = [pl.Series(name, column, types[name]) for name, column in zip(types, columns, strict=True)]
    file = io.BytesIO()  # polars does not report a full disk, so it must not write to the path itself
    pl.concat([_frame(plain), pl.DataFrame(series)]).write_parquet(file, compression="zstd", row_group_size=_ROWS)
    path.unlink(missing_ok=True)  # leftover of a killed compaction, or a foreign link
    with path.open("xb") as out:
        out.write(file.getbuffer())


def checksum(path: Path) -> int:
    """Return the CRC-32 of a table file, as stored in its ``compacted`` event.

    Raises OSError, and ValueError for a file without the final magic bytes of Parquet, whose content is not read.
    """
    crc = 0
    with reading(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(_MAGIC)))
        if file.read() != _MAGIC:
            raise ValueError("it does not end as a Parquet table does")
        file.seek(0)
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def read_table(path: Path, rank: int) -> Records:
    """Read the records of a table.

    Raises OSError if the file cannot be read, ValueError if it is not a table of records, and MissingExtraError
    without polars.
    """
    with requiring(f"the compacted run at {path}", "table"):
        import polars as pl

    with reading(path) as file:  # rejects special files with a clear error
        limit = _MAX_PACKED * os.fstat(file.fileno()).st_size
    try:
        num_rows = int(pl.scan_parquet(path).select(pl.len()).collect().item())
        if num_rows > limit:
            raise ValueError(f"it claims to hold {num_rows:,} records, in {limit // _MAX_PACKED:,} bytes")
        table, records = pl.scan_parquet(path).select(list(schema())), Records()
        is_ours = dict(table.collect_schema()) == schema()
        has_rare = table.select(pl.any_horizontal(pl.col(_RARE).is_not_null().any())).collect().item()
        plain = table if has_rare else table.drop(_RARE)  # null in most runs
        for start in range(0, num_rows, _ROWS):
            if not (is_ours and _take(plain.slice(start, _ROWS).collect(), rank, records)):
                records.extend(_records(table.slice(start, _ROWS).collect(), rank))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ValueError(f"no table of records ({error})") from None
    return records


def _frame(records: Records) -> "pl.DataFrame":
    """Convert regular records to a frame with the columns of :func:`schema`."""
    import polars as pl

    codes, nothing = pl.Series(records.kind), pl.Series([None] * len(records))
    of_kind: dict[str, Callable[[Kind], Any]] = {name: attrgetter(name) for name in _OF_KIND if name != "pass"}
    of_kind |= {"pass": attrgetter("pass_"), "shape": lambda kind: list(kind.shape)}
    hashes, bags = records.hashes()
    has_entry, has_stats = (records.of_kinds(tell).astype(bool) for tell in (_has_file, attrgetter("has_stats")))
    whole: dict[str, Any] = {"seq": records.seq, "step": records.step}
    whole |= {"hash": hashes, "bag": bags}
    partly = dict(zip(_STATS, (*records.counts.T, *records.sums.T), strict=True)) if len(records) else {}
    partly |= {"offset": records.offset, "nbytes": records.nbytes}
    series = []
    for name, kind in schema().items():
        if name == "site":
            series.append(pl.Series(name, records.site_names or [""], kind).gather(pl.Series(records.site)))
        elif name in of_kind:
            each = pl.Series(name, [of_kind[name](one) for one in records.kinds], kind)
            series.append(each.gather(codes))
        elif name in partly:
            there = pl.Series(has_entry if name in ("offset", "nbytes") else has_stats)
            values = pl.Series(name, np.ascontiguousarray(partly[name]), kind)
            series.append(values.zip_with(there, pl.Series(name, [None] * len(records), kind)))
        else:
            series.append(pl.Series(name, whole[name], kind) if name in whole else nothing.cast(kind).alias(name))
    return pl.DataFrame(series)


def _has_file(kind: Kind) -> bool:
    return kind.file is not None


def _take(rows: "pl.DataFrame", rank: int, into: Records) -> bool:
    """Append ``rows`` to ``into`` column by column.

    Returns False, with nothing appended, if any record has a field without a column in :class:`Records`.
    """
    import polars as pl

    has_stats, has_entry = pl.col("count").is_not_null(), pl.col("file").is_not_null()
    lengths = {"hash": len(NO_HASH), "bag": len(NO_BAG)}
    lacking = [  # evaluated in one query, because a query costs as much as thousands of rows
        *(pl.col(name).is_null() for name in ("seq", "site", "step")),
        *(pl.col(name).is_not_null() for name in _RARE if name in rows.columns),
        *(pl.col(name).is_null() & has_stats for name in _FLOATS[:3]),
        *(pl.col(name).is_null() & has_entry for name in ("offset", "nbytes")),
        *(pl.col(name) < 0 for name in _STATS[:6]),
        *(pl.col(name).str.len_bytes() != length for name, length in lengths.items()),
    ]
    digests = pl.concat_str(pl.col("hash").fill_null(NO_HASH), pl.col("bag").fill_null(NO_BAG)).str.join("")
    is_lacking, text = rows.select(pl.any_horizontal(each.any() for each in lacking), digests.alias("digests")).row(0)
    joined_digests = None if is_lacking else digests_from(text)
    if joined_digests is None:
        return False
    has = [pl.col(name).is_not_null().alias(f"has_{name}") for name in ("hash", "bag", "count")]
    kinds, kind_of = _numbered(rows.select(*_OF_KIND, *has))
    sites, site_of = _numbered(rows.select("site"))
    whole = rows.select(pl.col("step", "seq", "offset", "nbytes", *_STATS[:6]).fill_null(0))
    step, seq, offset, nbytes = (whole.get_column(name).to_numpy() for name in ("step", "seq", "offset", "nbytes"))
    # a null sum means infinity; records without statistics get zeros
    sums = [pl.when(has_stats).then(pl.col(name).fill_null(math.inf)).otherwise(0.0) for name in _FLOATS[3:]]
    into.add_columns(
        [(rank, *kind[:5], tuple(kind[5]), *kind[6:]) for kind in kinds.rows()],
        kind_of,
        sites.to_series().to_list(),
        site_of,
        step,
        seq,
        offset,
        nbytes,
        joined_digests,
        whole.select(_STATS[:6]).to_numpy(),
        rows.select(pl.col(_FLOATS[:3]).fill_null(0.0), *sums).to_numpy(),
    )
    return True


def _numbered(rows: "pl.DataFrame") -> "tuple[pl.DataFrame, np.ndarray[Any, Any]]":
    """Return the distinct rows in order of first occurrence, and the index of each row's distinct row ([rows] int)."""
    keys = [_comparable(column) for column in rows.iter_columns() if not _is_constant(column)]
    if not keys:
        return rows.head(1), np.zeros(len(rows), np.int32)
    names = [column.name for column in keys]
    grouped = rows.select(keys).with_row_index("row").group_by(names, maintain_order=True).agg("row")
    places = grouped.get_column("row")
    numbers = np.empty(len(rows), np.int32)
    numbers[places.explode().to_numpy()] = np.repeat(np.arange(len(grouped)), places.list.len().to_numpy())
    return rows[places.list.first()], numbers


def _is_constant(column: "pl.Series") -> bool:
    """Return whether all values are certainly equal; always False for a column of lists with an empty or null list."""
    import polars as pl

    if not isinstance(column.dtype, pl.List):
        return column.null_count() == len(column) or bool((column == column[0]).all(ignore_nulls=False))
    lengths = column.list.len().to_numpy()
    if column.null_count() or not (lengths == lengths[0]).all() or not lengths[0]:
        return False
    each = column.explode().to_numpy().reshape(-1, lengths[0])
    return bool((each == each[0]).all())


def _comparable(column: "pl.Series") -> "pl.Series":
    """Convert a column of lists to strings, because some versions of polars cannot group by lists."""
    import polars as pl

    return column.cast(pl.List(pl.String)).list.join(",") if isinstance(column.dtype, pl.List) else column


def _row(record: Record, line: dict[str, Any]) -> tuple[object, ...]:
    exact = line.keys() <= _MEMBERS and _fits(record)
    key, part, stats, entry = record.key, record.slice, record.stats, record.entry
    if not exact:  # the column ``line`` has the whole record; the other columns serve queries only
        key, stats, part, entry = key._replace(step=_whole(key.step)), None, None, None
    where = (_whole(record.seq), key.site, key.step, *(_whole(n) for n in (key.occurrence, key.micro)))
    tensor = (record.dtype, list(map(_whole, record.shape)), record.dims, record.rows if exact else None)
    sliced = (None, None) if part is None else (list(part.rows), list(part.shape))
    rest = (record.cap if exact else None, _json(record.tags), _json(record.value), record.hash, record.bag)
    numbers = (None,) * len(_STATS) if stats is None else tuple(_finite(getattr(stats, name)) for name in _STATS)
    text = None if exact else json.dumps(line, ensure_ascii=False)
    return (*where, key.pass_, key.model, *tensor, *sliced, *rest, *numbers, *(entry or (None,) * 3), text)


_KEY = {"site", "step", "occurrence", "micro", "pass", "model"}
_TENSOR = {"dtype", "shape", "dims", "rows", "slice", "cap", "hash", "bag", "stats", "entry"}
_MEMBERS = {"type", "seq", "tags", "value"} | _KEY | _TENSOR


def _fits(record: Record) -> bool:
    """Return whether the columns represent every field of ``record`` exactly."""
    stats = record.stats
    whole = [record.seq, *record.key[1:5], *record.shape, *(record.entry or ())[1:]]
    whole += [n for run in record.rows or () for n in run] + [record.cap or 0]
    whole += [*record.slice.rows, *record.slice.shape] if record.slice else []
    real: list[object] = []
    if stats is not None:
        whole += [getattr(stats, name) for name in _STATS if name not in _FLOATS]
        real = [getattr(stats, name) for name in _FLOATS]
        extremes = stats.min, stats.max, stats.absmax
        if None in (stats.sum, stats.sumsq) or any(x is not None and not math.isfinite(x) for x in extremes):
            return False
    return all(type(n) is int and -_INT64 <= n < _INT64 for n in whole) and all(
        x is None or type(x) is float for x in real
    )


def _whole(number: int) -> int:
    return number if -_INT64 <= number < _INT64 else -1


def _finite(number: Any) -> Any:
    return None if isinstance(number, float) and not math.isfinite(number) else number


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _records(frame: "pl.DataFrame", rank: int) -> Iterator[Record]:
    first = 18  # index of the first statistics column
    count, file = first, first + len(_STATS)
    for row in frame.iter_rows():
        if row[-1] is not None:
            yield from_json(json.loads(row[-1]), rank)
            continue
        seq, site, step, occurrence, micro, pass_, model, dtype, shape, dims, rows = row[:11]
        part_rows, part_shape, cap, tags, value, hash_, bag = row[11:18]
        yield Record(
            Key(site, step, rank, occurrence, micro, pass_, model),
            seq,
            dtype,
            tuple(shape),
            dims,
            None if rows is None else tuple(map(tuple, rows)),
            None if row[count] is None else _stats(row[first:file]),
            hash_,
            bag,
            None if row[file] is None else Entry(*row[file : file + 3]),
            None if value is None else json.loads(value),
            None if part_rows is None else Slice(tuple(part_rows), tuple(part_shape)),
            cap,
            None if tags is None else json.loads(tags),
            None,
        )


def _stats(numbers: tuple[Any, ...]) -> Stats:
    """Build :class:`.Stats` from its columns; raises ValueError for missing or negative counts."""
    if any(type(number) is not int or number < 0 for number in numbers[:6]):
        raise ValueError(f"the counts of statistics are {numbers[:6]}")
    sums = tuple(math.inf if number is None else number for number in numbers[-2:])
    return Stats(*numbers[:-2], *sums)
