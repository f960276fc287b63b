"""LiveInjection: overwrite tensors of attached models with values of a stored run, as configured by rules."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace
from torch import nn

from tapscope.core.errors import ConfigError
from tapscope.core.observe import RankInfo, StepInfo
from tapscope.core.site import Glob, parse
from tapscope.dumper.device.late_rows import LateRows
from tapscope.dumper.injection import Injector, StoredTensors, module_paths
from tapscope.dumper.reference.followed_run import FollowedRun
from tapscope.dumper.reference.request_mapping import RequestMapping
from tapscope.dumper.reference.stored_tensors import rank_of
from tapscope.dumper.rules.injection_rule import InjectionRule
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.taps.collector import Collector
from tapscope.run_format.run import Run
from tapscope.sources import open_run

_log = logging.getLogger("tapscope")


class LiveInjection:
    """The injectors of one rank. No error reaches the model: a failed injection becomes an event of the run.

    Requests are matched by their tokens, as in the live comparison, because servers assign new request names.
    """

    def __init__(self, run: Run, info: RankInfo, wait_s: float = 0.0) -> None:
        """Inject values of ``run``.

        ``wait_s`` is the maximum time in seconds that a step waits for values of a run that is still being recorded.
        Raises ConfigError if the ranks of ``run`` do not correspond to this rank.
        """
        self._followed = FollowedRun(run, wait_s, self._reload)
        self._is_live = not run.closed
        self._missed: dict[InjectionRule, str] = {}
        """Rule -> message on rows of the open step that the other system did not record in time."""
        self._stored = StoredTensors(run, rank_of(run, info, "inject_from"))
        self._requests = RequestMapping.of(run)
        self._placed: list[tuple[InjectionRule, Injector]] = []
        self._step: Callable[[], OpenStep | None] = lambda: None
        self._translated: tuple[int, dict[InjectionRule, StepInfo | None]] = -1, {}
        self._used: set[InjectionRule] = set()
        self._reported: dict[tuple[InjectionRule, str], str] = {}
        self.num_injected = 0
        """Number of tensors overwritten in all steps."""

    @classmethod
    def open(cls, path: str | Path, info: RankInfo, wait_s: float = 0.0) -> "LiveInjection":
        """Open the run at ``path`` as the source of values.

        Raises the errors of :func:`open_run`, and ConfigError if the run has no values or has other ranks.
        """
        run = open_run(path)
        if not any(record.entry is not None for record in run.records):
            how = "capture it again with keep=full" if run.closed else "let it record a step with keep=full first"
            raise ConfigError(f"inject_from={path}: the run has no values{'' if run.closed else ' yet'}; {how}")
        return cls(run, info, wait_s)

    def _reload(self, run: Run) -> None:
        self._stored.reload(run)
        self._requests = RequestMapping.of(run)

    @property
    def is_active(self) -> bool:
        """Whether any injector is in place."""
        return bool(self._placed)

    def unmatched(self, rules: Sequence[InjectionRule], models: Sequence[nn.Module]) -> dict[str, str]:
        """Return rule -> reason for each rule that cannot overwrite any tensor of ``models``."""
        paths = {path for model in models for path in module_paths(model)}
        return {f"inject {r}": f"inject {r}: {self._why_not(r)}" for r in rules if not self._sites(r, paths)}

    def _why_not(self, rule: InjectionRule) -> str:
        glob = Glob(rule.stored or rule.site)
        stored = {site for site in self._stored.sites if glob.matches(site) and _is_port(site)}
        if not stored:
            return f"{self._stored.run.path} has no values of an input or output {glob.text}"
        live = {rule.site} if rule.stored else stored
        if {parse(site).path for site in live} == {""}:
            return "the model's own inputs and outputs cannot be overwritten; name those of a module inside"
        return f"{rule.site} is not an input or output of a module of this model"

    def place(self, rules: Sequence[InjectionRule], models: Sequence[nn.Module], collector: Collector) -> None:
        """Replace all injectors by those for ``rules``; report previous rules that never overwrote a tensor."""
        for _, injector in self._placed:
            injector.__exit__(None)
        for rule in dict.fromkeys(rule for rule, _ in self._placed):
            if rule not in rules:
                self._report_unused(rule, collector)
        self._placed, self._step = [], lambda: collector.step
        for rule in rules:
            for model in models:
                if sites := self._sites(rule, module_paths(model)):
                    injector = Injector(model, self._stored, sites, self._step_for(rule), self._followed.wait)
                    self._placed.append((rule, injector.__enter__()))

    def end_step(self, collector: Collector, step: OpenStep) -> None:
        """Handle the end of a step: set the injected sites in its counts, and report each failure once per site."""
        num_by_site: dict[str, int] = {}
        for rule, injector in self._placed:
            injected, injector.injected = injector.injected, {}
            problems, injector.problems = injector.problems, []
            for site, number in injected.items():
                self._used.add(rule)
                num_by_site[site] = num_by_site.get(site, 0) + number
            reasons = [(site, reason) for site, _, reason in problems]
            if (missed := self._missed.pop(rule, None)) is not None and not reasons:
                reasons = [(rule.site, missed)]
            for site, reason in reasons:
                if (rule, site) not in self._reported:  # one event per site, as every step would repeat it
                    self._reported[rule, site] = reason
                    collector.counters.report(site, f"not overwritten: {reason}", step, kind="injection")
        step.counts.injected = num_by_site
        self.num_injected += sum(num_by_site.values())

    # ---- inside

    def _sites(self, rule: InjectionRule, paths: set[str]) -> dict[str, str]:
        """Return site of the model -> site of the stored run, for the sites that ``rule`` can overwrite."""
        if rule.stored is not None:
            is_there = self._stored.has(rule.stored) and _is_port(rule.site) and parse(rule.site).path in paths - {""}
            return {rule.site: rule.stored} if is_there else {}
        glob = Glob(rule.site)
        return {
            site: site
            for site in self._stored.sites
            if glob.matches(site) and _is_port(site) and parse(site).path in paths - {""}
        }

    def _report_unused(self, rule: InjectionRule, collector: Collector) -> None:
        """Report a rule that is removed and never overwrote a tensor."""
        if rule in self._used:
            return
        reasons = [reason for (each, _), reason in self._reported.items() if each == rule]
        text = f"nothing was overwritten: {reasons[0] if reasons else 'none of its rows or modules came'}"
        _log.warning("tapscope: inject %s: %s", rule, text)
        collector.counters.report(f"inject {rule}", text, kind="injection")

    def _step_for(self, rule: InjectionRule) -> Callable[[], StepInfo | None]:
        """Return a function that describes the open step with the stored run's request names and the rule's rows.

        The function returns None if the rule selects no rows of the step.
        """

        def current() -> StepInfo | None:
            step = self._step()
            if step is None or step.skipped or (rule.steps is not None and step.info.step not in rule.steps):
                return None
            serial, known = self._translated
            if serial != step.serial:
                self._translated = step.serial, (known := {})
            if rule not in known:
                known[rule] = self._stored_rows(rule, step)
            return known[rule]

        return current

    def _stored_rows(self, rule: InjectionRule, step: OpenStep) -> StepInfo | None:
        late = step.late_rows
        if isinstance(late, LateRows):
            late.wait()  # its rows determine which values are injected where
        live = step.info if late is None else late.info if late.is_ready else late.outline
        if rule.requests:
            live = _restricted_to(live, rule.requests)
            if not live.rows:
                return None
        stored = self._requests.translate(live)
        while _num_rows(stored) < _num_rows(live) and self._followed.wait(live.step):
            stored = self._requests.translate(live)
        if self._is_live and (num_missing := _num_rows(live) - _num_rows(stored)):
            self._missed[rule] = f"{num_missing} of {_num_rows(live)} token rows were not recorded in time"
        return stored if stored.rows or not live.rows else None


def _restricted_to(info: StepInfo, requests: tuple[str, ...]) -> StepInfo:
    """Return the step restricted to the rows of ``requests``."""
    rows, ids, at = [], list[int](), 0
    for span in info.rows:
        if span.request in requests:
            rows.append(span)
            ids += info.token_ids[at : at + span.count]
        at += span.count
    return replace(info, rows=tuple(rows), token_ids=ids)


def _num_rows(info: StepInfo) -> int:
    return sum(span.count for span in info.rows)


def _is_port(site: str) -> bool:
    place = parse(site)
    return place.kind in ("in", "out") and not place.is_grad
