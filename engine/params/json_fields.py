"""Fields: the typed reading of one JSON object of a request's body, with errors that name the field."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from tapscope.core.errors import RequestError
from tapscope.core.formatting import short

_MOST = 1e300  # JSON has numbers that no float holds


class Fields:
    """A JSON object and where it stands; every reader takes null for absent and raises RequestError."""

    def __init__(self, values: Any, where: str = "") -> None:
        """``where`` is the path of the object in the body, empty for the body itself."""
        if not isinstance(values, dict):
            raise RequestError(f"{where or 'the body'} must be a JSON object", param=where or None)
        self.values: dict[str, Any] = values
        self.where = where

    def path(self, name: str) -> str:
        """The name by which an error calls a field: ``messages[2].role``."""
        return f"{self.where}.{name}" if self.where else name

    def wrong(self, name: str, rule: str) -> RequestError:
        """The error to raise for a value that breaks ``rule``."""
        return RequestError(f"{self.path(name)} is {short(self.values.get(name))}; {rule}", param=self.path(name))

    def refuse_unknown(
        self,
        supported: Collection[str],
        without_effect: Collection[str] = (),
        neutral: Mapping[str, tuple[Any, ...]] | None = None,
    ) -> None:
        """Refuse what would change the answer if it were understood; null and ``neutral`` values ask for nothing."""
        for name, value in self.values.items():
            if value is None or value in (neutral or {}).get(name, ()):
                continue
            if name not in supported and name not in without_effect:
                known = ", ".join(supported)
                raise RequestError(
                    f"{self.path(name)} is not supported; supported: {known}",
                    param=self.path(name),
                    code="unsupported_parameter",
                )

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def text(self, name: str) -> str | None:
        """A text."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "it must be a text")
        return value

    def required_text(self, name: str) -> str:
        """A text that has to be there."""
        value = self.text(name)
        if value is None:
            raise RequestError(f"{self.path(name)} is missing; it must be a text", param=self.path(name))
        return value

    def name(self, name: str) -> str:
        """A text that has to be there and is not empty."""
        value = self.required_text(name)
        if not value:
            raise self.wrong(name, "it must not be empty")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "it must be true or false")
        return default if value is None else value

    def whole(self, name: str, low: int, high: int | None = None) -> int | None:
        """A whole number within [low, high]; ``1.0`` is one, as in JSON."""
        value = self.values.get(name)
        if value is None:
            return None
        is_whole = not isinstance(value, bool) and isinstance(value, int | float) and value == value // 1
        if not is_whole or value < low or (high is not None and value > high):
            upper = "" if high is None else f" to {high}"
            raise self.wrong(name, f"it must be a whole number from {low}{upper}")
        return int(value)

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number within [low, high]."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= min(high, _MOST):
            raise self.wrong(
                name, f"it must be a number from {low:g}" + (f" to {high:g}" if math.isfinite(high) else "")
            )
        return float(value)

    def texts(self, name: str, most: int | None = None) -> tuple[str, ...]:
        """A text or a list of texts, none of them empty; absent is no text."""
        value = self.values.get(name)
        items = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
            raise self.wrong(name, "it must be a text or a list of texts, none of them empty")
        if most is not None and len(items) > most:
            raise self.wrong(name, f"it may hold at most {most} texts")
        return tuple(items)

    def object(self, name: str) -> "Fields | None":
        """A JSON object."""
        value = self.values.get(name)
        return None if value is None else Fields(value, self.path(name))

    def objects(self, name: str) -> list["Fields"]:
        """A list of JSON objects; absent is no object."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(name, "it must be a list")
        return [Fields(item, f"{self.path(name)}[{index}]") for index, item in enumerate(value)]

    def choice(self, name: str, choices: Collection[str]) -> str | None:
        """One of a few texts."""
        value = self.values.get(name)
        if value is not None and value not in choices:
            raise self.wrong(name, f"it must be one of {', '.join(choices)}")
        return value
