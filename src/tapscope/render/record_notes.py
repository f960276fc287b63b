"""Notes: unusual properties of a record in words: its pass, and the recorded part of the tensor."""

import json
from collections.abc import Iterable

from tapscope.core.formatting import middle, shape, size
from tapscope.run_format.record import BACKWARD, FORWARD, Key, Record

_MAX_TAGS = 200


def occasion(key: Key) -> list[str]:
    """Return ``micro 1``, ``recompute``, ``model draft``, omitting default values."""
    words = [f"micro {key.micro}"] if key.micro else []
    words += [key.pass_] if key.pass_ != FORWARD else []
    return words + ([f"model {key.model}"] if key.model else [])


def firing(key: Key) -> list[str]:
    """Return the suffix of a site in lists: ``#1``, ``micro 1``, ``recompute``, ``model draft``.

    ``backward`` is omitted if the site is a gradient.
    """
    words = [f"#{key.occurrence}"] if key.occurrence else []
    is_implied = key.pass_ == BACKWARD and key.site.endswith(".grad")
    return words + occasion(key._replace(pass_=FORWARD) if is_implied else key)


def flags(key: Key, others: Iterable[Key]) -> list[str]:
    """Return the flags of ``tapscope show`` that select ``key`` among keys with the same site, step, rank and
    occurrence."""
    rivals = [other for other in others if other[:4] == key[:4]]
    words = []
    for name in ("micro", "pass_", "model"):
        if any(getattr(other, name) != getattr(key, name) for other in rivals):
            words += [f"--{name.rstrip('_')}", str(getattr(key, name))]
    return words


def part(record: Record) -> list[tuple[str, str]]:
    """Return (name, description) of ``slice``, ``cap`` and ``tags``, if the record has them."""
    notes = []
    if record.slice is not None:
        notes.append(("slice", f"rows {_rows(record.slice.rows)} of {shape(record.slice.shape)}"))
    if record.cap is not None:
        notes.append(("cap", f"{size(record.cap)}: larger, so statistics only"))
    if record.tags:
        words = " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in record.tags.items())
        notes.append(("tags", middle(words, _MAX_TAGS)))
    return notes


def _rows(rows: tuple[int, int, int]) -> str:
    """Format row bounds like a Python slice: ``0:8``, ``0:8:2``."""
    start, stop, step = rows
    return f"{start}:{stop}" + (f":{step}" if step != 1 else "")
