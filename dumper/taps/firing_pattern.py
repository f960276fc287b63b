"""Patterns: the structure of one firing's value, by which the C++ fast path recognizes the next one.

The pattern of a value depends on its type:

- None: None
- a leaf whose statistics or plain value are kept: a RecordTemplate
- a tensor kept in full (else ``(port, layout)`` is None) or with a row set (else the last two are None):
  ``[template, (port, layout), row_set, rows]``
- a tuple: a tuple of patterns
- a mapping or dataclass: ``[class, name, pattern, ...]`` of its items or fields
- ``(args, kwargs)``: the pattern of ``args`` and one flat tuple ``(name, pattern, ...)``

kernels/native/hook_fastpath.cpp compares values with patterns.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from tapscope.dumper.device import device_stats
from tapscope.dumper.records.flatten import is_container, is_opaque, plain_value
from tapscope.kernels.native import library
from tapscope.run_format.ledger import encode_line

if TYPE_CHECKING:
    from tapscope.dumper.records.site_port import SitePort

_MAX_PATTERNS = 4  # each mismatch costs about as much as comparing two shapes
_EXACT_TYPES = (bool, int, str)  # equal values of one of these types have the same text
_ITEMS = (dict.items, OrderedDict.items)  # a class that overrides items() is not a plain mapping


class UnknownValue(Exception):
    """Raised for a value that no fast path can handle. Internal to this module."""


def learn(fast: Any, pattern: Any) -> None:
    """Add a pattern to the fast path, which keeps several because shapes alternate (e.g. prefill and decode)."""
    if pattern is not None and pattern not in fast.patterns:
        fast.patterns = (pattern, *fast.patterns[: _MAX_PATTERNS - 1])


def pattern_of(kind: str, value: Any, ports: "Iterator[SitePort]") -> Any:
    """Return the pattern of a value whose leaves were just captured at ``ports``, in the order of :func:`.flatten`.

    Returns None if no fast path can handle values of this structure.
    """
    try:
        pattern = _pattern(value, ports) if kind != "in" else _call(value[0], value[1], ports)
    except (UnknownValue, RecursionError):  # a container that contains itself
        return None
    return None if any(True for _ in ports) else pattern


def _call(args: tuple[Any, ...], kwargs: dict[str, Any], ports: "Iterator[SitePort]") -> tuple[Any, Any]:
    values = _pattern(args, ports)
    return values, tuple([each for name, value in kwargs.items() for each in (name, _pattern(value, ports))])


def _pattern(value: Any, ports: "Iterator[SitePort]") -> Any:
    if value is None:
        return None
    if type(value) is tuple:
        return tuple([_pattern(child, ports) for child in value])
    if (children := _named(value)) is not None:
        return [type(value), *[each for name, child in children for each in (name, _pattern(child, ports))]]
    if is_container(value) or (port := next(ports, None)) is None:
        raise UnknownValue
    return _tensor(value, port) if isinstance(value, torch.Tensor) else _plain(value, port)


def _named(value: Any) -> list[tuple[str, Any]] | None:
    """Return the (name, value) pairs of a mapping or dataclass, as :func:`.flatten` does; None for other types.

    Raises UnknownValue for a mapping with custom ``items()`` or keys that are not strings.
    """
    if isinstance(value, dict):
        if type(value).items not in _ITEMS or not all(type(key) is str for key in value):
            raise UnknownValue
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type | tuple | list) and not is_opaque(value):
        return [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    return None


def _tensor(tensor: torch.Tensor, port: "SitePort") -> Any:
    layout = port.latest
    if (
        layout.template is None
        or not port.announced
        or (layout.torch_dtype, layout.torch_shape) != (tensor.dtype, tensor.shape)
    ):
        raise UnknownValue
    if not tensor.is_cuda and port.keep == "sketch":
        raise UnknownValue
    if tensor.is_cuda and (port.keep == "full" or not device_stats.teach(layout.template, tensor, port)):
        raise UnknownValue
    if port.keep != "full" and port.row_set is None:
        return layout.template
    return [layout.template, (port, layout) if port.keep == "full" else None, port.row_set, layout.rows]


def _plain(value: Any, port: "SitePort") -> Any:
    if port.keep is None or port.decision.triggers is not None or not port.announced:
        raise UnknownValue
    text = plain_value(value)
    is_object = text["type"] == "object"
    if not is_object and type(value) not in _EXACT_TYPES:
        raise UnknownValue
    if (functions := library.functions()) is None:
        raise UnknownValue
    head = f',"site":{port.site_text},"step":'.encode()
    tail = port.model_text.encode() + b',"value":' + encode_line(text)
    return functions.record_template(head, tail, type(value) if is_object else value, (), 0, 0, -1)
