"""Rule: a capture level for a selection of sites and firings.

As text: options separated by blanks, with ``when=`` last because it extends to the end of the text::

    GLOB=KEEP [OPTION=VALUE[,VALUE]...]... [when=EXPRESSION]

    layers.3.*:out=full steps=0-99 every=10 phase=decode rank=0 when=search("attn", name) and numel > 4096

Options that select sites
    ``layers=0-3,7``, ``port=`` (``in out tap param buffer``, ``grad`` for every gradient, or ``out.grad`` and so on),
    ``rank=0-1`` and mesh coordinates ``tp= pp= dp= cp= ep=`` (an axis that the mesh lacks has coordinate 0).
Options that select firings
    ``steps=0-99`` or ``steps=100-``, ``every=N`` (``step % N == 0``), ``first=N`` (the first N steps of this
    configuration), ``phase=``, ``pass=`` (``forward recompute backward``), ``dtype=``, ``min_bytes=`` and
    ``max_bytes=`` (of the tensor, inclusive), ``tag.NAME=``, ``request=`` (keeps only the rows of these requests;
    if none of them is in the step, the next rule applies), ``when=``.
Options that select a part of the tensor
    ``rows=A:B[:S]`` (a slice of the token rows), ``cap=1MiB`` (of a larger tensor, only statistics are kept).

A value with blanks, commas or quotes is written as a JSON string: ``tag.user="a b"``. As JSON, a rule is an object
with the same names: ``{"site": "layers.3.*:out", "keep": "full", "steps": "0-99"}``.
"""

import json
import typing
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from tapscope.core.errors import ExpressionError, RuleError, SiteError
from tapscope.core.formatting import did_you_mean
from tapscope.core.site import Glob
from tapscope.dumper.rules import rule_options
from tapscope.dumper.rules.int_ranges import Ranges
from tapscope.dumper.rules.rule_options import OPTIONS, Bare, item_text, items
from tapscope.expr.expression import Expression

Keep = Literal["off", "stats", "sketch", "full"]
KEEPS: tuple[str, ...] = typing.get_args(Keep)

SITE_NAMES = (
    "name",
    "site",
    "path",
    "port",
    "kind",
    "layer_id",
    "layer",
    "rank",
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "model",
)
"""Names in an expression that the site determines. ``site`` is ``PATH:PORT``; ``name`` is the name passed to
``dump()`` for an explicit value, and equals ``site`` for all others."""
MOMENT_NAMES = ("step", "phase", "micro", "pass_", "occurrence", "age", "dtype", "shape", "ndim", "numel", "nbytes")
"""Names in an expression that the firing determines; every other name is a tag, which must be declared."""


def undeclared(names: Iterable[str], declared: Iterable[str]) -> str | None:
    """Return an error message for the first name that is neither known nor a declared tag; None if all are."""
    known = (*SITE_NAMES, *MOMENT_NAMES)
    for name in sorted(set(names).difference(known, declared)):
        names = f"{did_you_mean(name, known)}; names are {', '.join(known)}"
        return f"unknown name {name!r}{names}; declare a tag: tags=[{name!r}]"
    return None


def condition(text: str) -> Expression:
    """Parse the expression of ``when=`` or of a filter; raises ExpressionError."""
    return Expression(text, SITE_NAMES + MOMENT_NAMES, tags=True)


