"""SiteDecision: the capture decision for one site, reduced to the conditions that depend on the firing."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tapscope.dumper.rules.int_ranges import Ranges
from tapscope.dumper.rules.rule import KEEPS, Keep, Rule, condition
from tapscope.dumper.selection.expression_usage import ExpressionUsage
from tapscope.dumper.selection.rule_context import RuleContext
from tapscope.dumper.selection.site_triggers import SiteTriggers
from tapscope.expr.expression import Expression

Test = Callable[["RuleContext"], Any]


class CaptureSpec(NamedTuple):
    """Capture level, rows and size cap for one value."""

    keep: Keep
    rows: slice | None = None
    """Slice of the token rows to keep; None for all."""
    requests: frozenset[str] | None = None
    """Requests whose rows are kept; None for all. Some of them may not be in the step."""
    cap: int | None = None
    """Size in bytes above which only the statistics of a value are kept."""


OFF = CaptureSpec("off")
_VALUE_NAMES = frozenset({"dtype", "shape", "ndim", "numel", "nbytes"})


class RuleCase(NamedTuple):
    """A rule that matches the site, with its conditions that depend on the firing."""

    tests: tuple[Test, ...]
    spec: CaptureSpec
    needs_value: bool = False
    """Whether a condition reads the dtype, shape or size of the value."""


class SiteDecision:
    """The capture decision for one site: static, or depending on each firing."""

    __slots__ = ("_cases", "_default", "_filter", "needs_value", "num_problems", "problem", "static", "triggers")

    def __init__(
        self,
        cases: Sequence[RuleCase] = (),
        default: CaptureSpec = OFF,
        filters: Sequence[Expression] = (),
        usage: ExpressionUsage | None = None,
    ) -> None:
        """The first case whose tests hold applies, otherwise ``default``; a value that fails a filter is off.

        ``usage`` records the results of the filters.
        """
        usage = usage or ExpressionUsage()
        kept = list(cases)
        while kept and kept[-1].spec == default:
            kept.pop()
        self._cases = tuple(kept)
        self._default = default
        self._filter = tuple(usage.recording(each.text, _value_of(each)) for each in filters)
        self.needs_value = any(case.needs_value for case in kept) or any(each.names & _VALUE_NAMES for each in filters)
        """Whether a condition reads properties of the value (dtype, shape, size)."""
        self.problem: str | None = None
        """Error of the first condition that failed to evaluate; such a condition counts as false."""
        self.num_problems = 0
        self.triggers: SiteTriggers | None = None
        """The triggers of the site; None if there are none."""
        self.static: CaptureSpec | None = None
        """The spec for every firing; None if it depends on the firing."""
        if not kept and (not self._filter or default.keep == "off"):
            self.static = default

    @property
    def most(self) -> Keep:
        """The highest capture level possible; ``full`` also if row slicing or a trigger needs the bytes."""
        specs = (self._default, *(case.spec for case in self._cases))
        if self.triggers is not None or any(each.keep == "full" or each.rows or each.requests for each in specs):
            return "full"
        return max((each.keep for each in specs), key=KEEPS.index)

    @property
    def may_keep(self) -> bool:
        """Whether any value of the site can be kept, by a rule or a trigger."""
        keeps = (self._default.keep, *(case.spec.keep for case in self._cases))
        return self.triggers is not None or any(keep != "off" for keep in keeps)

    def decide(self, context: RuleContext) -> CaptureSpec:
        """Return the spec for the firing described by ``context``; never raises."""
        spec = self.static
        if spec is not None:
            return spec
        spec = self._default
        for case in self._cases:
            if self._holds(case.tests, context):
                spec = case.spec
                break
        if spec.keep == "off" or self._holds(self._filter, context):
            return spec
        return OFF

    def _holds(self, tests: tuple[Test, ...], context: RuleContext) -> bool:
        try:
            for test in tests:
                if not test(context):
                    return False
        except Exception as error:  # noqa: BLE001 - the model must go on
            self.num_problems += 1
            if self.problem is None:
                self.problem = str(error) or type(error).__name__
            return False
        return True


def needs_value(rule: Rule) -> bool:
    """Return whether conditions of ``rule`` read the dtype, shape or size of the value."""
    asked = bool(rule.dtypes) or rule.min_bytes is not None or rule.max_bytes is not None
    return asked or (rule.when is not None and bool(condition(rule.when).names & _VALUE_NAMES))


def spec_of(rule: Rule) -> CaptureSpec:
    """Return the capture spec of ``rule``."""
    rows = None if rule.rows is None else slice(*rule.rows)
    return CaptureSpec(rule.keep, rows, frozenset(rule.requests) or None, rule.cap)


def tests_of(rule: Rule, known: Mapping[str, Any], usage: ExpressionUsage) -> tuple[Test, ...] | None:
    """Return the conditions of ``rule`` that depend on the firing; None if ``when`` is false given ``known``."""
    tests = _tests(rule)
    if rule.when is not None:
        when = condition(rule.when).bound(known)
        if not when.is_constant:
            tests.append(usage.recording(when.text, _value_of(when)))
        else:
            usage.record(when.text, bool(when({})))
            if not when({}):
                return None
    return tuple(tests)


def _tests(rule: Rule) -> list[Test]:
    tests: list[Test] = []
    if rule.steps is not None:
        tests.append(_step_test(rule.steps))
    if (every := rule.every) is not None:
        tests.append(lambda context: context.step % every == 0)
    if (first := rule.first) is not None:
        tests.append(lambda context: context.age < first)
    if phases := frozenset(rule.phases):
        tests.append(lambda context: context.phase in phases)
    if passes := frozenset(rule.passes):
        tests.append(lambda context: context.pass_ in passes)
    if dtypes := frozenset(rule.dtypes):
        tests.append(lambda context: context.dtype in dtypes)
    if (low := rule.min_bytes) is not None:
        tests.append(lambda context: context.nbytes >= low)
    if (high := rule.max_bytes) is not None:
        tests.append(lambda context: context.nbytes <= high)
    if requests := frozenset(rule.requests):
        tests.append(lambda context: not requests.isdisjoint(context.requests))
    tests.extend(_tag_test(name, values) for name, values in rule.tags)
    return tests


def _step_test(steps: Ranges) -> Test:
    if len(steps.spans) > 1:
        return lambda context: context.step in steps
    ((first, last),) = steps.spans
    return lambda context: first <= context.step <= last


def _tag_test(name: str, values: tuple[Any, ...]) -> Test:
    def test(context: RuleContext) -> bool:
        tag = context.tags.get(name)
        return (tag is None or isinstance(tag, bool | int | float | str)) and tag in values

    return test


_COMPUTED: dict[str, Test] = {
    "ndim": lambda context: len(context.shape),
    "numel": lambda context: math.prod(context.shape),
}


def _value_of(expression: Expression) -> Test:
    """Compile the expression to a function of the context that reads only the names used; absent tags are None."""
    names = sorted(expression.names)
    fields = [(name, RuleContext._fields.index(name)) for name in names if name in _CONTEXT_NAMES]
    computed = [(name, _COMPUTED[name]) for name in names if name in _COMPUTED]
    tags = [name for name in names if name not in _CONTEXT_NAMES and name not in _COMPUTED]

    def value(context: RuleContext) -> Any:
        values = {name: context[index] for name, index in fields}
        for name, compute in computed:
            values[name] = compute(context)
        for name in tags:
            values[name] = context.tags.get(name)
        return expression(values)

    return value


_CONTEXT_NAMES = frozenset(RuleContext._fields) - {"tags", "requests"}
