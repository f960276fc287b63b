"""Entry points of a comparison; the stages are the modules of :mod:`tapscope.comparator.pipeline`."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.options.overrides import assume_meshes
from tapscope.comparator.pair_analysis.place_errors import FindingPlaces, PlaceErrors
from tapscope.comparator.pair_analysis.token_view import PairReader, TokenView
from tapscope.comparator.pipeline.detect_reroutes import detect_reroutes
from tapscope.comparator.pipeline.first_steps import correct_by_first_steps
from tapscope.comparator.pipeline.judge_sites import JudgedRuns, judge_sites
from tapscope.comparator.pipeline.match_runs import match_runs
from tapscope.comparator.pipeline.measure_pairs import MeasuredRuns, Progress, measure_pairs
from tapscope.comparator.pipeline.noise_run import measure_noise_run
from tapscope.comparator.pipeline.open_runs import open_runs
from tapscope.comparator.pipeline.ray_workers import ray_connection
from tapscope.comparator.report.report import Report, header_of
from tapscope.comparator.report.token_text import with_token_text
from tapscope.comparator.runs.corrupt_records import CorruptRecords
from tapscope.comparator.verdict.coverage import Coverage, cover
from tapscope.comparator.verdict.finding import Finding
from tapscope.comparator.verdict.judge import compared_graph
from tapscope.comparator.verdict.model_mismatch import check_models
from tapscope.comparator.verdict.rules import Rule, check_rules, compile_rules
from tapscope.core.deprecation import deprecated_attributes
from tapscope.core.errors import ConfigError, NothingInCommonError
from tapscope.core.formatting import plural
from tapscope.core.gc_control import gc_paused
from tapscope.run_format.run import Run
from tapscope.sources import open_run
from tapscope.tensor_files.quantization import dequantized

if TYPE_CHECKING:
    from tapscope.comparator.metrics.detail import Detail
    from tapscope.comparator.metrics.token_logprobs import TokenLogprobs

_Corrupt = tuple[CorruptRecords, CorruptRecords]


@deprecated_attributes({"closeup": "token_view"})
class Comparison(Struct, frozen=True):
    """The report of two runs that are still open, with methods that examine single findings in more detail."""

    report: Report
    _judged: JudgedRuns
    _corrupt: _Corrupt

    @np.errstate(all="ignore")
    def rejudged(self, options: CompareOptions) -> "Comparison":
        """Judge the existing measurements by other options, with the same result as a new comparison.

        Values are read again only to count elements beyond a new tolerance that bounds do not settle, and to explain a
        new culprit. Raises ConfigError if ``options`` select or measure other values, and the errors of
        :func:`compare_open_runs`.
        """
        opened = self._judged.screened.measured.matched.opened
        if not options.measures_as(opened.options):
            raise ConfigError("these options select other values; compare the runs again with them")
        with gc_paused(), ray_connection(options.ray):
            if not any(one.reasons for one in self._corrupt):
                rules = compile_rules((*options.rules, *options.mapping.rules))
                check_rules(rules, self._judged.screened.measured.matched.matched_names)
                measured = self._judged.screened.measured.with_options(options)
                judged = _judge(measured, rules, self._corrupt)
                if not _has_corrupt_culprit(self._corrupt, judged):
                    return Comparison(_report(judged, self._corrupt), judged, self._corrupt)
            return _compare(*opened.runs, options, None)  # which excludes corrupt values

    def token_view(self, finding: Finding) -> TokenView | None:
        """Return a view of the token rows of a finding, or None if the finding has no values to show.

        Raises DataError if the values can no longer be read.
        """
        reader = self.reader(finding)
        return None if reader is None else reader.token_view()

    @np.errstate(all="ignore")
    def reader(self, finding: Finding) -> PairReader | None:
        """Return a reader of rectangular regions of a finding's values, or None if the finding has no values to show.

        Raises DataError if the values can no longer be read.
        """
        screened, analyzer = self._judged.screened, self._judged.screened.measured.analyzer
        one = screened.judged[finding.order]
        if one.basis != "values":
            return None
        rows = screened.measured.matched.opened.rows
        return PairReader(screened.preparer.prepare(one.pair), rows, analyzer.tolerance or (0.0, 0.0))

    def origins(self) -> list[int | None]:
        """Return, for each finding, the order of the earliest finding with the same bytes, or None if there is none.

        The data of a finding with an origin flowed from that earlier site unchanged.
        """
        screened = self._judged.screened
        matched, _, graph = compared_graph(screened.results, screened.measured.matched.sites)
        origins: list[int | None] = [None] * len(self.report.findings)
        for node, order in enumerate(matched):
            inputs = graph.inputs(node)
            if inputs.source == "aliased":
                origins[order] = matched[inputs.nodes[0]]
        return origins

    def place_errors(self) -> PlaceErrors:
        """Return the state that :meth:`places` needs to measure findings per rank and per token."""
        return PlaceErrors(self._judged.screened.measured.matched.opened.rows)

    @np.errstate(all="ignore")
    def places(self, errors: PlaceErrors, finding: Finding) -> FindingPlaces | None:
        """Return the ranks and tokens that a finding was compared at, or None if neither values nor hashes were
        compared.

        Values are read for bad findings only. Raises DataError if they can no longer be read.
        """
        screened = self._judged.screened
        one = screened.judged[finding.order]
        if one.basis not in ("values", "hash"):
            return None
        return errors.of(screened.preparer.prepare(one.pair), read=one.basis == "values" and finding.verdict.is_bad)

    @np.errstate(all="ignore")
    def detail(self, finding: Finding) -> "Detail | None":
        """Return ULPs, percentiles, channels and other details of a finding, or None if it has no values or all are
        equal.

        Raises DataError if the values can no longer be read.
        """
        screened = self._judged.screened
        one = screened.judged[finding.order]
        if one.extras.detail is not None or one.basis != "values" or not one.num_unequal:
            return one.extras.detail
        return screened.measured.analyzer.measure_detail(one.site, screened.preparer.prepare(one.pair))

    @property
    def requests(self) -> tuple[str, ...]:
        """Baseline names of the requests that both runs contain."""
        return self._judged.screened.measured.matched.opened.rows.requests

    def token_logprobs(self, finding: Finding, temperature: float = 1.0) -> "TokenLogprobs | None":
        """Return the log-probabilities of the tokens that follow the rows of a finding on logits.

        Returns None for any other site, and if values or token rows are missing. Raises DataError if the values can no
        longer be read.
        """
        from tapscope.comparator.metrics.detail import is_logits
        from tapscope.comparator.metrics.token_logprobs import token_logprobs

        screened = self._judged.screened
        one, opened = screened.judged[finding.order], screened.measured.matched.opened
        if one.basis not in ("values", "hash") or not is_logits(finding.site):
            return None
        ready = screened.preparer.prepare(one.pair)
        if not ready.plan.joins or any(join.pairs is None for join in ready.plan.joins):
            return None
        tokens = opened.target.tokens() | opened.baseline.tokens()
        return token_logprobs(ready, opened.rows, tokens, temperature)


def compare(
    baseline: Run | str | Path,
    target: Run | str | Path,
    options: CompareOptions | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare two runs, given as open runs or as paths.

    ::

        report = compare("reference", "served", CompareOptions(skip=("*:in[position_ids]",)))
        print(report)  # the answer in four lines
        if report.exit_code == 1 and report.divergences:
            print(report.first_divergence.module, report.first_divergence.step)

    ``progress`` is called with (sites measured, number of sites, bytes measured, total bytes). Raises the errors of
    :func:`compare_open_runs`, and for a path those of :func:`tapscope.sources.open_run`.
    """
    with ExitStack() as opened, gc_paused():
        runs = [run if isinstance(run, Run) else opened.enter_context(open_run(run)) for run in (baseline, target)]
        return compare_open_runs(runs[0], runs[1], options, progress).report


