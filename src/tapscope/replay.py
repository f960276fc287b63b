"""Replay: run the target's modules on the inputs recorded in the baseline, to separate a module's own error from
inherited error."""

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from tapscope.comparator import CompareOptions, Report, compare_open_runs
from tapscope.comparator.options.map_file import MapFile
from tapscope.comparator.verdict.finding import Finding
from tapscope.core import dtypes
from tapscope.core.errors import DataError
from tapscope.core.site import Glob, layer_of, module_of, port_of, split_call
from tapscope.run_format.run import Run
from tapscope.sources import open_run

if TYPE_CHECKING:
    from torch import nn

    from tapscope.dumper import Dumper
    from tapscope.dumper.injection import Problem, StoredTensors

__all__ = ["ModuleReplay", "ReplayReport", "replay"]


class ModuleReplay(Struct, frozen=True, kw_only=True):
    """Result for one module of the target, run on the baseline's inputs."""

    module: str
    verdict: str
    """``local``: the outputs differ even on the baseline's inputs. ``contains``: the same, and a submodule is local.
    ``inherited``: the outputs differ only on the target's own inputs. ``agrees``. ``not_replayed``.
    """
    error: float = 0.0
    """Error of the worst output in the comparison of the two runs."""
    ratio: float = 0.0
    """:attr:`error` divided by the noise floor."""
    local_error: float = 0.0
    """Error of the worst output on the baseline's inputs."""
    local_ratio: float = 0.0
    reason: str = ""
    """Why the module was not replayed; otherwise empty."""


class ReplayReport(Struct, frozen=True, kw_only=True):
    """Result of :func:`replay`, with modules in execution order."""

    modules: tuple[ModuleReplay, ...]
    report: Report
    """Comparison of the two runs."""

    def of(self, verdict: str) -> tuple[ModuleReplay, ...]:
        """Return the modules with this verdict."""
        return tuple(one for one in self.modules if one.verdict == verdict)

    @property
    def exit_code(self) -> int:
        """1 if a module has a local error or the runs differ, otherwise 0."""
        return int(bool(self.of("local")) or bool(self.report.num_bad))


