"""Reader: typed look-ups in config.json; every complaint names the file, the field and the rule."""

import json
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapscope.core.errors import CheckpointError
from tapscope.engine.params.validators import is_number


class ConfigReader:
    """The values of one JSON object; null counts as absent except where a method says otherwise."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def open(cls, path: Path) -> "ConfigReader":
        """Read ``path``; raises CheckpointError when it is missing or holds no JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; a Hugging Face checkpoint has one") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds a {type(values).__name__}; it must be a JSON object")
        return cls(path, values)

    def fail(self, name: str, rule: str) -> CheckpointError:
        """The error to raise about ``name``; ``rule`` says what would work."""
        return CheckpointError(f"{self.path}: {name} is {reprlib.repr(self.values.get(name))}; {rule}")

    def get(self, name: str, default: Any = None) -> Any:
        """Whatever is there, or ``default``."""
        value = self.values.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number above 0; required when ``default`` is None."""
        value = self.get(name, default)
        if type(value) is not int or value < 1:
            raise self.fail(name, "it must be a whole number above 0")
        return value

    def optional_count(self, name: str, default: int | None) -> int | None:
        """A whole number above 0; an explicit null is None, absence is ``default``."""
        if name not in self.values:
            return default
        return None if self.values[name] is None else self.count(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0; required when ``default`` is None."""
        value = self.get(name, default)
        if not is_number(value) or value <= 0:
            raise self.fail(name, "it must be a number above 0")
        return float(value)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A number above 0; an explicit null is None, absence is ``default``."""
        if name not in self.values:
            return default
        return None if self.values[name] is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "it must be true or false")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """One of ``choices``."""
        value = self.get(name, default)
        if value not in choices:
            raise self.fail(name, f"supported: {', '.join(choices)}")
        return str(value)

    def section(self, name: str) -> "ConfigReader | None":
        """The JSON object under ``name``, None when there is none."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, "it must be a JSON object")
        return ConfigReader(self.path, value)

    def refuse(self, name: str, harmless: tuple[Any, ...], why: str) -> None:
        """Raise unless ``name`` is absent or one of ``harmless``: computing on would give other numbers in silence."""
        value = self.get(name)
        if value is not None and value not in harmless:
            raise self.fail(name, why)