@dataclass(frozen=True, slots=True, repr=False)
class Rule:
    """One capture rule; ``str(rule)`` parses to an equal rule.

    Raises RuleError that names the invalid field, its value and the valid values.
    """

    glob: str
    keep: Keep
    _: KW_ONLY
    layers: Ranges | None = None
    steps: Ranges | None = None
    every: int | None = None
    first: int | None = None
    phases: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    ranks: Ranges | None = None
    tp: Ranges | None = None
    pp: Ranges | None = None
    dp: Ranges | None = None
    cp: Ranges | None = None
    ep: Ranges | None = None
    ports: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    min_bytes: int | None = None
    max_bytes: int | None = None
    rows: tuple[int | None, int | None, int | None] | None = None
    """(start, stop, step) of a slice of the token rows."""
    cap: int | None = None
    """Maximum size in bytes of a tensor kept in full."""
    tags: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    when: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.glob, str) or self.keep not in KEEPS:
            raise RuleError(f"rule {self.glob}={self.keep}: keep must be one of {', '.join(KEEPS)}")
        try:
            Glob(self.glob)
            rule_options.check(self)
            if self.when is not None:
                object.__setattr__(self, "when", condition(self.when).text)
        except (SiteError, ExpressionError, ValueError) as error:
            raise RuleError(f"rule {_shown(self)}: {error}") from None

    @property
    def is_unconditional(self) -> bool:
        """Whether the rule has no conditions on the firing."""
        numbers = (self.steps, self.every, self.first, self.min_bytes, self.max_bytes, self.when)
        strings = (self.phases, self.passes, self.dtypes, self.requests, self.tags)
        return all(each is None for each in numbers) and not any(strings)

    def __repr__(self) -> str:
        return f"Rule({str(self)!r})"

    def __str__(self) -> str:
        words = [f"{rule_options.glob_text(self.glob)}={self.keep}"]
        for name, each in OPTIONS.items():
            value = getattr(self, each.field)
            if value is not None and value != ():
                words.append(f"{name}={each.write(value)}")
        words += [f"tag.{name}={','.join(map(item_text, values))}" for name, values in self.tags]
        return " ".join(words) + (f" when={self.when}" if self.when is not None else "")


def parse_rule(value: Any) -> Rule:
    """Parse a rule from its text or JSON object; a :class:`Rule` is returned unchanged. Raises RuleError."""
    if isinstance(value, Rule):
        return value
    if isinstance(value, str):
        return _from_text(value)
    if isinstance(value, Mapping):
        return _from_json(value)
    raise RuleError(f'rules: {value!r} must be a string GLOB=KEEP or an object such as {{"site": GLOB, "keep": KEEP}}')


def _from_text(text: str) -> Rule:
    head, words = rule_options.split(text)
    if head is None:
        wrong = "does not begin with GLOB=KEEP" if "=" in text else "has no '='"
        raise RuleError(f"rule {rule_options.short(text)} {wrong}; write GLOB=KEEP, e.g. 'layers.3.*:out=full'")
    fields: dict[str, Any] = {}
    for name, value in words:
        _set(fields, name, value, text)
    return Rule(head[0], typing.cast(Keep, head[1]), **fields)


def _from_json(content: Mapping[str, Any]) -> Rule:
    shown = rule_options.short(json.dumps(content, default=str))
    if not isinstance(content.get("site"), str) or not isinstance(content.get("keep"), str):
        raise RuleError(f"rule {shown}: site (a glob) and keep (one of {', '.join(KEEPS)}) must be strings")
    fields: dict[str, Any] = {}
    for name, value in content.items():
        if name not in ("site", "keep"):
            _set(fields, name, value, shown)
    return Rule(content["site"], typing.cast(Keep, content["keep"]), **fields)


def _set(fields: dict[str, Any], name: str, value: Any, rule: str) -> None:
    """Parse the option ``name`` and store its value in ``fields``; raises RuleError that quotes ``rule``."""
    where = (
        f"rule {rule_options.short(rule)}: {name}={value if isinstance(value, str) else json.dumps(value, default=str)}"
    )
    try:
        if name == "when":
            if not isinstance(value, str):
                raise ValueError("must be a string")
            read: tuple[str, Any] = ("when", value)
        elif name.startswith("tag."):
            read = ("tags", (*fields.pop("tags", ()), (name[4:], _tag_values(value))))
        elif name in OPTIONS:
            read = (OPTIONS[name].field, OPTIONS[name].read(items(value)))
        else:
            raise ValueError(f"options are {', '.join(OPTIONS)}, tag.NAME and, last, when")
    except ValueError as error:
        raise RuleError(f"{where}: {error}") from None
    if read[0] in fields:
        raise RuleError(f"{where}: {name} is given twice")
    fields[read[0]] = read[1]


def _tag_values(value: Any) -> tuple[Any, ...]:
    """Parse tag values: numbers, true, false and null get their JSON types; a JSON string stays one value."""
    each = items(value) if isinstance(value, Bare) or not isinstance(value, str) else [value]
    return tuple(rule_options.scalar(item) for item in each)


def _shown(rule: Rule) -> str:
    try:
        return rule_options.short(str(rule))
    except (TypeError, ValueError, AttributeError):  # fields of invalid types cannot be formatted
        return rule_options.short(f"{rule.glob}={rule.keep}")