@np.errstate(all="ignore")  # arbitrary values, even of a corrupt file, are reported by verdicts, not by NumPy warnings
def compare_open_runs(
    baseline: Run, target: Run, options: CompareOptions | None = None, progress: Progress | None = None
) -> Comparison:
    """Compare two open runs and return the report together with methods for closer examination.

    Raises RuleError for a selection that matches nothing, and NothingInCommonError if the runs share no site, row or
    value. If the runs share sites but none of them can be compared, the report has exit code 3. With a Ray cluster,
    also raises the errors of :func:`.ray_connection`.
    """
    options = options or CompareOptions()
    with gc_paused(), ray_connection(options.ray):
        assume_meshes((baseline, target), options.mesh)
        return _compare(dequantized(baseline, target), dequantized(target, baseline), options, progress)


def _compare(baseline: Run, target: Run, options: CompareOptions, progress: Progress | None) -> Comparison:
    """Run all stages; while a culprit is a corrupt value, repeat them without that value."""
    corrupt = CorruptRecords(baseline), CorruptRecords(target)
    rules = compile_rules((*options.rules, *options.mapping.rules))
    while True:
        matched = match_runs(open_runs(baseline, target, options, corrupt))
        check_rules(rules, matched.matched_names)
        judged = _judge(measure_pairs(matched, progress), rules, corrupt)
        if not _has_corrupt_culprit(corrupt, judged):  # otherwise, repeat without the corrupt values
            return Comparison(_report(judged, corrupt), judged, corrupt)


