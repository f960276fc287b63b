"""Export of a record's tensor to a .npy file."""

import re
from pathlib import Path

import numpy as np

from tapscope.core import dtypes
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run


def export(run: Run, record: Record, folder: Path) -> str:
    """Write a record's tensor to a new .npy file in ``folder``; return a message with its path.

    An existing file is never overwritten. Dtypes that numpy lacks are converted to float32. Raises OSError, and
    RunCorruptError if the payload is missing or damaged.
    """
    values = run.array(record)
    is_foreign = values.dtype.type.__module__ != "numpy"  # ml_dtypes's bf16 and fp8
    stem = re.sub(r"[^\w.-]+", "_", record.key.site).strip("_.")
    stem += f"-step{record.key.step}-rank{record.key.rank}-{record.key.occurrence}"
    path = next(p for i in range(10**6) if not (p := folder / f"{stem}{f'-{i}' if i else ''}.npy").exists())
    with path.open("xb") as file:
        np.save(file, values.astype(np.float32) if is_foreign else values, allow_pickle=False)
    return f"wrote {path}" + (f" (as float32, numpy has no {dtypes.short(record.dtype)})" if is_foreign else "")
