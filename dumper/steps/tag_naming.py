"""Conversion of the names and tags of explicit values to site names and JSON."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

_IN_SITES = str.maketrans("[]:", "();")
_MAX_NAME = 512
_MAX_TEXT = 1024
_MAX_ITEMS = 64
_MAX_DEPTH = 4


def layer_path(layer: Any) -> str:
    """Return the module path ``layers.N`` of a layer; empty if ``layer`` is not an integer ≥ 0."""
    if isinstance(layer, np.integer):
        layer = int(layer)
    return f"layers.{layer}" if isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 else ""


def port_name(name: Any) -> str:
    """Return ``name`` as written in the brackets of a port: one printable line, never empty.

    ``[``, ``]`` and ``:``, which are special in sites, become ``(``, ``)`` and ``;``.
    """
    text = str(name).translate(_IN_SITES).encode(errors="replace").decode()
    text = "".join(each if each.isprintable() else "?" for each in text)
    return text[:_MAX_NAME] or "(empty)"


def json_tags(tags: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert tags to JSON types: numbers, strings, lists and objects are kept, other values become strings.

    Returns None if there are no tags. Long strings and lists are truncated and end in ``...``.
    """
    return {str(name): _json(value, 0) for name, value in tags.items() if value is not None} or None


def _json(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.generic):
        return _json(value.item(), depth)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, str):
        text = value.encode(errors="replace").decode()
        return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        return {str(name): _json(child, depth + 1) for name, child in list(value.items())[:_MAX_ITEMS]}
    if isinstance(value, list | tuple | set | frozenset) and depth < _MAX_DEPTH:
        items = [_json(child, depth + 1) for child in list(value)[:_MAX_ITEMS]]
        return [*items, "..."] if len(value) > _MAX_ITEMS else items
    return _text(value)


def _text(value: Any) -> str:
    if (shape := getattr(value, "shape", None)) is not None:  # reading the values might synchronize with a device
        with contextlib.suppress(Exception):
            return f"<{type(value).__name__} of shape {tuple(shape)}>"
    try:
        text = str(value).encode(errors="replace").decode()
    except Exception:  # noqa: BLE001 - a failing __str__ must not lose the whole value
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
