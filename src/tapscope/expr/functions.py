"""Evaluation nodes and functions of an :class:`~tapscope.expr.expression.Expression`, and their semantics for None."""

import ast
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tapscope.expr.safe_regex import MAX_SUBJECT, safe_pattern

ALLOWED = (
    "allowed are names, numbers, strings, tuples, and, or, not, comparisons, in, + - * / // %, if else and functions"
)
_PLAIN = frozenset({type(None), bool, int, float, str})
_MAX_ITEMS = 65536
_MAX_NESTED = 6

_NUMBERS = frozenset({bool, int, float})

_Values = Mapping[str, Any]
Node = Callable[[_Values], Any]


class Constant:
    """A node with a constant value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, values: _Values) -> Any:
        """Return the constant."""
        return self.value


def name(text: str) -> Node:
    """Return a node for the value of a name; None if the name is missing."""

    def get(values: _Values) -> Any:
        value = values.get(text)
        return value if value.__class__ in _PLAIN else plain(value)

    return get


def plain(value: Any) -> Any:
    """Convert ``value`` to a number, a string or a tuple of those; raises TypeError for anything else, without
    inspecting it."""
    if value.__class__ in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, tuple | list | set | frozenset) and len(value) <= _MAX_ITEMS:
        return tuple(plain(each) for each in value)
    raise TypeError(f"expected a number, a string or a list of them, not {type(value).__name__}")


def call(function: Callable[..., Any], parts: Sequence[Node]) -> Node:
    """Return a node that applies ``function`` to the values of ``parts``."""
    if len(parts) == 1:
        (only,) = parts
        return lambda values: function(only(values))
    if len(parts) == 2:
        left, right = parts
        if isinstance(right, Constant):
            value = right.value
            return lambda values: function(left(values), value)
        return lambda values: function(left(values), right(values))
    return lambda values: function(*[part(values) for part in parts])


def chain(parts: Sequence[Node], stops: bool) -> Node:
    """Return a node for ``and`` (``stops`` False) or ``or``: the first value whose truth is ``stops``, otherwise the
    last value."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:
        first, second = parts
        if stops:
            return lambda values: first(values) or second(values)
        return lambda values: first(values) and second(values)
    if len(parts) <= _MAX_NESTED:
        return chain([parts[0], chain(parts[1:], stops)], stops)

    def evaluate(values: _Values) -> Any:
        value = None
        for part in parts:
            value = part(values)
            if bool(value) is stops:
                break
        return value

    return evaluate


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda a, b: False if a is None or b is None else compare(a, b)


def _is_in(a: Any, b: Any) -> bool:
    if b is None or (a is None and isinstance(b, str)):
        return False
    return a in b


def _arithmetic(symbol: str, compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(a: Any, b: Any) -> Any:
        if a.__class__ in _NUMBERS and b.__class__ in _NUMBERS:
            return compute(a, b)
        if a is None or b is None:
            return None
        if symbol == "+" and isinstance(a, str) and isinstance(b, str):
            return a + b
        raise TypeError(f"{symbol} is for numbers, not {type(a).__name__} and {type(b).__name__}")

    return apply


def _signed(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(value: Any) -> Any:
        if value is None:
            return None
        if value.__class__ not in _NUMBERS:
            raise TypeError(f"a sign is for numbers, not {type(value).__name__}")
        return compute(value)

    return apply


UNARY: dict[type, Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: _signed(operator.neg),
    ast.UAdd: _signed(operator.pos),
}
BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: _arithmetic("+", operator.add),
    ast.Sub: _arithmetic("-", operator.sub),
    ast.Mult: _arithmetic("*", operator.mul),
    ast.Div: _arithmetic("/", operator.truediv),
    ast.FloorDiv: _arithmetic("//", operator.floordiv),
    ast.Mod: _arithmetic("%", operator.mod),
}
COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: _ordered(operator.lt),
    ast.LtE: _ordered(operator.le),
    ast.Gt: _ordered(operator.gt),
    ast.GtE: _ordered(operator.ge),
    ast.In: _is_in,
    ast.NotIn: lambda a, b: not _is_in(a, b),
    ast.Is: lambda a, b: a is b if a is None or b is None else a == b,
    ast.IsNot: lambda a, b: a is not b if a is None or b is None else a != b,
}


def item(value: Any, index: Any) -> Any:
    """Return ``value[index]`` of a tuple or string; None if the index is out of range."""
    if value is None or index is None:
        return None
    if not isinstance(value, tuple | str) or type(index) is not int:
        raise TypeError("only tuples and strings can be indexed, by an integer")
    return value[index] if -len(value) <= index < len(value) else None


def searcher(kind: str, pattern: Any) -> Callable[[Any], bool]:
    """Return ``search``, ``match`` or ``fullmatch`` for a constant pattern; raises ValueError for an invalid
    pattern."""
    if not isinstance(pattern, str):
        raise ValueError("the pattern must be a quoted string")
    find = getattr(safe_pattern(pattern), kind)

    def apply(text: Any) -> bool:
        if text is None:
            return False
        if len(text) > MAX_SUBJECT:
            raise ValueError(f"a string of {len(text)} characters is too long for {kind}; the maximum is {MAX_SUBJECT}")
        return find(text) is not None

    return apply


def _extreme(choose: Callable[[Any], Any]) -> Callable[..., Any]:
    def apply(*values: Any) -> Any:
        several = values[0] if len(values) == 1 else values
        if several is None or None in several:
            return None
        return choose(_tuple(several))

    return apply


def _tuple(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise TypeError(f"expected several values, not a {type(value).__name__}")
    return value


def _unless_none(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else compute(value)


def _to_text(value: Any) -> str:
    if isinstance(value, tuple):
        raise TypeError("str is for one value")
    return str(value)


def _affix(kind: Callable[[str, Any], bool]) -> Callable[[Any, Any], bool]:
    def apply(text: Any, affix: Any) -> bool:
        return text is not None and affix is not None and kind(text, affix)

    return apply


class Function(NamedTuple):
    """A function that an expression may call."""

    usage: str
    arity: tuple[int, int]
    body: Callable[..., Any]
    is_search: bool = False


def _search(text: str) -> Function:
    return Function(f'{text}("PATTERN", TEXT)', (2, 2), searcher, True)


_MANY = 64
FUNCTIONS: dict[str, Function] = {
    "search": _search("search"),
    "match": _search("match"),
    "fullmatch": _search("fullmatch"),
    "len": Function("len(TEXT or TUPLE)", (1, 1), _unless_none(len)),
    "abs": Function("abs(NUMBER)", (1, 1), _unless_none(abs)),
    "min": Function("min(NUMBER, ...)", (1, _MANY), _extreme(min)),
    "max": Function("max(NUMBER, ...)", (1, _MANY), _extreme(max)),
    "any": Function("any((A, B, ...))", (1, 1), lambda value: value is not None and any(_tuple(value))),
    "all": Function("all((A, B, ...))", (1, 1), lambda value: value is not None and all(_tuple(value))),
    "str": Function("str(VALUE)", (1, 1), _unless_none(_to_text)),
    "int": Function("int(NUMBER or TEXT)", (1, 1), _unless_none(int)),
    "float": Function("float(NUMBER or TEXT)", (1, 1), _unless_none(float)),
    "startswith": Function("startswith(TEXT, PREFIX)", (2, 2), _affix(str.startswith)),
    "endswith": Function("endswith(TEXT, SUFFIX)", (2, 2), _affix(str.endswith)),
}
