"""Project defaults: `tapscope.toml`, or `[tool.tapscope]` in `pyproject.toml`, with one table per command.

    [diff]
    skip = ["*:in[*]"]
    rtol = 1e-3

The keys are long options without dashes. Options on the command line override these values; for a repeatable option
they are appended.
"""

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tapscope.core.errors import ConfigError
from tapscope.core.formatting import did_you_mean

VARIABLE = "TAPSCOPE_CONFIG"
"""Environment variable with the path of the settings file; empty disables project settings."""


class ProjectSettings(NamedTuple):
    """The options of one command as set in the project file."""

    file: Path
    table: str
    """Name of the table, e.g. ``tool.tapscope.diff``."""
    words: tuple[str, ...]
    """The options as command-line arguments, e.g. ``--skip=*:in[*]``."""


def read(verb: str, verbs: Mapping[str, object], parser: argparse.ArgumentParser) -> ProjectSettings | None:
    """Return the defaults for the command ``verb``, or None without a file or table; raises ConfigError for invalid
    settings."""
    if (file := _file()) is None:
        return None
    tables, prefix = _tables(file)
    for name in tables:
        if name not in verbs:
            raise ConfigError(f"{file}: [{prefix}{name}]: unknown command{did_you_mean(name, verbs)}")
    table = f"{prefix}{verb}"
    options = tables.get(verb, {})
    if not isinstance(options, dict):
        raise ConfigError(f"{file}: {table}={options!r}: expected a table of options")
    words = words_of(f"{file}: [{table}]", options, parser)
    return ProjectSettings(file, table, words) if words else None


def _file() -> Path | None:
    """Return the file named by `TAPSCOPE_CONFIG`, or the nearest settings file in the working directory and its
    parents."""
    if (named := os.environ.get(VARIABLE)) is not None:
        if named and not Path(named).is_file():
            raise ConfigError(f"{VARIABLE}={named}: no such file")
        return Path(named) if named else None
    here = Path.cwd()
    for folder in (here, *here.parents):
        for file in (folder / "tapscope.toml", folder / "pyproject.toml"):
            if file.is_file() and (file.name == "tapscope.toml" or b"tool.tapscope" in file.read_bytes()):
                return file
    return None


def _tables(file: Path) -> tuple[dict[str, Any], str]:
    """Return command -> table of options, and the prefix of table names in the file."""
    import tomllib

    try:
        content = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: invalid TOML: {error}") from None
    if file.name != "pyproject.toml":
        return content, ""
    tables = content.get("tool", {}).get("tapscope", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{file}: tool.tapscope={tables!r}: expected a table for each command")
    return tables, "tool.tapscope."


def words_of(where: str, options: Mapping[str, Any], parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """Convert options to command-line arguments. Raises ConfigError for an unknown option or a value of the wrong
    type."""
    flags = _flags(parser)
    words: list[str] = []
    for key, value in options.items():
        name = key.replace("_", "-")
        if name not in flags:
            raise ConfigError(f"{where}: unknown option {key!r}{did_you_mean(name, flags)}")
        words += _words(where, name, value, flags[name])
    return tuple(words)


def _flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the long options of ``parser`` by name without dashes."""
    flags = {flag: action for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
    return {flag[2:]: action for flag, action in flags.items() if flag != "--help"}


def _words(where: str, name: str, value: Any, action: argparse.Action) -> Iterator[str]:
    wrong = f"{where}: invalid {name}={value!r}: expected"
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{wrong} true or false")
        if value:
            yield f"--{name}"
        return
    values = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(one, bool) or not isinstance(one, str | int | float) for one in values):
        raise ConfigError(f"{wrong} a string or a number, or a list of them")
    if len(values) > 1 and not isinstance(action, argparse._AppendAction):
        raise ConfigError(f"{wrong} one value")
    yield from (f"--{name}={one}" for one in values)