def replay(
    baseline: Run,
    target: Run,
    model: "nn.Module",
    forward: "Callable[[Dumper], object]",
    options: CompareOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ReplayReport:
    """Run the modules of ``model``, which computed ``target``, on the inputs recorded in ``baseline``.

    ::

        def forward(dumper):
            with torch.no_grad(), dumper.step():
                model(ids)

        with open_run("reference") as baseline, open_run("target") as target:
            report = replay(baseline, target, model, forward)
        print([each.module for each in report.of("local")])

    ``forward(dumper)`` computes the tokens of the runs, with a dumper step around each model call. It is called once
    per depth of the module tree, because the inputs of nested modules cannot be replaced in the same pass. Recorded
    inputs are matched by site, request and position. ``progress`` is called with (passes done, all passes).

    Raises DataError if the baseline has no input values, ConfigError for a baseline with several ranks, and the errors
    of :func:`tapscope.comparator.compare_open_runs`.
    """
    from tapscope.dumper.injection import StoredTensors, module_paths

    options = options or CompareOptions()
    values = StoredTensors(baseline)
    comparison = compare_open_runs(baseline, target, options)
    full = comparison.report
    outputs = _outputs(full.findings)
    modules = _selected(list(filter(None, outputs)), options)  # the inputs of the root are the tokens
    inputs, reasons = _inputs(full.findings, target, modules)
    if not any(values.has(stored) for sites in inputs.values() for stored in sites.values()):
        raise DataError(
            f"{baseline.path} has no values of module inputs; capture it again with --keep full, without skipping in[*]"
        )
    for module, sites in inputs.items():
        lacking = next((stored for stored in sites.values() if not values.has(stored)), None)
        if lacking is not None:
            reasons.setdefault(module, f"{baseline.name} has no values of {lacking}")
    present = module_paths(model)
    for module in modules:
        if module not in present:
            reasons[module] = "the model has no module of this name"
    if not present.intersection(modules):
        raise DataError(f"the model has none of the modules of {target.path}; give the checkpoint that computed it")
    levels: dict[int, list[str]] = {}
    for module in modules:
        if module not in reasons:
            levels.setdefault(module.count(".") + bool(module), []).append(module)
    by_module: dict[str, list[Finding]] = {}
    for done, (_, level) in enumerate(sorted(levels.items())):
        local, problems = _run_level(baseline, model, forward, values, {m: inputs.get(m, {}) for m in level}, options)
        by_module |= {module: local.get(module, []) for module in level}
        for problem in problems:
            if "mask" not in problem.site:
                reasons.setdefault(module_of(problem.site), f"{problem.site}: {problem.reason}")
        if progress is not None:
            progress(done + 1, len(levels))
    return ReplayReport(modules=tuple(_judged(modules, outputs, by_module, reasons)), report=full)


def _outputs(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Return module of the target -> findings on its outputs that were compared, in execution order."""
    by_module: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.target is not None and finding.baseline is not None:
            port = port_of(split_call(finding.target.site)[0])
            if port.startswith("out") and not port.endswith(".grad"):
                by_module.setdefault(_module(finding.target.site), []).append(finding)
    return by_module


def _module(site: str) -> str:
    return module_of(split_call(site)[0])


def _selected(modules: list[str], options: CompareOptions) -> list[str]:
    wanted, unwanted = list(map(Glob, options.sites)), list(map(Glob, options.skip))
    return [
        module
        for module in modules
        if (not wanted or any(glob.matches(f"{module}:out") for glob in wanted))
        and not any(glob.matches(f"{module}:out") for glob in unwanted)
        and (options.layers is None or layer_of(module) in options.layers)
    ]


def _inputs(
    findings: Iterable[Finding], target: Run, modules: Iterable[str]
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return module -> (floating-point input -> baseline site), and module -> reason why it cannot be replayed."""
    partner: dict[str, str] = {}
    for f in findings:
        if f.target is not None and f.baseline is not None and not (f.target.parts or f.baseline.parts):
            partner[split_call(f.target.site)[0]] = split_call(f.baseline.site)[0]
    wanted, inputs, reasons = set(modules), dict[str, dict[str, str]](), dict[str, str]()
    sites = {r.key.site: r.dtype for r in target.records if ":in[" in r.key.site}
    for site, dtype in sites.items():
        module = _module(site)
        if module not in wanted or site.endswith(".grad") or dtype is None or not dtypes.is_float(dtype):
            continue
        if site in partner:
            inputs.setdefault(module, {})[site] = partner[site]
        elif "mask" not in site:
            reasons.setdefault(module, f"the baseline has no site for {site}")
    return inputs, reasons


def _run_level(
    baseline: Run,
    model: "nn.Module",
    forward: "Callable[[Dumper], object]",
    values: "StoredTensors",
    level: Mapping[str, Mapping[str, str]],
    options: CompareOptions,
) -> "tuple[dict[str, list[Finding]], list[Problem]]":
    """Run the model with the inputs of one level of modules replaced.

    Returns module -> findings on its outputs, and the inputs that could not be injected.
    """
    from tapscope.dumper import Dumper
    from tapscope.dumper.injection import Injector

    sites = {site: stored for inputs in level.values() for site, stored in inputs.items()}
    rules = [] if options.mapping != MapFile() else [f"{module}=full" for module in level]
    with tempfile.TemporaryDirectory(prefix="tapscope-replay-") as folder:
        out = Path(folder) / "replay"
        keep = "off" if rules else "full"
        dumper = Dumper(model, out, keep=keep, rules=rules)
        with dumper, Injector(model, values, sites, lambda: dumper.current_step) as injector:
            forward(dumper)
        alone = structs.replace(options, sites=(), skip=(), layers=None, allow_missing=("*",), allow_partial=True)
        with open_run(out) as run:
            report = compare_open_runs(baseline, run, alone).report
    return _outputs(report.findings), injector.problems


def _judged(
    modules: Iterable[str],
    outputs: Mapping[str, list[Finding]],
    replayed: Mapping[str, list[Finding]],
    reasons: Mapping[str, str],
) -> Iterable[ModuleReplay]:
    own = {module for module in modules if module not in reasons and any(f.verdict.is_bad for f in replayed[module])}
    for module in modules:
        whole = max(outputs[module], key=_badness)
        error, ratio = whole.error, whole.ratio
        if module in reasons or not replayed[module]:
            reason = reasons.get(module, "it was not called, or its outputs could not be compared")
            yield ModuleReplay(module=module, verdict="not_replayed", error=error, ratio=ratio, reason=reason)
            continue
        local = max(replayed[module], key=_badness)
        if module in own:
            verdict = "contains" if any(other.startswith(f"{module}.") for other in own) else "local"
        else:
            verdict = "inherited" if whole.verdict.is_bad else "agrees"
        yield ModuleReplay(
            module=module,
            verdict=verdict,
            error=error,
            ratio=ratio,
            local_error=local.error,
            local_ratio=local.ratio,
        )


def _badness(finding: Finding) -> tuple[bool, float, float]:
    return finding.verdict.is_bad, finding.ratio, finding.error
