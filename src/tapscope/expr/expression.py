"""Expression: a condition as a string, such as ``layer_id in (0, 1) and search("attn", name)``.

The string is parsed, checked against an allowlist of syntax and compiled to closures once, without ``eval``. There
are names, numbers, strings, tuples, ``and or not``, comparisons, ``in``, ``+ - * / // %``, ``a if c else b``, ``x[0]``
and the functions ``search match fullmatch len abs min max any all str int float startswith endswith``; no attributes,
no comprehensions, and nothing whose cost grows faster than the text: ``*`` is for numbers only, and a regular
expression is a constant that :mod:`tapscope.expr.safe_regex` has weighed.

What is not known is None, and None never raises: compared by ``< <= > >=`` or looked up by ``in`` it gives False,
calculated with it gives None, and no pattern matches it. So ``step < 2`` is simply False where there is no step.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tapscope.core.errors import EvaluationError, ExpressionError
from tapscope.expr.compiler import Compiler, is_condition, parse, short
from tapscope.expr.functions import Constant


class Expression:
    """A compiled condition; ``expression(values)`` gives its value.

    ``names`` are the names it may use (None: any). With ``tags``, other names are allowed as well, for tags that are
    not declared, but not likely typos of known names.

    Raises ExpressionError, with the column and what is allowed, when constructed; EvaluationError when called.
    """

    __slots__ = ("_known", "_node", "_tree", "_truth", "names", "text")

    def __init__(self, text: str, names: Iterable[str] | None = None, *, tags: bool = False) -> None:
        if not isinstance(text, str):
            raise ExpressionError(f"an expression must be a string, not a {type(text).__name__}")
        self.text = text.replace("\r", " ").replace("\n", " ").strip()
        self._known: dict[str, Any] = {}
        self._truth = False  # whether only the truth of the value is kept
        self._tree = parse(self.text)
        compiler = Compiler(self.text, None if names is None else tuple(names), tags, self._known)
        self._node = compiler.node(self._tree, 0, truth=False)
        self.names = frozenset(compiler.used)
        """The names it uses."""

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """The value; names that ``values`` lacks are None. Raises EvaluationError and nothing else."""
        try:
            return self._node(values)
        except Exception as error:  # noqa: BLE001 - one type that the caller counts
            raise EvaluationError(f"{short(self.text)}: {type(error).__name__}: {error}") from None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and other.__reduce__() == self.__reduce__()

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.text, self._known, self._truth)

    @property
    def is_constant(self) -> bool:
        """Whether the result is already known: ``expression({})`` gives it."""
        return isinstance(self._node, Constant)

    @property
    def is_condition(self) -> bool:
        """Whether it is a condition: a comparison of names, not a calculation that happens to be truthy."""
        return bool(self.names) and is_condition(self._tree)

    def bound(self, values: Mapping[str, Any]) -> "Expression":
        """The condition with ``values`` substituted (partial evaluation), often constant."""
        other = object.__new__(Expression)
        other.text, other._tree, other._truth = self.text, self._tree, True
        other._known = self._known | {name: values[name] for name in self.names if name in values}
        compiler = Compiler(self.text, None, True, other._known)
        other._node = compiler.node(self._tree, 0, truth=True)
        other.names = frozenset(compiler.used - other._known.keys())
        return other


def _restored(text: str, known: dict[str, Any], truth: bool) -> Expression:
    expression = Expression(text, tags=True)
    return expression.bound(known) if truth else expression
