"""Choice: what the rules say of one site, and what only a firing can settle."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tapscope.dumper.rules.int_ranges import Ranges
from tapscope.dumper.rules.rule import Keep, Rule, condition
from tapscope.dumper.selection.expression_usage import Holding
from tapscope.expr.expression import Expression

if TYPE_CHECKING:
    from tapscope.dumper.selection.site_triggers import Sentinel

Test = Callable[["Moment"], Any]


class Taking(NamedTuple):
    """What is kept of one value."""

    keep: Keep
    rows: slice | None = None
    """Of the token rows."""
    requests: frozenset[str] | None = None
    """Only the rows of these requests; some of them may not be in the step."""
    cap: int | None = None
    """A value of more bytes is kept as statistics."""


OFF = Taking("off")
_NO_TAGS: Mapping[str, Any] = {}
_OF_VALUE = frozenset({"dtype", "shape", "ndim", "numel", "nbytes"})


class Moment(NamedTuple):
    """What a condition may ask of one firing."""

    step: int = 0
    phase: str = "forward"
    micro: int = 0
    pass_: str = "forward"
    occurrence: int = 0
    age: int = 0
    """Steps since the configuration came into force."""
    dtype: str | None = None
    """None for a value that is no tensor."""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    tags: Mapping[str, Any] = _NO_TAGS
    requests: frozenset[str] = frozenset()
    """Ids of the requests in this step."""


class Case(NamedTuple):
    """A rule that fits the site, as far as the site tells."""

    tests: tuple[Test, ...]
    taking: Taking
    needs_value: bool = False
    """Whether the value itself is asked about: its type, shape or size."""


class Choice:
    """What is kept at one site."""

    __slots__ = ("_cases", "_default", "_filter", "needs_value", "num_problems", "problem", "sentinel", "static")

    def __init__(
        self,
        cases: Sequence[Case] = (),
        default: Taking = OFF,
        filters: Sequence[Expression] = (),
        holding: Holding | None = None,
    ) -> None:
        """``cases`` in order, then ``default``; what any of ``filters`` denies is off. ``holding`` is told of them."""
        holding = holding or Holding()
        kept = list(cases)
        while kept and kept[-1].taking == default:
            kept.pop()
        self._cases = tuple(kept)
        self._default = default
        self._filter = tuple(holding.noting(each.text, _value_of(each)) for each in filters)
        self.needs_value = any(case.needs_value for case in kept) or any(each.names & _OF_VALUE for each in filters)
        """Whether the value itself must be at hand to decide."""
        self.problem: str | None = None
        """The first condition that could not be decided, which counts as one that does not hold."""
        self.num_problems = 0
        self.sentinel: Sentinel | None = None
        """The triggers of the site; None when there are none."""
        self.static: Taking | None = None
        """What is kept whatever the moment; None when the moment decides."""
        if not kept and (not self._filter or default.keep == "off"):
            self.static = default

    @property
    def may_keep(self) -> bool:
        """Whether anything can be kept here."""
        keeps = (self._default.keep, *(case.taking.keep for case in self._cases))
        return self.sentinel is not None or any(keep != "off" for keep in keeps)

    def decide(self, moment: Moment) -> Taking:
        """What is kept at this moment; never raises."""
        taking = self.static
        if taking is not None:
            return taking
        taking = self._default
        for case in self._cases:
            if self._holds(case.tests, moment):
                taking = case.taking
                break
        if taking.keep == "off" or self._holds(self._filter, moment):
            return taking
        return OFF

    def _holds(self, tests: tuple[Test, ...], moment: Moment) -> bool:
        try:
            for test in tests:
                if not test(moment):
                    return False
        except Exception as error:  # noqa: BLE001 - the model must go on
            self.num_problems += 1
            if self.problem is None:
                self.problem = str(error) or type(error).__name__
            return False
        return True


def needs_value(rule: Rule) -> bool:
    """Whether its conditions ask about the type, shape or size of the value."""
    asked = bool(rule.dtypes) or rule.min_bytes is not None or rule.max_bytes is not None
    return asked or (rule.when is not None and bool(condition(rule.when).names & _OF_VALUE))


def taking_of(rule: Rule) -> Taking:
    """What the rule keeps where it holds."""
    rows = None if rule.rows is None else slice(*rule.rows)
    return Taking(rule.keep, rows, frozenset(rule.requests) or None, rule.cap)


def tests_of(rule: Rule, known: Mapping[str, Any], holding: Holding) -> tuple[Test, ...] | None:
    """The conditions that only a firing settles; None when one of them never holds where ``known`` is so."""
    tests = _tests(rule)
    if rule.when is not None:
        when = condition(rule.when).bound(known)
        if not when.is_constant:
            tests.append(holding.noting(when.text, _value_of(when)))
        else:
            holding.note(when.text, bool(when({})))
            if not when({}):
                return None
    return tuple(tests)


def _tests(rule: Rule) -> list[Test]:
    tests: list[Test] = []
    if rule.steps is not None:
        tests.append(_step_test(rule.steps))
    if (every := rule.every) is not None:
        tests.append(lambda moment: moment.step % every == 0)
    if (first := rule.first) is not None:
        tests.append(lambda moment: moment.age < first)
    if phases := frozenset(rule.phases):
        tests.append(lambda moment: moment.phase in phases)
    if passes := frozenset(rule.passes):
        tests.append(lambda moment: moment.pass_ in passes)
    if dtypes := frozenset(rule.dtypes):
        tests.append(lambda moment: moment.dtype in dtypes)
    if (low := rule.min_bytes) is not None:
        tests.append(lambda moment: moment.nbytes >= low)
    if (high := rule.max_bytes) is not None:
        tests.append(lambda moment: moment.nbytes <= high)
    if requests := frozenset(rule.requests):
        tests.append(lambda moment: not requests.isdisjoint(moment.requests))
    tests.extend(_tag_test(name, values) for name, values in rule.tags)
    return tests


def _step_test(steps: Ranges) -> Test:
    if len(steps.spans) > 1:
        return lambda moment: moment.step in steps
    ((first, last),) = steps.spans
    return lambda moment: first <= moment.step <= last


def _tag_test(name: str, values: tuple[Any, ...]) -> Test:
    def test(moment: Moment) -> bool:
        tag = moment.tags.get(name)
        return (tag is None or isinstance(tag, bool | int | float | str)) and tag in values

    return test


_COMPUTED: dict[str, Test] = {
    "ndim": lambda moment: len(moment.shape),
    "numel": lambda moment: math.prod(moment.shape),
}


def _value_of(expression: Expression) -> Test:
    """The expression as a function of the moment that reads no more than it needs; absent tags are None."""
    names = sorted(expression.names)
    fields = [(name, Moment._fields.index(name)) for name in names if name in _MOMENT_FIELDS]
    computed = [(name, _COMPUTED[name]) for name in names if name in _COMPUTED]
    tags = [name for name in names if name not in _MOMENT_FIELDS and name not in _COMPUTED]

    def value(moment: Moment) -> Any:
        values = {name: moment[index] for name, index in fields}
        for name, compute in computed:
            values[name] = compute(moment)
        for name in tags:
            values[name] = moment.tags.get(name)
        return expression(values)

    return value


_MOMENT_FIELDS = frozenset(Moment._fields) - {"tags", "requests"}
