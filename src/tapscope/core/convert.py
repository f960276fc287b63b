"""Convert and validate plain values by type annotations, with errors that name the field, the value and the valid
range.

msgspec converts both settings (dataclasses that validate themselves) and JSON bodies (Structs). Its errors name the
path and the type; the errors raised here add the value and the valid range: ``n=0: must be an integer from 1 to 128``.
"""

import functools
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from sys import float_info
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

T = TypeVar("T")

Finite = Annotated[float, Meta(ge=-float_info.max, le=float_info.max)]
NonNegative = Annotated[float, Meta(ge=0, le=float_info.max)]
Positive = Annotated[float, Meta(gt=0, le=float_info.max)]
Count = Annotated[int, Meta(ge=0)]
PositiveInt = Annotated[int, Meta(ge=1)]
NonEmptyStr = Annotated[str, Meta(min_length=1)]

CUSTOM: Mapping[str, bool] = {"custom": True}
"""``metadata`` of a dataclass field that the class converts itself; :func:`convert_fields` skips the field."""
_WIDTH = 60
_NAMES: dict[Any, str] = {bool: "true or false", type(None): "null"}
_LISTS = (list, tuple, Sequence)
_MAPPINGS = (dict, Mapping)
_LIMITS = ("ge", "gt", "le", "lt", "min_length", "max_length", "extra")
_STEP = re.compile(r"\.([^.\[\]`]+)|\[(\d+|\.\.\.)\]")
_REPR = reprlib.Repr()
"""Like :func:`repr`, but bounded: formatting a list of a million numbers for a 60-character message stays cheap."""
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxstring = _REPR.maxlong = _REPR.maxother = 80


class InvalidValueError(ValueError):
    """A value does not fit its annotation."""

    def __init__(self, path: str, problem: str, *, is_unknown: bool = False) -> None:
        """``path`` is the path of the field, e.g. ``messages[2].role``; empty for the value itself."""
        super().__init__(problem)
        self.path = path
        self.is_unknown = is_unknown
        """True if the error is a field that the type does not define."""


def must_be(text: str) -> Meta:
    """Return annotation metadata with the phrase that error messages print after "must be"."""
    return Meta(extra={"must be": text})


def convert(value: Any, to: type[T] | Any, path: str = "", *, secret: Sequence[str] = ()) -> T:
    """Convert ``value``, parsed JSON or equivalent plain data, to the type ``to``; raises InvalidValueError.

    ``path`` names ``value`` in error messages. Values of fields listed in ``secret`` are redacted there. As in JSON,
    integral floats are accepted as integers. Unknown members of an object are accepted if they are null.
    """
    repairs = {"got `float`": _with_integers, "contains unknown field": _without_unknown_nulls}
    while True:
        try:
            return msgspec.convert(value, to)
        except msgspec.ValidationError as error:
            text = str(error)
        except RecursionError:
            raise InvalidValueError(path, f"{path or 'the value'} is nested too deeply") from None
        if (problem := next((each for each in repairs if each in text), None)) is None:
            raise _to_error(text, value, to, path, secret)
        value = repairs.pop(problem)(value, to)


def convert_fields(instance: Any, error: type[Exception], *, secret: Sequence[str] = ()) -> None:
    """Convert the fields of a frozen dataclass in place; call it from ``__post_init__``. Raises ``error``.

    Fields with ``metadata=CUSTOM`` are skipped.
    """
    shape: Any = _shape(type(instance))  # type: ignore[arg-type]
    names = shape.__struct_fields__
    try:
        converted: Any = convert({name: getattr(instance, name) for name in names}, shape, secret=secret)
    except InvalidValueError as invalid:
        raise error(str(invalid)) from None
    for name in names:
        object.__setattr__(instance, name, getattr(converted, name))


@functools.cache
def _shape(cls: type[Any]) -> type[msgspec.Struct]:
    """Return a Struct type with the same fields as the dataclass ``cls``, without its ``CUSTOM`` fields."""
    hints = get_type_hints(cls, include_extras=True)
    known = [(each.name, hints[each.name]) for each in fields(cls) if not each.metadata.get("custom")]
    return msgspec.defstruct(cls.__name__, known, kw_only=True)


