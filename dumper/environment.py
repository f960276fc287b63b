"""Settings as strings, from environment variables and from ``NAME=VALUE`` words."""

import difflib
import json
import logging
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tapscope.core.errors import ConfigError
from tapscope.dumper.config import DEPRECATED, DumperConfig, current_name
from tapscope.dumper.rules.rule import KEEPS
from tapscope.dumper.rules.rule_options import split_outside_quotes

_log = logging.getLogger("tapscope")

_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_NULL = ("", "none", "null")
_NEEDS = {"against_rtol": "against", "inject": "inject_from"}
"""Setting -> the one without which it is invalid."""
_HINTS = typing.get_type_hints(DumperConfig)
_FIELDS = tuple(each.name for each in fields(DumperConfig))
_PLACES = ("dir", "exp_name", "cleanup_previous")  # read by the process's dumper, see run_naming


def parse_words(words: Iterable[str]) -> dict[str, Any]:
    """``["enabled=true", "keep=full"]`` -> changes. Rules are joined by ``;``, or by ``,`` if all are plain GLOB=KEEP.

    Values of unknown names stay strings, or the JSON that they are. Raises ConfigError.
    """
    changes: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not a setting; write NAME=VALUE, e.g. keep=full")
        current = DEPRECATED.get(name, name)
        changes[name] = value_of(current, text) if current in _FIELDS else _json_or_text(text)
    return changes


def changes_of(environ: Mapping[str, str], *, prefix: str = "TAPSCOPE_", sglang: bool = False) -> dict[str, Any]:
    """The settings that the variables change. With ``sglang``, SGLang's ``DUMPER_*`` apply where ours are unset.

    Raises ConfigError that names the variable. A variable that resembles a setting but is none, and one of SGLang's
    without a counterpart, is logged.
    """
    tags = value_of("tags", environ.get(f"{prefix}TAGS", ""))
    changes = _from_sglang(environ, tags) if sglang else {}
    for variable, text in environ.items():
        name = variable.removeprefix(prefix).lower()
        if not variable.startswith(prefix) or not text.strip():
            continue
        if name in DEPRECATED:
            name = current_name(name)
            if environ.get(f"{prefix}{name.upper()}", "").strip():
                continue  # the current name counts
        if name in _FIELDS:
            changes[name] = _named(variable, name, text, tags)
        elif name not in _PLACES and (near := difflib.get_close_matches(name, (*_FIELDS, *_PLACES), 1, 0.7)):
            meant = prefix + near[0].upper()
            _log.warning("tapscope: %s is not a setting and is ignored; did you mean %s?", variable, meant)
    return changes


def value_of(name: str, text: str) -> Any:
    """The value of a setting from its text; raises ConfigError."""
    hint, text = _HINTS[name], text.strip()
    if name in ("rules", "triggers", "inject"):
        return _several(name, text)
    if name == "tags":
        return [] if text.lower() in _NULL else [part.strip() for part in text.split(",")]
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if type(None) in options and text.lower() in _NULL:
        return None
    if bool in options:
        if text.lower() not in (*_YES, *_NO):
            raise ConfigError(f"{name}={text!r}: must be true or false (or 1 0, yes no, on off)")
        return text.lower() in _YES
    for kind in (int, float):
        if kind in options:
            try:
                return kind(text)
            except ValueError:
                return text  # a size such as 64MiB, or invalid: the configuration reports it
    return text


def out_of(environ: Mapping[str, str]) -> Path | None:
    """SGLang's ``DUMPER_DIR`` and ``DUMPER_EXP_NAME`` as the directory of a run; None when neither is set."""
    folder, name = (environ.get(f"DUMPER_{each}", "").strip() for each in ("DIR", "EXP_NAME"))
    return Path(folder or "/tmp/dumper") / name if folder or name else None


def _several(name: str, text: str) -> Any:
    if re.match(r"\[\s*[\[\]{\"']", text):  # a glob may begin with a bracket, but not continue like this
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{name}={text!r} starts like a JSON list but is not one: {error}") from None
    parts = [part.strip() for part in split_outside_quotes(text, r"[;\n]")]
    if name == "rules" and len(parts) == 1:
        simple = text.split(",")
        if all(re.fullmatch(rf"[^\s,=\"]+=({'|'.join(KEEPS)})", part.strip()) for part in simple):
            parts = [part.strip() for part in simple]
    return [part for part in parts if part]


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _named(variable: str, name: str, text: str, tags: list[str]) -> Any:
    """The value, validated alone with the declared ``tags``, so that an error can name the variable."""
    try:
        value = value_of(name, text)
        others = {"tags": tags} | ({_NEEDS[name]: "RUN"} if name in _NEEDS else {})
        DumperConfig().updated(others | {name: value})
    except ConfigError as error:
        shown = "its value" if name == "control_token" else str(error)
        raise ConfigError(f"{variable}: {shown}") from None
    return value


# ---- SGLang ---------------------------------------------------------------------------------------------

_SAME = {
    "DUMPER_ENABLE": "enabled",
    "DUMPER_FILTER": "filter",
    "DUMPER_NON_INTRUSIVE_MODE": "mode",
    "DUMPER_ENABLE_OUTPUT_CONSOLE": "console",
    "DUMPER_ENABLE_GRAD": "grads",
    "DUMPER_ENABLE_MODEL_VALUE": "params",
}


def _from_sglang(environ: Mapping[str, str], tags: list[str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for variable in sorted(environ):
        text = environ[variable].strip()
        if not variable.startswith("DUMPER_") or not text or variable in ("DUMPER_DIR", "DUMPER_EXP_NAME"):
            continue
        if variable in _SAME:
            changes[_SAME[variable]] = _named(variable, _SAME[variable], text, tags)
        elif variable == "DUMPER_SERVER_PORT":
            changes["control"] = _control(text)
        else:
            _log.warning("tapscope: %s has no counterpart in tapscope and is ignored", variable)
    return changes


def _control(text: str) -> str | None:
    if text == "reuse":
        _log.warning("tapscope: DUMPER_SERVER_PORT=reuse: mount the control router in your own app instead")
        return None
    if not re.fullmatch(r"-?\d{1,5}", text) or int(text) > 65535:
        raise ConfigError(f"DUMPER_SERVER_PORT={text!r}: must be a port, or -1 for none")
    return f"127.0.0.1:{int(text)}" if int(text) > 0 else None
