"""Selection: the rules of one configuration, applied to sites. The static part of a decision is cached per site.

Expensive kinds of port are kept only if a rule names them: a gradient needs its own hook in the backward pass, and
parameters and buffers are as large as the model. ``*=full`` therefore covers inputs, outputs and explicit values only.

- A rule reaches a gradient if its glob ends in ``.grad`` or it has ``port=grad`` (or ``out.grad``, ...).
- A rule reaches a parameter or buffer if the port of its glob begins with ``param`` or ``buffer``, or if it has
  ``port=param`` or ``port=buffer``.
- The settings ``grads``, ``params`` and ``buffers`` turn these kinds into ordinary sites; gradients of parameters need
  both ``grads`` and ``params``.
- Small buffers that accompany a weight matrix (:func:`~tapscope.dumper.taps.taps.vectors`) are always ordinary.
- A rule with the level ``off`` covers everything that its glob matches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tapscope.dumper.config import DumperConfig
from tapscope.dumper.rules.rule import Keep, Rule, condition
from tapscope.dumper.rules.trigger import Trigger
from tapscope.dumper.selection.expression_usage import ExpressionUsage
from tapscope.dumper.selection.request_capture import RequestDecision
from tapscope.dumper.selection.rule_context import RuleContext
from tapscope.dumper.selection.site_decision import (
    OFF,
    CaptureSpec,
    RuleCase,
    SiteDecision,
    needs_value,
    spec_of,
    tests_of,
)
from tapscope.dumper.selection.site_match import CompiledRule, SiteParts
from tapscope.dumper.selection.site_triggers import SiteTriggers

__all__ = ["OFF", "CaptureSpec", "Keep", "Rule", "RuleContext", "Selection", "SiteDecision"]

_AXES = ("tp", "pp", "dp", "cp", "ep")


class Selection:
    """Capture decisions of one rank under one configuration."""

    def __init__(
        self,
        config: DumperConfig,
        *,
        rank: int = 0,
        coords: Mapping[str, int] | None = None,
        model: str = "",
        requests: Mapping[str, Keep] | None = None,
        usage: ExpressionUsage | None = None,
    ) -> None:
        """Compile the rules of ``config`` for a rank at mesh coordinates ``coords`` (a missing axis has coordinate 0).

        ``model`` is the model's name if there are several. ``requests`` maps request ids to the capture levels that
        they ask for. ``usage`` records the results of expressions.
        """
        self.config = config
        self._place: dict[str, Any] = {"rank": rank, "coords": coords, "requests": requests, "usage": usage}
        self._by_model: dict[str, Selection] = {model: self}
        self._usage = usage or ExpressionUsage()
        self._requests = requests or {}
        self._rules = [CompiledRule.of(rule) for rule in config.rules]
        self._filters = [condition(config.filter)] if config.filter is not None else []
        here = {axis: (coords or {}).get(axis, 0) for axis in _AXES}
        self._known: dict[str, Any] = {"rank": rank, "model": model, **here}
        self._rank_rules = [each for each in self._rules if _applies_to_rank(each.rule, self._known)]
        self.heads: frozenset[str] = frozenset()
        """Paths of the LM heads, whose outputs are captured in the mode ``core``, too."""
        self.vectors: frozenset[str] = frozenset()
        """Sites of buffers that are always ordinary."""
        # A trigger reaches the same sites as a rule with its glob.
        self._triggers = [(CompiledRule.of(Rule(each.site, "stats")), each) for each in config.triggers]
        self._decisions: dict[str, SiteDecision] = {}
        self._shared: dict[tuple[Any, ...], SiteDecision] = {}
        """Decisions shared by all sites that match the same rules, where no filter, trigger or ``when`` applies."""
        self._kinds: dict[str, bool] = {}

    def of_model(self, name: str) -> "Selection":
        """Return the selection of the same configuration for the model called ``name``."""
        if name not in self._by_model:
            self._by_model[name] = Selection(self.config, model=name, **self._place)
        return self._by_model[name]

    @classmethod
    def empty(cls) -> "Selection":
        """Return a selection that keeps no value."""
        return cls(DumperConfig(enabled=False))

    def decision(self, site: str, name: str | None = None) -> SiteDecision:
        """Return the decision for ``site``; ``name`` is the name of the explicit value, if the site belongs to one."""
        decision = self._decisions.get(site)
        if decision is None:
            place = SiteParts.of(site, name)
            decision = self._decide(place)
            decision.triggers = self._triggers_of(place)
            if self._requests and self._is_ordinary(place.kind):
                decision = RequestDecision(decision, self._requests)
            self._decisions[site] = decision
        return decision

    def keep(self, site: str) -> Keep:
        """Return the capture level of ``site``, or ``full`` if the level depends on the firing."""
        spec = self.decision(site).static
        return "full" if spec is None else spec.keep

    def may_keep(self, path: str, kind: str, ports: Iterable[str], *, unnamed: bool) -> bool:
        """Return whether any port of ``kind`` (``in``, ``out.grad``, ``param``, ...) of a module may be kept.

        ``ports`` are the ports known before any firing; with ``unnamed``, firings may reveal others.
        """
        if self._requests and self._is_ordinary(kind):
            return True
        if not (self.may_keep_kind(kind) and self._is_enabled(path, kind)):
            return False
        if any(self.decision(f"{path}:{port}").may_keep for port in ports):
            return True
        if unnamed and self._is_ordinary(kind) and self.config.keep != "off":
            return True
        # A rule may name a port that only a firing reveals (out[0], an item of **kwargs): hook if the path matches.
        return any(
            each.rule.keep != "off" and self._reaches(each, kind) and each.may_match_unseen(path, kind, unnamed=unnamed)
            for each in (*self._rank_rules, *(rule for rule, _ in self._triggers))
        )

    def may_keep_kind(self, kind: str) -> bool:
        """Return whether any port of ``kind`` in any module may be kept; most kinds can be excluded globally."""
        may_keep = self._kinds.get(kind)
        if may_keep is None:
            named = any(each.rule.keep != "off" and self._reaches(each, kind) for each in self._rank_rules)
            watched = any(self._reaches(each, kind) for each, _ in self._triggers)
            may_keep = bool(self._requests) or self._is_ordinary(kind) or named or watched
            self._kinds[kind] = may_keep = may_keep or (kind == "buffer" and bool(self.vectors))
        return may_keep

    def unmatched(
        self, ports: Mapping[str, Iterable[str]], open_paths: Iterable[str] = (), *, taps: bool = False
    ) -> list[Rule | Trigger]:
        """Return the rules and triggers that cannot match any site of this rank's model, for any rank or firing.

        ``ports`` maps each module path to its known ports; modules at ``open_paths`` take unnamed arguments. With
        ``taps``, explicit values may have any name. A job rejects a rule only if it is unmatched on every rank.
        """
        opened = set(open_paths)

        def may_match(each: CompiledRule) -> bool:
            if any(each.matches(place) for place in _site_parts(ports)):
                return True
            kinds = ("in", "out", "in.grad", "out.grad", *(("tap", "tap.grad") if taps else ()))
            return any(
                each.may_match_unseen(path, kind, unnamed=path in opened or kind.startswith("tap"))
                for path in ports
                for kind in kinds
            )

        rules = [each.rule for each in self._rules if not may_match(each)]
        return [*rules, *(trigger for each, trigger in self._triggers if not may_match(each))]

    def _decide(self, place: SiteParts) -> SiteDecision:
        if not self._is_enabled(place.path, place.kind):
            return SiteDecision()
        is_ordinary = self._is_ordinary(place.kind, place.site)
        matched = []
        for each in self._rank_rules:
            if self._reaches(each, place.kind, place.site) and each.matches(place):
                matched.append(each)
                if each.is_plain:
                    break
        if self._filters or self._triggers or any(each.rule.when is not None for each in matched):
            return self._decision_of(matched, is_ordinary, self._known | place.names())
        key = (is_ordinary, *map(id, matched))
        decision = self._shared.get(key)
        if decision is None:
            decision = self._shared[key] = self._decision_of(matched, is_ordinary, {})
        return decision

    def _decision_of(
        self, matched: Sequence[CompiledRule], is_ordinary: bool, known: Mapping[str, Any]
    ) -> SiteDecision:
        """Build the decision from the rules that match a site, with conditions evaluated as far as ``known`` allows."""
        filters = [each.bound(known) for each in self._filters]
        settled = [each for each in filters if each.is_constant]
        for expression in settled:
            self._usage.record(expression.text, bool(expression({})))
        if not all(expression({}) for expression in settled):
            return SiteDecision()
        default = CaptureSpec(self.config.keep) if is_ordinary else OFF
        cases: list[RuleCase] = []
        for each in matched:
            tests = tests_of(each.rule, known, self._usage)
            if tests == ():
                default = spec_of(each.rule)
                break
            if tests is not None:
                cases.append(RuleCase(tests, spec_of(each.rule), needs_value(each.rule)))
        return SiteDecision(cases, default, [each for each in filters if not each.is_constant], self._usage)

    def _triggers_of(self, place: SiteParts) -> SiteTriggers | None:
        if not self._triggers or not self._is_enabled(place.path, place.kind):
            return None
        watched = [(each, trigger) for each, trigger in self._triggers if self._reaches(each, place.kind)]
        triggers = [trigger for each, trigger in watched if each.matches(place)]
        return SiteTriggers(triggers, self._known | place.names()) if triggers else None

    def _is_enabled(self, path: str, kind: str) -> bool:
        """Return whether ``enabled`` and ``mode`` admit the site; ``mode`` does not restrict explicit values."""
        if not self.config.enabled or self.config.mode == "off":
            return self.config.enabled and kind.startswith("tap")
        if self.config.mode == "all" or kind.startswith("tap"):
            return True
        return path == "" or (path in self.heads and kind.startswith("out"))

    def _is_ordinary(self, kind: str, site: str = "") -> bool:
        """Return whether unrestricted rules reach this kind of port, or this particular site."""
        if site in self.vectors:
            return True
        base, _, grad = kind.partition(".")
        config = self.config
        switches = {"param": config.params, "buffer": config.buffers}
        return switches.get(base, True) and (config.grads or not grad)

    def _reaches(self, each: CompiledRule, kind: str, site: str = "") -> bool:
        return each.rule.keep == "off" or self._is_ordinary(kind, site) or each.names_kind(kind)


def _site_parts(ports: Mapping[str, Iterable[str]]) -> Iterator[SiteParts]:
    """Yield the parts of every port and its gradient; lazy because most rules match one of the first ports."""
    for path, known in ports.items():
        for port in known:
            place = SiteParts.of(f"{path}:{port}")
            yield place
            if place.has_grad:
                yield SiteParts.of(f"{place.site}.grad")


def _applies_to_rank(rule: Rule, known: Mapping[str, Any]) -> bool:
    """Return whether the rule applies to this rank, by its rank and mesh coordinates in ``known``."""
    wanted: Sequence[tuple[str, Any]] = [("rank", rule.ranks), *((axis, getattr(rule, axis)) for axis in _AXES)]
    return all(numbers is None or known[name] in numbers for name, numbers in wanted)
