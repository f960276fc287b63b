"""YAML file: safe parsing of a hand-written mapping; a hostile file causes one clear error and no other effect."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from tapscope.core.errors import ConfigError
from tapscope.core.regular_files import reading

MAX_BYTES = 256 * 1024
"""Maximum file size in bytes."""
MAX_DEPTH = 12
"""Maximum nesting depth."""


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; an empty file is an empty mapping.

    Raises ConfigError, naming file and line, if the file cannot be read, is not a mapping, exceeds :data:`MAX_BYTES` or
    :data:`MAX_DEPTH`, repeats a key, or uses anchors, aliases or tags. Anchors, aliases and tags are rejected because a
    few lines can expand to gigabytes or construct objects.
    """
    text = _text(path)
    try:
        _check_events(path, text)
        _check_keys(path, yaml.compose(text, Loader=yaml.SafeLoader))
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, not a {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def _text(path: Path) -> str:
    try:
        with reading(path) as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} is longer than {MAX_BYTES // 1024} KiB, the limit for such files")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None


def _check_events(path: Path, text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        where = f"{path}:{event.start_mark.line + 1 if event.start_mark else '?'}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ConfigError(
                f"{where}: anchors and aliases (&, *) are not supported; write the value out, or quote the string"
            )
        if getattr(event, "tag", None):
            raise ConfigError(f"{where}: tags (!) are not supported; write plain values, or quote the string")
        opens = isinstance(event, yaml.CollectionStartEvent)
        depth += opens - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{where}: nests deeper than {MAX_DEPTH} levels")


def _check_keys(path: Path, node: Any) -> None:
    """Raise ConfigError if a key is not a scalar or occurs twice: YAML would silently keep the last value."""
    if isinstance(node, yaml.MappingNode):
        seen: set[Hashable] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{path}:{key.start_mark.line + 1}: a key must be a plain or quoted string")
            if key.value in seen:
                raise ConfigError(f"{path}:{key.start_mark.line + 1}: {key.value!r} is given twice")
            seen.add(key.value)
            _check_keys(path, value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(path, item)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
