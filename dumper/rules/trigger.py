"""Trigger: a condition on the statistics of a site, and an action to take when the condition holds.

As text, ``GLOB: CONDITION -> ACTION``::

    layers.*:out: nan -> keep
    *: absmax > 1e4 -> stop
    lm_head:out: inf or nan -> run 'notify.sh {site} {step}'

A count (``nan``, ``inf``, ...) is true if it is greater than 0. ``min max absmax mean rms std sum`` cover the finite
values only; if there are none, these statistics are None, which compares as neither less nor greater than any number.
"""

import json
import re
import shlex
import string
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tapscope.core.errors import ExpressionError, RuleError, SiteError
from tapscope.core.site import Glob
from tapscope.dumper.rules.rule import MOMENT_NAMES, SITE_NAMES
from tapscope.dumper.rules.rule_options import JSON_TEXT, MAX_TEXT, glob_text, short, split_outside_quotes, unquoted
from tapscope.expr.expression import Expression
from tapscope.run_format.record import Stats

Action = Literal["keep", "stop", "run"]
ACTIONS: tuple[str, ...] = typing.get_args(Action)
PLACEHOLDERS = ("site", "step", "rank", "run", "condition")
"""Names that a command can use as placeholders in braces, such as ``{site}``."""

_COUNTS: dict[str, Callable[[Stats], Any]] = {
    name: (lambda stats, name=name: getattr(stats, name))  # type: ignore[misc]
    for name in ("count", "nan", "posinf", "neginf", "nonfinite", "zeros", "subnormals")
}
_VALUES: dict[str, Callable[[Stats], Any]] = {
    name: (lambda stats, name=name: getattr(stats, name) if stats.finite else None)  # type: ignore[misc]
    for name in ("min", "max", "absmax", "mean", "rms", "std", "sum")
}
STATISTICS: dict[str, Callable[[Stats], Any]] = {
    **_COUNTS,
    **_VALUES,
    "inf": lambda stats: stats.posinf + stats.neginf,
}
"""Name -> statistic that a condition may use, in addition to the names of a rule's expression."""

_HEAD = re.compile(rf'\s*(?P<glob>{JSON_TEXT}|[^\s"].*?)\s*:\s+', re.DOTALL)
_ACTION = re.compile(r"\s*(?P<action>\w+)(?:\s+(?P<command>.*\S))?\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Trigger:
    """One trigger; ``str(trigger)`` parses to an equal trigger. Raises RuleError that names the valid values."""

    site: str
    """Glob of the sites to watch."""
    condition: str
    action: Action
    command: str | None = None
    """Command of the action ``run``: split like a shell command, but run without a shell; see :meth:`argv`."""
    _glob: Glob = field(init=False, repr=False, compare=False)
    _expression: Expression = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            if self.action not in ACTIONS:
                raise ValueError(f"the action must be one of {', '.join(ACTIONS)}")
            if (self.action == "run") != bool(self.command):
                raise ValueError("only run takes a command; write e.g. -> run 'notify.sh {site}'")
            self._check_command()
            object.__setattr__(self, "_glob", Glob(self.site))
            names = (*STATISTICS, *SITE_NAMES, *MOMENT_NAMES)
            object.__setattr__(self, "_expression", Expression(self.condition, names))
            object.__setattr__(self, "condition", self._expression.text)
        except (SiteError, ExpressionError, ValueError) as error:
            text = f"{self.site}: {self.condition} -> {self.action}"
            raise RuleError(f"trigger {short(text)}: {error}") from None

    def __str__(self) -> str:
        command = f" {json.dumps(self.command)}" if self.command is not None else ""
        return f"{glob_text(self.site)}: {self.condition} -> {self.action}{command}"

    @property
    def glob(self) -> str:
        """Alias of :attr:`site`, named as in :class:`~tapscope.dumper.rules.rule.Rule`."""
        return self.site

    @property
    def names(self) -> frozenset[str]:
        """Names used by the condition."""
        return frozenset(self._expression.names)

    def matches(self, site: str) -> bool:
        """Return whether the trigger applies to ``site``."""
        return self._glob.matches(site)

    def fires(self, stats: Stats, values: Mapping[str, Any]) -> bool:
        """Return whether the condition holds for ``stats`` and ``values``; raises EvaluationError.

        ``values`` maps the names that the site and the firing determine to their values.
        """
        known = {}
        for name in self._expression.names:
            compute = STATISTICS.get(name)
            known[name] = values.get(name) if compute is None else compute(stats)
        return bool(self._expression(known))

    def argv(self, values: Mapping[str, Any]) -> list[str]:
        """Return the words of the command, with placeholders replaced by ``values`` after splitting."""
        return [
            re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], "")), word)
            for word in shlex.split(self.command or "")
        ]

    def _check_command(self) -> None:
        words = shlex.split(self.command or "")  # ValueError for unbalanced quotes
        asked = {name for word in words for _, name, _, _ in string.Formatter().parse(word) if name is not None}
        if wrong := sorted(asked - set(PLACEHOLDERS)):
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ValueError(f"{{{wrong[0]}}} is unknown; a command may hold {known}")


def parse_trigger(value: Any) -> Trigger:
    """Parse a trigger from its text; a :class:`Trigger` is returned unchanged. Raises RuleError."""
    if isinstance(value, Trigger):
        return value
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise RuleError(f"triggers: {short(repr(value))} must be a string GLOB: CONDITION -> ACTION")
    head = _HEAD.match(value)
    parts = split_outside_quotes(value[head.end() :], "->", 1) if head else []
    action = _ACTION.fullmatch(parts[1]) if len(parts) == 2 else None
    if head is None or action is None:
        raise RuleError(f"trigger {short(value)} must be GLOB: CONDITION -> ACTION, e.g. 'layers.*:out: nan -> keep'")
    kind = typing.cast(Action, action["action"])
    return Trigger(unquoted(head["glob"]), parts[0].strip(), kind, _command(action["command"]))


def _command(text: str | None) -> str | None:
    """Strip the single or double quotes around a command, if any."""
    if text is None:
        return None
    if re.fullmatch(r"'[^']*'", text):
        return text[1:-1]
    return unquoted(text) if re.fullmatch(JSON_TEXT, text, re.DOTALL) else text
