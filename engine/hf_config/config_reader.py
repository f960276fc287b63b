"""ConfigReader: typed access to config.json, with errors that name the file, the key and the rule."""

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapscope.core.errors import CheckpointError
from tapscope.engine.params.json_file import read_object
from tapscope.engine.params.validators import is_number

_MAX_COUNT = (1 << 48) - 1
"""Larger tensor sizes do not fit into an address space; above 63 bits, torch would raise unrelated errors."""


class ConfigReader:
    """Typed accessors for one JSON object; null counts as absent unless a method states otherwise."""

    def __init__(self, path: Path, values: dict[str, Any], names: Mapping[str, str] | None = None) -> None:
        """``names`` maps renamed keys to the original keys in the file, for errors."""
        self.path = path
        self.values = values
        self._names = dict(names or {})

    @classmethod
    def open(cls, path: Path) -> "ConfigReader":
        """Read the JSON file ``path``; raises CheckpointError if it is missing or not a JSON object."""
        try:
            return cls(path, read_object(path))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; a Hugging Face checkpoint has one") from None

    def renamed(self, names: Mapping[str, str]) -> "ConfigReader":
        """Return a reader with keys renamed by ``names`` (old key -> new key); errors name the original keys."""
        present = {new: old for old, new in names.items() if self.values.get(old) is not None}
        moved = {new: self.values[old] for new, old in present.items()}
        return ConfigReader(self.path, self.values | moved, self._names | present)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ConfigReader":
        """Return a reader with ``defaults`` for keys that are absent or null."""
        missing = {name: value for name, value in defaults.items() if self.values.get(name) is None}
        return ConfigReader(self.path, self.values | missing, self._names)

    def fail(self, name: str, rule: str) -> CheckpointError:
        """Create the error to raise for the key ``name``; ``rule`` states which values are valid."""
        return CheckpointError(
            f"{self.path}: {self._names.get(name, name)} is {reprlib.repr(self.values.get(name))}; {rule}"
        )

    def get(self, name: str, default: Any = None) -> Any:
        """Return the unchecked value of the key ``name``, or ``default``."""
        value = self.values.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int | None = None) -> int:
        """Read an integer of at least ``minimum`` and at most ``maximum`` (None: 2^48 - 1).

        The key is required if ``default`` is None.
        """
        value = self.get(name, default)
        if type(value) is not int or not minimum <= value <= (_MAX_COUNT if maximum is None else maximum):
            bounds = f"above {minimum - 1}" if minimum else "from 0"
            if maximum is not None or (type(value) is int and value > _MAX_COUNT):
                bounds = f"from {minimum} to {_MAX_COUNT if maximum is None else maximum}"
            raise self.fail(name, f"expected an integer {bounds}")
        return value

    def optional_count(self, name: str, default: int | None) -> int | None:
        """Read an integer above 0; an explicit null yields None, an absent key yields ``default``."""
        if name not in self.values:
            return default
        return None if self.values[name] is None else self.count(name)

    def number(self, name: str, default: float | None = None) -> float:
        """Read a number above 0; the key is required if ``default`` is None."""
        value = self.get(name, default)
        if not is_number(value) or value <= 0:
            raise self.fail(name, "expected a number above 0")
        return float(value)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """Read a number above 0; an explicit null yields None, an absent key yields ``default``."""
        if name not in self.values:
            return default
        return None if self.values[name] is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """Read a bool."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "expected true or false")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """Read a string that must be one of ``choices``."""
        value = self.get(name, default)
        if value not in choices:
            raise self.fail(name, f"supported: {', '.join(choices)}")
        return str(value)

    def section(self, name: str) -> "ConfigReader | None":
        """Return a reader for the JSON object under the key ``name``; None if the key is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, "expected a JSON object")
        return ConfigReader(self.path, value)

    def refuse(self, name: str, harmless: tuple[Any, ...], why: str) -> None:
        """Raise CheckpointError unless ``name`` is absent or its value is in ``harmless``.

        Ignoring other values would silently change results.
        """
        value = self.get(name)
        if value is not None and value not in harmless:
            raise self.fail(name, why)
