"""JSON Schema of `tapscope diff --json`, generated from the printed classes."""

import types
import typing
from enum import Enum
from typing import Any

from tapscope.comparator import Coverage, Divergence, Finding, Header, Place
from tapscope.comparator.metrics.detail import Detail
from tapscope.comparator.options.fail_on import CONDITIONS
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.explanation import Explanation
from tapscope.comparator.verdict.finding import MEMBERS
from tapscope.core.deprecation import deprecated_names_of
from tapscope.core.field_docs import field_docs
from tapscope.run_format.ledger import Ledger

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {str: "string", int: "integer", bool: "boolean"}
_NUMBER = {"type": ["number", "null"]}
_OBJECT = {"type": "object"}
_ADAPTED: dict[type, tuple[tuple[str, ...], dict[str, Any]]] = {
    Finding: ((), {"ratio": _NUMBER | {"description": "error / floor; above 1, the error exceeds the floor."}}),
    Place: ((), {"text": {"type": "string", "description": "The place as text."}}),
    Explanation: ((), {"text": {"type": "string", "description": "The explanation; empty if no cause was found."}}),
    Ledger: ((), {"lost": {"type": "integer"}, "complete": {"type": "boolean"}}),
    Coverage: (
        ("ledgers",),
        {"ledger_baseline": {"$ref": "#/$defs/Ledger"}, "ledger_target": {"$ref": "#/$defs/Ledger"}},
    ),
    Divergence: (("finding",), {"ratio": _NUMBER | {"description": "Ratio of the finding: error / floor."}}),
}
"""Class -> (fields that are not printed, printed members that are not fields)."""


def make_schema() -> dict[str, Any]:
    """Return the schema of one output line: a `header`, `finding` or `summary`."""
    defs: dict[str, Any] = {}
    _type(Ledger, defs)
    nonfinite = {
        "type": "object",
        "additionalProperties": {"enum": ["inf", "-inf", "nan"]},
        "description": "Path -> value of each number in this line that is null because it is not finite.",
    }
    head = {"schema": {"const": "tapscope.diff/2"}, "nonfinite": nonfinite}
    first = {"anyOf": [_type(Divergence, defs), {"type": "null"}]}
    closest = _closed({"site": {"type": "string"}, "ratio": _NUMBER, "test": {"type": "string"}})
    bodies = {
        "header": {"baseline": _type(Header, defs), "target": _type(Header, defs), "options": _OBJECT},
        "finding": _properties(Finding, defs),
        "summary": {
            "exit_code": {"enum": [0, 1, 3]},
            "failed": {"type": "array", "items": {"enum": sorted(CONDITIONS)}},
            "num_findings": {"type": "object", "additionalProperties": {"type": "integer"}},
            "first_divergence": first,
            "divergences": {"type": "array", "items": _type(Divergence, defs)},
            "max_ratio": {"anyOf": [closest, {"type": "null"}]},
            "coverage": _type(Coverage, defs),
        },
    }
    for kind, body in bodies.items():
        defs[kind] = _closed({"type": {"const": kind}, **head, **body})
    lines = [{"$ref": f"#/$defs/{kind}"} for kind in bodies]
    return {"$schema": DRAFT, "title": "A line of tapscope diff --json", "oneOf": lines, "$defs": defs}


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _properties(kind: Any, defs: dict[str, Any]) -> dict[str, Any]:
    hints, descriptions = _hints(kind), _descriptions(kind)
    omitted, added = _ADAPTED.get(kind, ((), {}))
    members = {}
    for name in _fields(kind):
        if name not in omitted:
            members[name] = dict(_type(hints[name], defs))
            if name in descriptions:
                members[name]["description"] = descriptions[name]
    return members | added


def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of the fields and properties of a class by name."""
    names = {"Detail": Detail, "Examined": PairResult}
    deprecated = deprecated_names_of(kind)
    getters = {n: one.fget for n, one in vars(kind).items() if isinstance(one, property) and n not in deprecated}
    returned = {name: typing.get_type_hints(one, localns=names)["return"] for name, one in getters.items()}
    return returned | typing.get_type_hints(kind, localns=names)


def _fields(kind: Any) -> tuple[str, ...]:
    """Return the field names of a struct; empty for any other type."""
    if kind is Finding:
        return MEMBERS
    return getattr(kind, "__struct_fields__", ())


def _descriptions(kind: Any) -> dict[str, str]:
    """Return the docstrings of the fields and properties of a class, each on one line."""
    properties = {name: one.__doc__ for name, one in vars(kind).items() if isinstance(one, property) and one.__doc__}
    return {name: " ".join(text.split()) for name, text in (field_docs(kind) | properties).items()}


def _type(hint: Any, defs: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_type(arg, defs) for arg in args]}
    if origin is tuple and len(args) == 2 and args[1] is ...:
        return {"type": "array", "items": _type(args[0], defs)}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_type(arg, defs) for arg in args], "minItems": len(args)}
    if origin is list:
        return {"type": "array", "items": _type(args[0], defs)}
    if origin is not None:
        return {"type": "object", "additionalProperties": _type(args[1], defs)}
    if hint is float:
        return dict(_NUMBER)
    if hint is type(None):
        return {"type": "null"}
    if _fields(hint):
        name = hint.__name__  # type: ignore[union-attr]
        if name not in defs:
            defs[name] = {}
            defs[name] = _closed(_properties(hint, defs))
        return {"$ref": f"#/$defs/{name}"}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [str(member) for member in hint]}
    return {"type": _PLAIN[hint]} if hint in _PLAIN else {}
