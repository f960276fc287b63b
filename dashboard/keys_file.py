"""Reader of keys.toml, the user's key bindings for the terminal; ``--key`` takes precedence."""

import os
import tomllib
from pathlib import Path

from tapscope.core.errors import ConfigError


def keys_path() -> Path:
    """Return the path ``tapscope/keys.toml`` in the user's configuration directory."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "tapscope" / "keys.toml"


def read_keys(path: Path) -> list[str]:
    """Return the bindings of a TOML file as ``ID=KEYS`` strings; empty if the file does not exist.

    ``find = "ctrl+f"`` becomes ``find=ctrl+f``; ``next_step = ["w", "full_stop"]`` becomes ``next_step=w,full_stop``.
    Raises ConfigError for a file that cannot be read, is not TOML, or has values that are not strings.
    """
    try:
        bindings = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    words = []
    for name, value in bindings.items():
        keys = value if isinstance(value, list) else [value]
        if not keys or not all(isinstance(key, str) and key.strip() and "," not in key for key in keys):
            raise ConfigError(f'{path}: invalid keys of {name!r}: expected "KEY" or ["KEY", "KEY"], e.g. "ctrl+f"')
        words.append(f"{name}={','.join(keys)}")
    return words
