"""Parsing and formatting of byte sizes such as 64KiB."""

import re
from typing import Any

_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BY_TEXT = {unit.lower(): number for unit, number in _UNITS.items()}
_SIZE = re.compile(r"\s*(\d{1,19})(\.\d{1,9})?\s*([A-Za-z]*)\s*")


def parse_size(value: Any) -> int:
    """Parse ``4096``, ``"64KiB"`` or ``"1.5 GB"`` to bytes; raises ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = None if match is None else _BY_TEXT.get(match[3].lower())
    if match is None or unit is None or (match[2] and unit == 1):
        raise ValueError(f"{value!r} is not a size; write bytes or e.g. 64KiB, 1MiB, 2GB")
    return int(match[1]) * unit + (int(float(match[2]) * unit) if match[2] else 0)


def size_text(nbytes: int) -> str:
    """Return the shortest exact text of a size: ``65536`` -> ``64KiB``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)
