"""Runs for the comparator benchmarks: many sites of known sizes, written by the real writer."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tapscope.core.observe import RowSpan, StepInfo
from tapscope.kernels.native import summarize_array
from tapscope.run_format import ledger, record
from tapscope.run_format.directory import create_run
from tapscope.run_format.record import Key, Record
from tapscope.run_format.writer import RankWriter

Array = np.ndarray[Any, Any]
Shards = tuple[str, Mapping[int, Array]]
"""(dims, rank -> shard)"""
WIDTHS = (1024, 1536, 2048)
TOKENS = 512


def write_run(path: Path, size: int, steps: Iterator[tuple[int, Iterator[tuple[str, Shards]]]]) -> int:
    """Write a run of ``size`` TP ranks; return its payload bytes. A step is (token rows, sites)."""
    create_run(path, {"world_size": size, "mesh": {"tp": size}})
    writers = [RankWriter(path, rank) for rank in range(size)]
    nbytes = seq = position = 0
    for rank, writer in enumerate(writers):
        writer.event("open", rank=rank, world_size=size, mesh={"tp": size}, coords={"tp": rank})
    for step, (rows, sites) in enumerate(steps):
        runs = (RowSpan("0", position, rows, 0, 0),)
        info = StepInfo(step=step, grid=(rows,), rows=runs, token_ids=tuple(range(rows)))
        counts = [ledger.StepCounts() for _ in writers]
        for writer in writers:
            writer.line(ledger.begin_line(info, 0))
        for site, (dims, shards) in sites:
            for rank, values in shards.items():
                _put(writers[rank], Key(site, step, rank), seq, values, dims)
                counts[rank].seen, counts[rank].sent = counts[rank].seen + 1, counts[rank].sent + 1
                nbytes += values.nbytes
            seq += 1
        for writer, count in zip(writers, counts, strict=True):
            writer.line(ledger.end_line(step, count))
        position += rows
    for writer in writers:
        writer.event("close", never_fired=[])
        writer.close()
    return nbytes


def _put(writer: RankWriter, key: Key, seq: int, values: Array, dims: str) -> None:
    values = np.ascontiguousarray(values)
    item = Record(key, seq, values.dtype.name, values.shape, dims, None, *summarize_array(values))
    payload = values.reshape(-1).view(np.uint8)
    writer.record(record.encode(item), key.tensor_name, values.dtype.name, values.shape, payload)


def large(root: Path, layers: int) -> int:
    """Write a float32 and a bfloat16 run of 20 sites per layer, column shards on two ranks, 1 to 4 MiB per shard."""
    source = np.random.default_rng(0).standard_normal((TOKENS + 20 * layers, max(WIDTHS)), np.float32)

    def sites(kind: Any) -> Iterator[tuple[str, Shards]]:
        for i in range(20 * layers):
            shards = {rank: source[i : i + TOKENS, : WIDTHS[(i + rank) % 3]].astype(kind) for rank in range(2)}
            yield f"model.layers.{i // 20}.part{i % 20:02}:out", ("t h[tp]", shards)

    kinds = {"base": np.float32, "target": ml_dtypes.bfloat16}
    return sum(write_run(root / name, 2, iter([(TOKENS, sites(kind))])) for name, kind in kinds.items())


def tiny(root: Path, num_sites: int, steps: int) -> int:
    """Write two single-rank runs, float32 and bfloat16, with ``num_sites * steps`` tensors of 4 x 16 values each."""
    source = np.random.default_rng(0).standard_normal((num_sites, 4, 16)).astype(np.float32)

    def sites(kind: Any) -> Iterator[tuple[str, Shards]]:
        for i in range(num_sites):
            yield f"model.layers.{i // 20}.part{i % 20:02}:out", ("t h", {0: source[i].astype(kind)})

    kinds = {"base": np.float32, "target": ml_dtypes.bfloat16}
    return sum(write_run(root / name, 1, ((4, sites(k)) for _ in range(steps))) for name, k in kinds.items())


def huge(root: Path, rows: int, width: int, dims: str) -> int:
    """Write one site of rows x width values: float32 with ``dims`` (two ranks if sharded) against bfloat16 on one
    rank."""
    whole = np.random.default_rng(0).standard_normal((rows, width), np.float32)
    half = {"t h[tp]": np.array_split(whole, 2, axis=1), "t h[tp:partial]": [whole / 2, whole / 2 + 1e-9]}
    shards = dict(enumerate(half.get(dims, [whole])))
    one = iter([(rows, iter([("wide:out", (dims, shards))]))])
    nbytes = write_run(root / "base", len(shards), one)
    other = iter([(rows, iter([("wide:out", ("t h", {0: whole.astype(ml_dtypes.bfloat16)}))]))])
    return nbytes + write_run(root / "target", 1, other)
