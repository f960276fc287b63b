"""Docstrings below the fields of a class, for descriptions in schemas and reference pages."""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise


def field_docs(cls: type) -> dict[str, str]:
    """Return field name -> docstring for ``cls`` and its base classes; empty if the source is unavailable."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        docs |= _docs_of_module(base.__module__).get(base.__name__, {})
    return docs


@functools.cache
def _docs_of_module(name: str) -> Mapping[str, dict[str, str]]:
    """Return class -> field -> docstring; each module is parsed once."""
    try:
        body = ast.parse(inspect.getsource(sys.modules[name])).body
    except (OSError, TypeError, KeyError):
        return {}
    return {node.name: dict(_docs(node)) for node in body if isinstance(node, ast.ClassDef)}


def _docs(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(definition.body):
        text = below.value if isinstance(below, ast.Expr) else None
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield field.target.id, inspect.cleandoc(text.value)
