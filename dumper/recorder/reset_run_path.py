"""The directory that a reset goes on in: beside the present run, under a plain name."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapscope.core.errors import ConfigError

_NUMBERED = re.compile(r"(.+)-[1-9][0-9]{0,5}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


def fresh_run(base: Path, body: Mapping[str, Any]) -> Path:
    """What the body of a reset asks for, else ``base``, or what that is numbered after, with the next number.

    Raises ConfigError.
    """
    if unknown := set(body) - {"run"}:
        raise ConfigError(f"{min(unknown)!r} is no field of reset; the only one is run")
    name = body.get("run")
    if name is None:
        first = _first(base)
        numbered = (first.with_name(f"{first.name}-{number}") for number in range(2, 1_000_000))
        return next(path for path in numbered if not path.exists())
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ConfigError(f"run={name!r}: must be a plain name beside the present run, without '/'")
    if (path := base.with_name(name)).exists():
        raise ConfigError(f"run={name!r}: exists; choose another name")
    return path


def _first(run: Path) -> Path:
    """The run that ``run`` is numbered after: a recorder that was started for NAME-2 does not know NAME."""
    numbered = _NUMBERED.fullmatch(run.name)
    first = None if numbered is None else run.with_name(numbered[1])
    return run if first is None or not first.is_dir() else first