def _with_integers(value: Any, _: Any) -> Any:
    """Return a copy of ``value`` with integral floats converted to integers."""
    if isinstance(value, dict):
        return {name: _with_integers(item, _) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_integers(item, _) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_unknown_nulls(value: Any, annotation: Any) -> Any:
    """Return a copy of ``value`` without null members that the matching Struct does not define."""
    if isinstance(value, list | tuple):
        item_annotation = _inner(annotation, "")
        return [_without_unknown_nulls(item, item_annotation) for item in value]
    if not isinstance(value, dict) or not (known := set(_field_names(annotation))):
        return value
    return {
        name: _without_unknown_nulls(item, _inner(annotation, name))
        for name, item in value.items()
        if item is not None or name in known
    }


def _to_error(text: str, value: Any, to: Any, path: str, secret: Sequence[str]) -> InvalidValueError:
    """Translate a msgspec error message into InvalidValueError, adding the value and the annotation at its path."""
    problem, _, place = text.partition(" - at ")
    annotation: Any = to
    for name, index in _STEP.findall(place):
        if index == "...":  # a value of an object; msgspec does not name its key
            break
        value = value[name or int(index)]
        path = f"{path}.{name}" if path and name else path + (name or f"[{index}]")
        annotation = _inner(annotation, name)
    if missing := re.fullmatch(r"Object missing required field `(.+)`", problem):
        path = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidValueError(path, f"{path} is missing: must be {describe(_inner(annotation, missing[1]))}")
    if unknown := re.fullmatch(r"Object contains unknown field `(.+)`", problem):
        known = ", ".join(dict.fromkeys(_field_names(annotation)))
        path = f"{path}.{unknown[1]}" if path else unknown[1]
        return InvalidValueError(path, f"{path} is not supported; supported: {known}", is_unknown=True)
    if path:
        return InvalidValueError(
            path, f"{path}={'...' if path in secret else shown(value)}: must be {describe(annotation)}"
        )
    return InvalidValueError(path, f"must be {describe(annotation)}, not {shown(value)}")


def shown(value: Any) -> str:
    """Return ``repr(value)`` truncated to message width, without formatting the truncated part of a large container."""
    text = _REPR.repr(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"


def describe(annotation: Any) -> str:
    """Describe the valid values of an annotation for messages: ``an integer from 1 to 128 or null``."""
    annotation, meta = _bare(annotation)
    origin, args = get_origin(annotation), get_args(annotation)
    if must_be := (meta.get("extra") or {}).get("must be"):
        return str(must_be)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(describe(each) for each in args))
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(map(str, args))
    if annotation in _NAMES:
        return _NAMES[annotation]
    if annotation in (int, float):
        kind = (
            "an integer" if annotation is int else "a finite number" if meta.get("le") == float_info.max else "a number"
        )
        return kind + _bounds(meta)
    if annotation is str:
        most = f" of at most {meta['max_length']} characters" if "max_length" in meta else ""
        return ("a non-empty string" if meta.get("min_length") else "a string") + most
    if origin in _LISTS or annotation in _LISTS:
        items = "" if not args or args[0] is Any else f" of {_plural(describe(args[0]))}"
        return ("a non-empty list" if meta.get("min_length") else "a list") + items
    if origin in _MAPPINGS and args[1] is not Any:
        return f"a JSON object of {_plural(describe(args[1]))}"
    return "a JSON value" if annotation is Any else "a JSON object"


def _bare(annotation: Any) -> tuple[Any, dict[str, Any]]:
    """Split an annotation into the bare type and the constraints of its Meta objects."""
    meta: dict[str, Any] = {}
    while get_origin(annotation) is Annotated:
        for each in annotation.__metadata__:
            if isinstance(each, Meta):
                meta |= {name: value for name in _LIMITS if (value := getattr(each, name)) is not None}
        annotation = annotation.__origin__
    return annotation, meta


def _inner(annotation: Any, name: str) -> Any:
    """Return the annotation of field ``name``, or of the list items if ``name`` is empty; None if there is no
    annotation."""
    annotation, _ = _bare(annotation)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        types = [inner for each in args if (inner := _inner(each, name)) is not None]
        if types and all(get_origin(each) is Literal for each in types):  # the tags of a tagged union
            return Literal[tuple(tag for each in types for tag in get_args(each))]
        return types[0] if types else None
    if not name:
        return args[0] if origin in _LISTS and args else None
    if not isinstance(annotation, type) or not hasattr(annotation, "__annotations__"):
        return None
    return _hints(annotation).get(name)


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    """Return the annotations of a class; for a tagged Struct, the tag field is included."""
    hints = get_type_hints(cls, include_extras=True)
    if issubclass(cls, msgspec.Struct) and (field := cls.__struct_config__.tag_field) is not None:
        hints[field] = Literal[cls.__struct_config__.tag]
    return hints


def _field_names(annotation: Any) -> Iterator[str]:
    """Yield the field names of a Struct, or of every Struct in a union."""
    annotation, _ = _bare(annotation)
    for each in get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,):
        if isinstance(each, type) and issubclass(each, msgspec.Struct):
            yield from each.__struct_fields__
            if each.__struct_config__.tag_field is not None:
                yield each.__struct_config__.tag_field


def _plural(text: str) -> str:
    """Pluralize each alternative of a description: ``an integer ≥ 0`` -> ``integers ≥ 0``."""
    return " or ".join(re.sub(r"^an? ((?:non-empty |finite |JSON )?\w+)", r"\1s", each) for each in text.split(" or "))


def _bounds(meta: dict[str, Any]) -> str:
    finite = {name: limit for name, limit in meta.items() if limit not in (-float_info.max, float_info.max)}
    if "ge" in finite and "le" in finite:
        return f" from {_number(finite['ge'])} to {_number(finite['le'])}"
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [f"{signs[name]} {_number(finite[name])}" for name in signs if name in finite]
    return f" {' and '.join(limits)}" if limits else ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.12g}"
