"""Compiler: checks the syntax of an :class:`~tapscope.expr.expression.Expression` and compiles it to closures."""

import ast
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

from tapscope.core.errors import ExpressionError
from tapscope.expr import functions
from tapscope.expr.functions import Constant, Node

MAX_TEXT = 4096
"""Maximum length of an expression in characters."""
_MAX_DEPTH = 40
_MAX_INT = 2**64


def short(text: str) -> str:
    """Return ``repr(text)`` for a message, truncated to 80 characters."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def parse(text: str) -> ast.expr:
    """Parse ``text`` to a syntax tree; raises ExpressionError."""
    if len(text) > MAX_TEXT:
        raise ExpressionError(f"{short(text)} has {len(text)} characters; an expression has at most {MAX_TEXT}")
    if not text:
        raise ExpressionError("the expression is empty; write e.g. layer_id == 0")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for escapes such as "\d", which remain literal
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        column = error.offset or len(text) + 1  # 0 if the text ends prematurely
        raise ExpressionError(f"{short(text)}, column {column}: {error.msg}") from None
    except ValueError as error:
        raise ExpressionError(f"{short(text)}: {error}") from None
    except (RecursionError, MemoryError):
        raise ExpressionError(f"{short(text)} is nested too deeply") from None


def is_condition(tree: ast.expr) -> bool:
    """Return whether the expression is boolean, unlike ``rel`` or ``1e-3``, numbers that would merely be truthy."""
    if isinstance(tree, ast.BoolOp):
        return all(map(is_condition, tree.values))
    if isinstance(tree, ast.IfExp):
        return is_condition(tree.body) and is_condition(tree.orelse)
    if isinstance(tree, ast.Call):
        return isinstance(tree.func, ast.Name) and tree.func.id in ("any", "all", "startswith", "endswith")
    return isinstance(tree, ast.Compare) or (isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not))


class Compiler:
    """Compiles a syntax tree to closures; rejects syntax that is not on the allowlist."""

    def __init__(self, text: str, names: tuple[str, ...] | None, tags: bool, known: Mapping[str, Any]) -> None:
        """``known`` maps names to values to substitute; for ``names`` and ``tags`` see Expression."""
        self._text = text
        self._names = names
        self._tags = tags
        self._known = known
        self.used: set[str] = set()

    def node(self, tree: ast.expr, depth: int, *, truth: bool) -> Node:
        """Compile ``tree``; with ``truth``, only the truth of the value needs to be preserved."""
        if depth > _MAX_DEPTH:
            self._refuse(tree, f"is nested more than {_MAX_DEPTH} deep")
        method = self._METHODS.get(type(tree))
        if method is None:
            self._refuse(tree, f"{type(tree).__name__} is not allowed", functions.ALLOWED)
        built: Node = method(self, tree, depth + 1, truth)
        return built

    def _refuse(self, tree: ast.expr, what: str, allowed: str = "") -> NoReturn:
        column = tree.col_offset + 1
        raise ExpressionError(f"{short(self._text)}, column {column}: {what}{'; ' if allowed else ''}{allowed}")

    def _apply(self, function: Callable[..., Any], *parts: Node) -> Node:
        """Return a call of ``function`` on the values of ``parts``, evaluated immediately if all parts are constant."""
        if all(isinstance(part, Constant) for part in parts):
            try:
                return Constant(function(*[part({}) for part in parts]))
            except Exception:  # noqa: BLE001 - fails again at evaluation, where it is counted
                pass
        return functions.call(function, parts)

    def _constant(self, tree: ast.Constant, depth: int, truth: bool) -> Node:
        value = tree.value
        if value is not None and type(value) not in (bool, int, float, str):
            self._refuse(tree, f"{value!r} is not allowed", "constants are numbers, strings, True, False and None")
        if type(value) is int and value > _MAX_INT:
            self._refuse(tree, f"a number of {len(str(value))} digits is too large")
        return Constant(value)

    def _name(self, tree: ast.Name, depth: int, truth: bool) -> Node:
        name = tree.id
        if self._names is None:
            if name in functions.FUNCTIONS and name not in self._known and not self._tags:
                self._refuse(tree, f"{name} is a function", f"call it: {name}(...)")
        elif name not in self._names:
            self._check_tag(tree, name, self._names)
        self.used.add(name)
        if name in self._known:
            return self._apply(functions.plain, Constant(self._known[name]))
        return functions.name(name)

    def _check_tag(self, tree: ast.Name, name: str, names: tuple[str, ...]) -> None:
        import difflib  # imported lazily: only errors need it

        near = difflib.get_close_matches(name.lower(), names, 1, 0.8)
        hint = f"did you mean {near[0]}? " if near else ""
        if name in functions.FUNCTIONS:
            self._refuse(tree, f"{name} is a function", f"call it: {name}(...)")
        if near or not self._tags:
            self._refuse(tree, f"unknown name {name}", f"{hint}names are {', '.join(names)}")

    def _tuple(self, tree: ast.Tuple | ast.List | ast.Set, depth: int, truth: bool) -> Node:
        parts = [self.node(each, depth, truth=False) for each in tree.elts]
        return self._apply(lambda *values: values, *parts)

    def _bool(self, tree: ast.BoolOp, depth: int, truth: bool) -> Node:
        stops = isinstance(tree.op, ast.Or)  # the truth of an operand that short-circuits
        return self._joined([self.node(each, depth, truth=truth) for each in tree.values], stops, truth)

    def _joined(self, nodes: list[Node], stops: bool, truth: bool) -> Node:
        """Build ``and`` or ``or``, dropping constant operands that cannot affect the result."""
        parts: list[Node] = []
        for i, part in enumerate(nodes):
            if isinstance(part, Constant):
                if bool(part.value) is stops:
                    return part if truth or not parts else functions.chain([*parts, part], stops)
                if truth or i + 1 < len(nodes):
                    continue
            parts.append(part)
        return functions.chain(parts, stops) if parts else Constant(not stops)

    def _unary(self, tree: ast.UnaryOp, depth: int, truth: bool) -> Node:
        function = functions.UNARY.get(type(tree.op))
        if function is None:
            self._refuse(tree, f"{type(tree.op).__name__} is not allowed", functions.ALLOWED)
        return self._apply(function, self.node(tree.operand, depth, truth=isinstance(tree.op, ast.Not)))

    def _binary(self, tree: ast.BinOp, depth: int, truth: bool) -> Node:
        function = functions.BINARY.get(type(tree.op))
        if function is None:
            self._refuse(tree, f"{type(tree.op).__name__} is not allowed", functions.ALLOWED)
        left, right = (self.node(each, depth, truth=False) for each in (tree.left, tree.right))
        return self._apply(function, left, right)

    def _compare(self, tree: ast.Compare, depth: int, truth: bool) -> Node:
        parts = [self.node(each, depth, truth=False) for each in (tree.left, *tree.comparators)]
        pairs = [self._apply(functions.COMPARE[type(op)], parts[i], parts[i + 1]) for i, op in enumerate(tree.ops)]
        return self._joined(pairs, False, truth)

    def _choice(self, tree: ast.IfExp, depth: int, truth: bool) -> Node:
        test = self.node(tree.test, depth, truth=True)
        yes, no = (self.node(each, depth, truth=truth) for each in (tree.body, tree.orelse))
        if isinstance(test, Constant):
            return yes if test.value else no
        return lambda values: yes(values) if test(values) else no(values)

    def _item(self, tree: ast.Subscript, depth: int, truth: bool) -> Node:
        if isinstance(tree.slice, ast.Slice):
            self._refuse(tree, "a slice is not allowed", "take one item, e.g. shape[0]")
        parts = (self.node(each, depth, truth=False) for each in (tree.value, tree.slice))
        return self._apply(functions.item, *parts)

    def _call(self, tree: ast.Call, depth: int, truth: bool) -> Node:
        name = tree.func.id if isinstance(tree.func, ast.Name) else ""
        function = functions.FUNCTIONS.get(name)
        if function is None:
            what = f"{name or 'this'} cannot be called"
            self._refuse(tree, what, f"functions are {', '.join(functions.FUNCTIONS)}")
        low, high = function.arity
        if tree.keywords or not low <= len(tree.args) <= high:
            self._refuse(tree, f"write {function.usage}")
        parts = [self.node(each, depth, truth=False) for each in tree.args]
        if not function.is_search:
            return self._apply(function.body, *parts)
        if not isinstance(tree.args[0], ast.Constant) or not isinstance(parts[0], Constant):
            self._refuse(tree, f"the pattern of {name} must be a quoted string")
        try:
            return self._apply(functions.searcher(name, parts[0].value), parts[1])
        except ValueError as error:
            self._refuse(tree.args[0], str(error))

    _METHODS: ClassVar[dict[type, Callable[..., Node]]] = {
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
