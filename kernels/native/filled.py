"""Filled: statistics and digests of records whose source keeps the values alone."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from tapscope.errors import RunCorruptError
from tapscope.kernels.native.summary import summarize_array
from tapscope.record import Record

if TYPE_CHECKING:
    from tapscope.run import Run


def filled(run: "Run", records: Iterable[Record]) -> list[Record]:
    """The records, with what their bytes tell where they have a payload and no hash: each such payload is read once.

    One that cannot be read stays as it is; whoever asks for its values is told.
    """
    return [_fill(run, record) if record.hash is None and record.entry is not None else record for record in records]


def _fill(run: "Run", record: Record) -> Record:
    try:
        found = summarize_array(np.ascontiguousarray(run.array(record)))
    except RunCorruptError:
        return record
    return record._replace(stats=record.stats or found.stats, hash=found.hash, bag=found.bag)
