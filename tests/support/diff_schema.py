"""JSON Schema of `tapscope diff --json`, generated from the printed classes; contains no tests."""

import ast
import inspect
import math
import textwrap
import types
import typing
from enum import Enum
from functools import cache
from typing import Any

from tapscope.comparator import Coverage, Divergence, Finding, Header, Place
from tapscope.comparator.metrics.detail import Detail
from tapscope.comparator.options.fail_on import CONDITIONS
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.explanation import Explanation
from tapscope.comparator.verdict.finding import MEMBERS
from tapscope.core.deprecation import deprecated_names_of
from tapscope.run_format.ledger import Ledger

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {str: "string", int: "integer", bool: "boolean"}
_NUMBER = {"type": ["number", "null"]}
_OBJECT = {"type": "object"}
_RENAMED: dict[type, tuple[tuple[str, ...], dict[str, Any]]] = {
    Finding: ((), {"ratio": _NUMBER | {"description": "error / floor; above 1 is more than the floor."}}),
    Place: ((), {"text": {"type": "string", "description": "The place in words."}}),
    Explanation: ((), {"text": {"type": "string", "description": "The whole sentence; empty where nothing is clear."}}),
    Ledger: ((), {"lost": {"type": "integer"}, "complete": {"type": "boolean"}}),
    Coverage: (
        ("ledgers",),
        {"ledger_baseline": {"$ref": "#/$defs/Ledger"}, "ledger_target": {"$ref": "#/$defs/Ledger"}},
    ),
    Divergence: (("finding",), {"ratio": _NUMBER | {"description": "Of its finding."}}),
}
"""Fields that are omitted, and printed members that are not fields."""


def make_schema() -> dict[str, Any]:
    """Return the schema of one line."""
    defs: dict[str, Any] = {}
    _type(Ledger, defs)
    odd = {
        "type": "object",
        "additionalProperties": {"enum": ["inf", "-inf", "nan"]},
        "description": "Numbers of this line that are null because they are not finite, by their path.",
    }
    head = {"schema": {"const": "tapscope.diff/2"}, "nonfinite": odd}
    both = {"anyOf": [_type(Divergence, defs), {"type": "null"}]}
    closest = _closed({"site": {"type": "string"}, "ratio": _NUMBER, "test": {"type": "string"}})
    bodies = {
        "header": {"baseline": _type(Header, defs), "target": _type(Header, defs), "options": _OBJECT},
        "finding": _properties(Finding, defs),
        "summary": {
            "exit_code": {"enum": [0, 1, 3]},
            "failed": {"type": "array", "items": {"enum": sorted(CONDITIONS)}},
            "num_findings": {"type": "object", "additionalProperties": {"type": "integer"}},
            "first_divergence": both,
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
    hints, said = _hints(kind), _said(kind)
    left_out, beside = _RENAMED.get(kind, ((), {}))
    found = {}
    for name in _fields(kind):
        if name not in left_out:
            found[name] = dict(_type(hints[name], defs))
            if name in said:
                found[name]["description"] = said[name]
    return found | beside


def _hints(kind: Any) -> dict[str, Any]:
    """Return name -> type of fields and properties."""
    names = {"Detail": Detail, "Examined": PairResult}
    deprecated = deprecated_names_of(kind)
    made = {n: one.fget for n, one in vars(kind).items() if isinstance(one, property) and n not in deprecated}
    returned = {name: typing.get_type_hints(one, localns=names)["return"] for name, one in made.items()}
    return returned | typing.get_type_hints(kind, localns=names)


def _fields(kind: Any) -> tuple[str, ...]:
    """Return the field names of a struct; empty for any other type."""
    if kind is Finding:
        return MEMBERS
    return getattr(kind, "__struct_fields__", ())


@cache
def _said(kind: Any) -> dict[str, str]:
    """Return field -> docstring below it, and property -> docstring."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for one, two in zip(body.body, body.body[1:], strict=False):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(two, ast.Expr):
            found[one.target.id] = " ".join(str(ast.literal_eval(two.value)).split())
    for one in body.body:
        if isinstance(one, ast.FunctionDef) and (text := ast.get_docstring(one)):
            found[one.name] = " ".join(text.split())
    return found


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


_CHECKS = {
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


def problems(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "") -> list[str]:
    """Return the violations of the schema in ``value``; supports the keywords that :func:`make_schema` uses."""
    if "$ref" in schema:
        return problems(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, path)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            tried = [problems(value, option, root, path) for option in schema[word]]
            return [] if any(not found for found in tried) else min(tried, key=len)
    if "const" in schema and value != schema["const"]:
        return [f"{path}: {value!r} is not {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{path}: {value!r} is none of {schema['enum']}"]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_CHECKS[kind](value) for kind in kinds):
        return [f"{path}: {value!r} is no {' or '.join(kinds)}"]
    return _inside(value, schema, root, path)


def _inside(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str) -> list[str]:
    found: list[str] = []
    if isinstance(value, list):
        firsts = schema.get("prefixItems", [])
        for i, item in enumerate(value):
            found += problems(item, firsts[i] if i < len(firsts) else schema.get("items", {}), root, f"{path}[{i}]")
    if isinstance(value, dict):
        known = schema.get("properties", {})
        found += [f"{path}: {name} is missing" for name in schema.get("required", []) if name not in value]
        rest = schema.get("additionalProperties", {})
        for name, item in value.items():
            if name not in known and rest is False:
                found.append(f"{path}: {name} is unknown")
            else:
                found += problems(item, known.get(name, rest or {}), root, f"{path}.{name}")
    return found
