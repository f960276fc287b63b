"""RemotePayloads: the payloads of a run at a URL."""

from pathlib import Path

import numpy as np

from tapscope.core import dtypes
from tapscope.core.errors import RunCorruptError
from tapscope.remote.remote_files import RemoteFiles
from tapscope.run_format.payload import TAIL, Array, Payloads, SegmentPayloads
from tapscope.run_format.record import COUNTERS, Record
from tapscope.run_format.records import Records


class RemotePayloads:
    """Payloads of a source at a URL: byte ranges of ``.safetensors`` files, local copies of other files."""

    def __init__(self, copied: Payloads, remote: RemoteFiles) -> None:
        self._copied, self._remote = copied, remote
        self.damaged = list(map(remote.named, copied.damaged))
        self.has_checksums = copied.has_checksums

    def array(self, record: Record) -> Array:
        """See :class:`~tapscope.run_format.payload.Payloads`."""
        entry = record.entry
        assert entry is not None
        if not entry.file.endswith(".safetensors"):
            return self._copied.array(record)
        if problem := self._copied.lacks(record):
            raise RunCorruptError(self._remote.named(problem))
        dtype = dtypes.numpy_dtype(record.dtype or "")
        if not entry.nbytes:
            return np.empty(record.shape, dtype)
        data = self._remote.read(self._name(record, entry.file), entry.offset, entry.offset + entry.nbytes)
        data.flags.writeable = False
        return np.ndarray(record.shape, dtype, data)

    def sketch(self, record: Record) -> Array:
        """Return the counters of the record's sketch, read-only; raises RunCorruptError if they are missing."""
        assert record.sketch is not None
        entry = record.sketch.entry
        data = self._remote.read(self._name(record, entry.file), max(entry.offset, 0), entry.offset + entry.nbytes)
        return np.ndarray((COUNTERS,), np.float32, data.copy())

    def _name(self, record: Record, file: str) -> str:
        """Return the file of an entry relative to the URL."""
        if isinstance(self._copied, SegmentPayloads):
            return f"rank-{record.key.rank:05d}/{Path(file).name}"
        return file

    def file(self, record: Record, end: int) -> None:
        """Return None: files are read by ranges."""

    def tail(self, record: Record) -> bytes | None:
        """See :class:`~tapscope.run_format.payload.Payloads`; reads a small range instead of the whole tensor."""
        entry = record.entry
        assert entry is not None
        if not entry.file.endswith(".safetensors") or isinstance(self._copied, SegmentPayloads) or not entry.nbytes:
            return self._copied.tail(record)
        end = entry.offset + entry.nbytes
        return self._remote.read(self._name(record, entry.file), max(entry.offset, end - TAIL), end).tobytes()

    def lacks(self, record: Record) -> str:
        """See :class:`~tapscope.run_format.payload.Payloads`."""
        return self._remote.named(self._copied.lacks(record))

    def suspects(self, records: Records) -> Array:
        """See :class:`~tapscope.run_format.payload.Payloads`."""
        return self._copied.suspects(records)

    def flaw(self, record: Record) -> str | None:
        """See :class:`~tapscope.run_format.payload.Payloads`."""
        return self._copied.flaw(record)

    def missing(self, records: Records) -> list[str]:
        """See :class:`~tapscope.run_format.payload.Payloads`."""
        return list(map(self._remote.named, self._copied.missing(records)))

    def close(self) -> None:
        """See :class:`~tapscope.run_format.payload.Payloads`; removes the local copies."""
        self._copied.close()
        self._remote.close()
