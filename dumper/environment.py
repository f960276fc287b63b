"""Parser of settings given as strings: environment variables and ``NAME=VALUE`` words."""

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
_REQUIRES = {"against_rtol": "against", "inject": "inject_from"}
"""Setting -> the setting that it requires."""
_HINTS = typing.get_type_hints(DumperConfig)
_FIELDS = tuple(each.name for each in fields(DumperConfig))
_LOCATION_FIELDS = ("dir", "exp_name", "cleanup_previous")  # read by the process-wide dumper, see run_naming


def parse_words(words: Iterable[str]) -> dict[str, Any]:
    """Parse words such as ``["enabled=true", "keep=full"]`` into changes; raises ConfigError.

    Rules are separated by ``;``, or by ``,`` if all have the plain form GLOB=KEEP. Values of unknown names are parsed
    as JSON where possible and otherwise stay strings.
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
    """Return the settings that the variables in ``environ`` change.

    With ``sglang``, SGLang's ``DUMPER_*`` variables apply where the ``prefix`` variable is unset. Raises ConfigError
    that names the variable. Logs a warning for a variable that resembles a setting but is unknown, and for an SGLang
    variable without a counterpart.
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
                continue  # the variable with the current name takes precedence
        if name in _FIELDS:
            changes[name] = _validated(variable, name, text, tags)
        elif name not in _LOCATION_FIELDS and (
            near := difflib.get_close_matches(name, (*_FIELDS, *_LOCATION_FIELDS), 1, 0.7)
        ):
            suggestion = prefix + near[0].upper()
            _log.warning("tapscope: %s is not a setting and is ignored; did you mean %s?", variable, suggestion)
    return changes


def value_of(name: str, text: str) -> Any:
    """Parse the text of a setting into its value; raises ConfigError."""
    hint, text = _HINTS[name], text.strip()
    if name in ("rules", "triggers", "inject"):
        return _parse_list(name, text)
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
                return text  # a size such as 64MiB, or invalid: DumperConfig reports it
    return text


def out_of(environ: Mapping[str, str]) -> Path | None:
    """Return the run directory given by SGLang's ``DUMPER_DIR`` and ``DUMPER_EXP_NAME``; None if neither is set."""
    folder, name = (environ.get(f"DUMPER_{each}", "").strip() for each in ("DIR", "EXP_NAME"))
    return Path(folder or "/tmp/dumper") / name if folder or name else None


def _parse_list(name: str, text: str) -> Any:
    if re.match(r"\[\s*[\[\]{\"']", text):  # a JSON list: a glob may begin with a bracket, but not followed by these
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


def _validated(variable: str, name: str, text: str, tags: list[str]) -> Any:
    """Parse one setting and validate it in isolation with the declared ``tags``, so that errors name ``variable``."""
    try:
        value = value_of(name, text)
        others = {"tags": tags} | ({_REQUIRES[name]: "RUN"} if name in _REQUIRES else {})
        DumperConfig().updated(others | {name: value})
    except ConfigError as error:
        shown = "its value" if name == "control_token" else str(error)
        raise ConfigError(f"{variable}: {shown}") from None
    return value


# ---- SGLang ---------------------------------------------------------------------------------------------

_SGLANG_NAMES = {
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
        if variable in _SGLANG_NAMES:
            changes[_SGLANG_NAMES[variable]] = _validated(variable, _SGLANG_NAMES[variable], text, tags)
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
