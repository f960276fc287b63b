"""FilePattern: parses step, rank and tensor name from a file path, e.g. ``{step}/rank{rank}/{name}.pt``.

Fields: ``{name}`` is the tensor name and may contain ``/``; ``{step}``, ``{rank}``, ``{layer}`` and ``{index}`` (order
within a step) are integers; ``{*}`` matches ignored text. Without a pattern, labeled path components such as
``step_3``, ``iter0010`` or ``rank1`` are recognized, and the rest is the name.
"""

import re
from dataclasses import dataclass
from typing import Any

from tapscope.core.errors import ConfigError

SUFFIXES = (".pt", ".pth", ".npz", ".npy", ".safetensors")
_FIELD = re.compile(r"\{([^{}]*)\}")
_INTEGERS = ("step", "rank", "layer", "index")
_FORMS = {"name": r"(?P<name>.+?)", "*": r"[^/]*?"} | {name: rf"(?P<{name}>\d{{1,12}})" for name in _INTEGERS}
_KNOWN = "{name}, {step}, {rank}, {layer}, {index} and {*}"
_STEP = re.compile(r"(?:^|(?<=[._/-]))(?:step|iteration|iter)[_=-]?(\d{1,12})(?=$|[._/-])", re.IGNORECASE)
_RANK = re.compile(r"(?:^|(?<=[._/-]))rank[_=-]?(\d{1,7})(?=$|[._/-])", re.IGNORECASE)
_SEPARATORS = re.compile(r"(?<=[._-])[._-]+|^[._-]+|[._-]+$")


@dataclass(frozen=True, slots=True)
class FileFields:
    """The fields parsed from a path."""

    name: str = ""
    """Tensor name with ``.`` in place of ``/``; empty if keys in the file name the tensors."""
    step: int = 0
    rank: int = 0
    layer: int | None = None
    index: int | None = None


class FilePattern:
    """A pattern for paths relative to the directory."""

    def __init__(self, text: str) -> None:
        """Compile the pattern; raises ConfigError for an unknown or repeated field or an unsupported file suffix."""
        names = [name for name in _FIELD.findall(text) if name != "*"]
        for name in names:
            if name not in _FORMS:
                raise ConfigError(f"invalid pattern {text!r}: unknown field {{{name}}}; fields: {_KNOWN}")
            if names.count(name) > 1:
                raise ConfigError(f"invalid pattern {text!r}: {{{name}}} appears twice")
        if not text.endswith(SUFFIXES):
            raise ConfigError(f"invalid pattern {text!r}: it must end with one of {', '.join(SUFFIXES)}")
        parts = _FIELD.split(text)
        body = "".join(_FORMS[part] if i % 2 else re.escape(part) for i, part in enumerate(parts))
        self._regex = re.compile(body)

    def fields(self, path: str) -> FileFields | None:
        """Return the fields of a relative path, or None if it does not match."""
        match = self._regex.fullmatch(path)
        if match is None:
            return None
        values: dict[str, Any] = {
            key: value if key == "name" else int(value) for key, value in match.groupdict().items()
        }
        if "name" in values:
            values["name"] = values["name"].replace("/", ".")
        return FileFields(**values)


def fields_of(path: str) -> FileFields:
    """Return the fields of a relative path without a pattern."""
    stem = path[: path.rindex(".")]
    steps, ranks = _STEP.findall(stem), _RANK.findall(stem)
    stem = _RANK.sub("", _STEP.sub("", stem))
    *folders, last = stem.split("/")
    numbers = [folder for folder in folders if folder.isdecimal() and len(folder) <= 12]
    if not steps and len(numbers) == 1:
        steps = numbers
        folders.remove(numbers[0])
    name = ".".join(filter(None, (_SEPARATORS.sub("", part) for part in (*folders, last))))
    return FileFields(name, int(steps[0]) if steps else 0, int(ranks[0]) if ranks else 0)


def split_pattern(path: str) -> tuple[str, str | None]:
    """Split ``dump/{step}/{name}.pt`` into the directory and the pattern below it; the pattern is None without a
    field."""
    parts = path.split("/")
    first = next((i for i, part in enumerate(parts) if _FIELD.search(part)), None)
    if first is None:
        return path, None
    return "/".join(parts[:first]) or ("/" if path.startswith("/") else "."), "/".join(parts[first:])
