"""Expression: a condition written as text, such as ``layer_id in (0, 1) and search("attn", name)``.

The text is parsed to a whitelist of syntax and turned into closures once; nothing is ever handed to ``eval``. There are
names, numbers, texts, tuples, ``and or not``, comparisons, ``in``, ``+ - * / // %``, ``a if c else b``, ``x[0]`` and the
functions ``search match fullmatch len abs min max any all str int float startswith endswith``; no attributes, no
comprehensions, and nothing whose cost grows faster than the text (``*`` is for numbers only, a regular expression is a
constant that :mod:`tapscope.pattern` has weighed).

What is not known is None, and None never raises: compared by ``< <= > >=`` or looked up by ``in`` it gives False,
calculated with it gives None, and no pattern matches it. So ``step < 2`` is simply False where there is no step.
"""

import ast
import difflib
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from tapscope import operations
from tapscope.errors import EvaluationError, ExpressionError

MAX_TEXT = 4096
"""Longest expression, in characters."""
_MAX_DEPTH = 40
_MAX_INT = 2**64

_Values = Mapping[str, Any]
_Node = Callable[[_Values], Any]


class _Constant:
    """A part that is the same whatever the values are."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, values: _Values) -> Any:
        return self.value


class Expression:
    """A compiled condition; ``expression(values)`` gives its value.

    ``names`` are the names it may use (None: any). With ``tags``, other names are allowed as well, for tags that nobody
    has announced, but not what looks like a slip of the pen for a known one.

    Raises ExpressionError, with the column and what is allowed, when constructed; EvaluationError when called.
    """

    __slots__ = ("_known", "_node", "_tree", "names", "text")

    def __init__(self, text: str, names: Iterable[str] | None = None, *, tags: bool = False) -> None:
        if not isinstance(text, str):
            raise ExpressionError(f"an expression is a text, not a {type(text).__name__}")
        self.text = " ".join(text.split("\n")).strip()
        self._known: dict[str, Any] = {}
        self._tree = _parse(self.text)
        compiler = _Compiler(self.text, None if names is None else tuple(names), tags, self._known)
        self._node = compiler.node(self._tree, 0, truth=False)
        self.names = frozenset(compiler.used)
        """The names it asks for."""

    def __call__(self, values: _Values) -> Any:
        """The value; names that ``values`` lacks are None. Raises EvaluationError and nothing else."""
        try:
            return self._node(values)
        except Exception as error:  # noqa: BLE001 - one type that the caller counts
            raise EvaluationError(f"{_short(self.text)}: {type(error).__name__}: {error}") from None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and (other.text, other._known) == (self.text, self._known)

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.text, self._known)

    @property
    def is_constant(self) -> bool:
        """Whether no value is needed any more; the call then needs none: ``expression({})``."""
        return isinstance(self._node, _Constant)

    def bound(self, values: _Values) -> "Expression":
        """The same condition once ``values`` are settled: true and false for the same rest, and often constant."""
        other = object.__new__(Expression)
        other.text, other._tree = self.text, self._tree
        other._known = self._known | {name: values[name] for name in self.names if name in values}
        compiler = _Compiler(self.text, None, True, other._known)
        other._node = compiler.node(self._tree, 0, truth=True)
        other.names = frozenset(compiler.used - other._known.keys())
        return other


def _restored(text: str, known: dict[str, Any]) -> Expression:
    expression = Expression(text)
    return expression.bound(known) if known else expression


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def _parse(text: str) -> ast.expr:
    if len(text) > MAX_TEXT:
        raise ExpressionError(f"{_short(text)} has {len(text)} characters; an expression has at most {MAX_TEXT}")
    if not text:
        raise ExpressionError("an empty expression says nothing; write e.g. layer_id == 0")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\d", which are meant as they stand
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ExpressionError(f"{_short(text)}, column {error.offset or 1}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"{_short(text)}: {error or 'is nested too deeply'}") from None


class _Compiler:
    """Turns a tree into closures, refusing what is not on the list."""

    def __init__(self, text: str, names: tuple[str, ...] | None, tags: bool, known: _Values) -> None:
        self._text = text
        self._names = names
        self._tags = tags
        self._known = known
        self.used: set[str] = set()

    def node(self, tree: ast.expr, depth: int, *, truth: bool) -> _Node:
        """``truth``: only whether the value is true matters here."""
        if depth > _MAX_DEPTH:
            self._refuse(tree, f"is nested more than {_MAX_DEPTH} deep")
        method = self._METHODS.get(type(tree))
        if method is None:
            self._refuse(tree, f"{type(tree).__name__} is not allowed", operations.ALLOWED)
        built: _Node = method(self, tree, depth + 1, truth)
        return built

    def _refuse(self, tree: ast.expr, what: str, allowed: str = "") -> NoReturn:
        column = tree.col_offset + 1
        raise ExpressionError(f"{_short(self._text)}, column {column}: {what}{'; ' if allowed else ''}{allowed}")

    def _apply(self, function: Callable[..., Any], *parts: _Node) -> _Node:
        """A call of ``function`` on the parts' values, made now when they are all constant."""
        if all(isinstance(part, _Constant) for part in parts):
            try:
                return _Constant(function(*[part({}) for part in parts]))
            except Exception:  # noqa: BLE001 - it fails when evaluated, where it is counted
                pass
        return operations.call(function, parts)

    def _constant(self, tree: ast.Constant, depth: int, truth: bool) -> _Node:
        value = tree.value
        if value is not None and type(value) not in (bool, int, float, str):
            self._refuse(tree, f"{value!r} is not allowed", "constants are numbers, texts, True, False and None")
        if type(value) is int and value > _MAX_INT:
            self._refuse(tree, f"a number of {len(str(value))} digits is too large")
        return _Constant(value)

    def _name(self, tree: ast.Name, depth: int, truth: bool) -> _Node:
        name = tree.id
        if self._names is None:
            if name in operations.FUNCTIONS and name not in self._known and not self._tags:
                self._refuse(tree, f"{name} is a function", f"call it: {name}(...)")
        elif name not in self._names:
            self._check_tag(tree, name, self._names)
        self.used.add(name)
        if name in self._known:
            return self._apply(operations.plain, _Constant(self._known[name]))
        return operations.name(name)

    def _check_tag(self, tree: ast.Name, name: str, names: tuple[str, ...]) -> None:
        near = difflib.get_close_matches(name.lower(), names, 1, 0.8)
        hint = f"did you mean {near[0]}? " if near else ""
        if name in operations.FUNCTIONS:
            self._refuse(tree, f"{name} is a function", f"call it: {name}(...)")
        if near or not self._tags:
            self._refuse(tree, f"{name} is no name here", f"{hint}names are {', '.join(names)}")

    def _tuple(self, tree: ast.Tuple | ast.List | ast.Set, depth: int, truth: bool) -> _Node:
        parts = [self.node(each, depth, truth=False) for each in tree.elts]
        return self._apply(lambda *values: values, *parts)

    def _bool(self, tree: ast.BoolOp, depth: int, truth: bool) -> _Node:
        stops = isinstance(tree.op, ast.Or)  # the truth of an operand that decides
        parts: list[_Node] = []
        for i, each in enumerate(tree.values):
            part = self.node(each, depth, truth=truth)
            if isinstance(part, _Constant):
                if bool(part.value) is stops:
                    if truth or not parts:
                        return part
                    return operations.chain([*parts, part], stops)
                if truth or i + 1 < len(tree.values):
                    continue
            parts.append(part)
        return operations.chain(parts, stops) if parts else _Constant(not stops)

    def _unary(self, tree: ast.UnaryOp, depth: int, truth: bool) -> _Node:
        function = operations.UNARY.get(type(tree.op))
        if function is None:
            self._refuse(tree, f"{type(tree.op).__name__} is not allowed", operations.ALLOWED)
        return self._apply(function, self.node(tree.operand, depth, truth=isinstance(tree.op, ast.Not)))

    def _binary(self, tree: ast.BinOp, depth: int, truth: bool) -> _Node:
        function = operations.BINARY.get(type(tree.op))
        if function is None:
            self._refuse(tree, f"{type(tree.op).__name__} is not allowed", operations.ALLOWED)
        left, right = (self.node(each, depth, truth=False) for each in (tree.left, tree.right))
        return self._apply(function, left, right)

    def _compare(self, tree: ast.Compare, depth: int, truth: bool) -> _Node:
        parts = [self.node(each, depth, truth=False) for each in (tree.left, *tree.comparators)]
        pairs = [self._apply(operations.COMPARE[type(op)], parts[i], parts[i + 1]) for i, op in enumerate(tree.ops)]
        if len(pairs) == 1:
            return pairs[0]
        return self._apply(lambda *values: all(values), *pairs)

    def _choice(self, tree: ast.IfExp, depth: int, truth: bool) -> _Node:
        test = self.node(tree.test, depth, truth=True)
        yes, no = (self.node(each, depth, truth=truth) for each in (tree.body, tree.orelse))
        if isinstance(test, _Constant):
            return yes if test.value else no
        return lambda values: yes(values) if test(values) else no(values)

    def _item(self, tree: ast.Subscript, depth: int, truth: bool) -> _Node:
        if isinstance(tree.slice, ast.Slice):
            self._refuse(tree, "a slice is not allowed", "take one item, e.g. shape[0]")
        parts = (self.node(each, depth, truth=False) for each in (tree.value, tree.slice))
        return self._apply(operations.item, *parts)

    def _call(self, tree: ast.Call, depth: int, truth: bool) -> _Node:
        name = tree.func.id if isinstance(tree.func, ast.Name) else ""
        function = operations.FUNCTIONS.get(name)
        if function is None:
            what = f"{name or 'this'} cannot be called"
            self._refuse(tree, what, f"functions are {', '.join(operations.FUNCTIONS)}")
        low, high = function.arity
        if tree.keywords or not low <= len(tree.args) <= high:
            self._refuse(tree, f"write {function.usage}")
        parts = [self.node(each, depth, truth=False) for each in tree.args]
        if not function.is_search:
            return self._apply(function.body, *parts)
        if not isinstance(tree.args[0], ast.Constant) or not isinstance(parts[0], _Constant):
            self._refuse(tree, f"the pattern of {name} must be a text in quotes")
        try:
            return self._apply(operations.searcher(name, parts[0].value), parts[1])
        except ValueError as error:
            self._refuse(tree.args[0], str(error))

    _METHODS: dict[type, Callable[..., _Node]] = {
        ast.Constant: _constant,
        ast.Name: _name,
        ast.Tuple: _tuple,
        ast.List: _tuple,
        ast.Set: _tuple,
        ast.BoolOp: _bool,
        ast.UnaryOp: _unary,
        ast.BinOp: _binary,
        ast.Compare: _compare,
        ast.IfExp: _choice,
        ast.Subscript: _item,
        ast.Call: _call,
    }
