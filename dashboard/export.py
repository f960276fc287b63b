"""Export: a tensor of a run as a file of its own."""

import re
from pathlib import Path

import numpy as np

from tapscope.core import dtypes
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run


def export(run: Run, record: Record, folder: Path) -> str:
    """Write a tensor as .npy, never over another file, and say so; types that numpy lacks become float32.

    Raises RunCorruptError where its bytes are gone, and OSError.
    """
    values = run.array(record)
    is_foreign = values.dtype.type.__module__ != "numpy"  # ml_dtypes's bf16 and fp8
    stem = re.sub(r"[^\w.-]+", "_", record.key.site).strip("_.")
    stem += f"-step{record.key.step}-rank{record.key.rank}-{record.key.occurrence}"
    path = next(p for i in range(10**6) if not (p := folder / f"{stem}{f'-{i}' if i else ''}.npy").exists())
    with path.open("xb") as file:
        np.save(file, values.astype(np.float32) if is_foreign else values, allow_pickle=False)
    return f"wrote {path}" + (f" (as float32, numpy has no {dtypes.short(record.dtype)})" if is_foreign else "")
