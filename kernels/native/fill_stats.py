"""Statistics and digests computed from payloads, for records whose source stores only values."""

import os
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tapscope.core.errors import RunCorruptError
from tapscope.kernels.native.summary import MIN_BYTES_WITHOUT_GIL, summarize_array
from tapscope.run_format.record import Record
from tapscope.run_format.record_columns import Kind
from tapscope.run_format.records import Records

if TYPE_CHECKING:
    from tapscope.run_format.run import Run


_MAX_THREADS = 4


def filled(run: "Run", records: Records) -> Records:
    """Return ``records`` with statistics and digests computed from each payload that has no hash; each payload is read
    once.

    A record whose payload cannot be read is returned unchanged; reading its values raises the error.
    """
    if not len(records.which(_is_bare)):
        return records
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    large = [record for record in records if record.hash is None and record.nbytes >= MIN_BYTES_WITHOUT_GIL]
    if min(threads, len(large)) < 2:
        return Records(fill(run, record) for record in records)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(threads, _MAX_THREADS), "tapscope-fill") as pool:  # the kernels release the GIL
        done = dict(zip((record.key for record in large), pool.map(partial(fill, run), large), strict=True))
    return Records(done.get(record.key) or fill(run, record) for record in records)


def _is_bare(kind: Kind) -> bool:
    return kind.file is not None and not kind.has_hash


def fill(run: "Run", record: Record) -> Record:
    """Return ``record`` with statistics and digests computed from its payload, as :func:`filled`."""
    if record.hash is not None or record.entry is None:
        return record
    try:
        summary = summarize_array(np.ascontiguousarray(run.array(record)))
    except RunCorruptError:
        return record
    return record._replace(stats=record.stats or summary.stats, hash=summary.hash, bag=summary.bag)
