"""Expression: a condition as a string, such as ``layer_id in (0, 1) and search("attn", name)``.

The string is parsed, checked against an allowlist of syntax and compiled to closures once, without ``eval``. Allowed
are names, numbers, strings, tuples, ``and or not``, comparisons, ``in``, ``+ - * / // %``, ``a if c else b``, ``x[0]``
and the functions ``search match fullmatch len abs min max any all str int float startswith endswith``. Attributes and
comprehensions are not allowed. The cost is linear in the length of the text: ``*`` is for numbers only, and regular
expressions are constants whose cost :mod:`tapscope.expr.safe_regex` bounds.

Unknown names are None, and None never raises: comparisons by ``< <= > >=`` and ``in`` return False, arithmetic returns
None, and no pattern matches. For example, ``step < 2`` is False if there is no step.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tapscope.core.errors import EvaluationError, ExpressionError
from tapscope.expr.compiler import Compiler, is_condition, parse, short
from tapscope.expr.functions import Constant


class Expression:
    """A compiled condition; ``expression(values)`` evaluates it.

    ``names`` are the allowed names (None: any). With ``tags``, other names are allowed as well, for undeclared tags,
    except for likely misspellings of known names.

    The constructor raises ExpressionError with the column and the allowed syntax; evaluation raises EvaluationError.
    """

    __slots__ = ("_known", "_node", "_tree", "_truth", "names", "text")

    def __init__(self, text: str, names: Iterable[str] | None = None, *, tags: bool = False) -> None:
        if not isinstance(text, str):
            raise ExpressionError(f"an expression must be a string, not a {type(text).__name__}")
        self.text = text.replace("\r", " ").replace("\n", " ").strip()
        self._known: dict[str, Any] = {}
        self._truth = False  # whether only the truth of the value is preserved
        self._tree = parse(self.text)
        compiler = Compiler(self.text, None if names is None else tuple(names), tags, self._known)
        self._node = compiler.node(self._tree, 0, truth=False)
        self.names = frozenset(compiler.used)
        """The names that the expression references."""

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Evaluate the expression; names missing in ``values`` are None. Raises only EvaluationError."""
        try:
            return self._node(values)
        except Exception as error:  # noqa: BLE001 - a single type for the caller to count
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
        """True if the result does not depend on values: ``expression({})`` returns it."""
        return isinstance(self._node, Constant)

    @property
    def is_condition(self) -> bool:
        """True for a boolean expression that references names, as opposed to a number that happens to be truthy."""
        return bool(self.names) and is_condition(self._tree)

    def bound(self, values: Mapping[str, Any]) -> "Expression":
        """Return the condition with ``values`` substituted (partial evaluation); often constant."""
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