def _judge(measured: MeasuredRuns, rules: tuple[Rule, ...], corrupt: _Corrupt) -> JudgedRuns:
    """Run the stages that follow the measurement, which give every site a verdict."""
    opened = measured.matched.opened

    def measure(options: CompareOptions) -> MeasuredRuns:
        return measure_pairs(match_runs(open_runs(*opened.runs, options, corrupt)))

    screened = detect_reroutes(measured)
    check_models(opened.runs, screened.judged)
    judged = judge_sites(screened, rules, measure_noise_run(*opened.runs, opened.options))
    return correct_by_first_steps(judged, rules, measure)


def _has_corrupt_culprit(corrupt: _Corrupt, judged: JudgedRuns) -> bool:
    """Return whether a culprit's values are corrupt in storage, rather than computed by a module; checks every
    culprit."""
    sites = {divergence.finding.site for divergence in judged.divergences}
    pairs = [one.pair for one in judged.screened.judged if one.site in sites]
    sides = [p.baseline for p in pairs if p.baseline], [p.target for p in pairs if p.target]
    is_corrupt = [one.recheck(series) for one, series in zip(corrupt, sides, strict=True)]  # check both sides
    return any(is_corrupt)


def _report(judged: JudgedRuns, corrupt: _Corrupt) -> Report:
    matched, results, findings = judged.screened.measured.matched, judged.screened.results, judged.findings
    opened = matched.opened
    if all(f.basis == "none" and not f.verdict.is_bad for f in findings):
        reasons = [(f.site, f.notes[0]) for f in findings if f.notes]
        reasons += [(one.site, one.exclusion_reason) for one in results if one.exclusion_reason]
        reason = "".join(f"; {site}: {why}" for site, why in reasons[:1])
        raise NothingInCommonError(
            f"no site of {opened.baseline.path} can be compared with {opened.target.path}{reason}"
        )
    notes = (*opened.notes, *matched.notes)
    coverage = cover(
        opened.runs,
        opened.rows,
        results,
        findings,
        sum(opened.num_objects),
        notes,
        options=opened.options,
        divergences=judged.divergences,
    )
    proposed = "" if matched.proposed_map is None else matched.proposed_map.yaml()
    coverage = structs.replace(coverage, removed_prefixes=matched.prefixes, proposed_map=proposed)
    coverage = _with_corrupt(coverage, corrupt)
    headers = [header_of(run, count) for run, count in zip(opened.runs, matched.num_records, strict=True)]
    report = Report(headers[0], headers[1], tuple(findings), tuple(judged.divergences), coverage, opened.options)
    return with_token_text(report, opened.runs, opened.options.tokenizer)


def _with_corrupt(coverage: Coverage, corrupt: _Corrupt) -> Coverage:
    """Add the excluded corrupt records to the coverage."""
    unchecked = sum(one.num_unchecked for one in corrupt)
    if unchecked:
        warning = f"{plural(unchecked, 'value')} could not be checked: recorded without a hash of this version"
        coverage = structs.replace(coverage, warnings=(*coverage.warnings, warning))
    sentences = tuple(sentence for one in corrupt for sentence in one.sentences())
    if not sentences:
        return coverage
    quoted = {f"{one.run.name}: {lost}" for one in corrupt for lost in one.run.damaged[:1] if not one.reasons}
    others = (sentence for sentence in coverage.partial if sentence not in quoted)
    return structs.replace(coverage, damaged=sentences, partial=(*sentences, *others))
