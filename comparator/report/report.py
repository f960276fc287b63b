"""Report: the result of a comparison."""

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from tapscope.comparator.options import fail_on
from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.verdict.coverage import Coverage
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.comparator.verdict.localise import Divergence
from tapscope.core import dtypes
from tapscope.core.deprecation import deprecated_attributes
from tapscope.core.html_table import html_table
from tapscope.expr.site_pattern import site_pattern
from tapscope.run_format.run import Run


@deprecated_attributes({"steps": "num_steps", "records": "num_records"})
class Header(Struct, frozen=True):
    """Description of one run in the header of a report."""

    name: str
    path: str
    framework: str
    model: str
    dtype: str
    mesh: dict[str, int]
    num_steps: int
    num_records: int
    """Number of selected records."""
    is_open: bool
    kv_cache_dtype: str = ""
    """Dtype of the KV cache; empty if unknown."""

    @property
    def precision(self) -> str:
        """The dtype in short form, with the dtype of the KV cache if it differs: ``bf16, KV fp8_e4m3``."""
        kv = self.kv_cache_dtype if self.kv_cache_dtype not in ("", "auto", self.dtype) else ""
        return dtypes.short(self.dtype or None) + (f", KV {dtypes.short(kv)}" if kv else "")


HTML_FINDINGS = 10
"""Maximum number of bad findings shown in a notebook."""


@deprecated_attributes({"closest_call": "max_ratio_finding"})
class Report(Struct, frozen=True):
    """The result of a comparison."""

    baseline: Header
    target: Header
    findings: tuple[Finding, ...]
    """All findings, in execution order."""
    divergences: tuple[Divergence, ...]
    """Findings that are producers, in execution order."""
    coverage: Coverage
    options: CompareOptions

    def __repr__(self) -> str:
        from tapscope.comparator.report.answer import counts

        first = f"{self.first_divergence!r}, " if self.divergences else ""
        return f"<Report {self.baseline.name} → {self.target.name}: {first}{counts(self)}; exit code {self.exit_code}>"

    def __str__(self) -> str:
        """Return the answer, one line each: what differs by how much, where, why, and the next command."""
        from tapscope.comparator.report.answer import answer

        return "\n".join(answer(self))

    def _repr_html_(self) -> str:
        """Return the answer and the first bad findings as small HTML tables for notebooks."""
        from tapscope.comparator.report.answer import LABEL, answer, share

        answer_rows = [(line[:LABEL].strip(), line[LABEL:]) for line in answer(self)]
        names = f"{self.baseline.name} → {self.target.name}"
        bad = [finding for finding in self.findings if finding.verdict.is_bad]
        if not bad:
            return html_table(answer_rows, title=names)
        rows = [(str(f.verdict), f.site, share(f.ratio), f.role) for f in bad[:HTML_FINDINGS]]
        title = (
            f"the first {HTML_FINDINGS} of {len(bad):,} bad findings" if len(bad) > HTML_FINDINGS else "bad findings"
        )
        return html_table(answer_rows, title=names) + html_table(
            rows, ("verdict", "site", "error ÷ floor", "role"), title
        )

    @property
    def first_divergence(self) -> Divergence | None:
        """The first divergence, whose module is the culprit; None if there are no divergences."""
        return self.divergences[0] if self.divergences else None

    @property
    def num_bad(self) -> int:
        """Number of findings that fail the target."""
        return sum(f.verdict.is_bad for f in self.findings)

    @property
    def max_ratio_finding(self) -> Finding | None:
        """The finding with the largest ratio of error to floor among those that pass by their floor."""
        passing = [f for f in self.findings if f.verdict is Verdict.CLOSE and f.floor > 0.0 and f.test != "rule"]
        return max(passing, key=lambda f: f.ratio, default=None)

    @property
    def exit_code(self) -> int:
        """1 if a condition of ``fail_on`` is met, otherwise 0; 3 if bytes of either run are damaged (unless that is
        allowed), or if no site could be compared."""
        if not self.divergences and all(finding.basis == "none" for finding in self.findings):
            return 3
        if self.coverage.damaged and not self.options.allow_partial:
            return 3
        return int(bool(self.failed))

    @property
    def failed(self) -> frozenset[str]:
        """The conditions of ``fail_on`` that are met."""
        return self.met & self.options.fail_on

    @property
    def met(self) -> frozenset[str]:
        """All conditions of :data:`.fail_on.CONDITIONS` that are met, whether or not ``fail_on`` includes them."""
        verdicts = {f.verdict for f in self.findings}
        met = {name for verdict, name in _CONDITION_OF.items() if verdict in verdicts}
        if not (self.coverage.is_complete or self.options.allow_partial):
            met.add(fail_on.PARTIAL)
        missing = [f for f in self.findings if f.verdict.is_orphan]
        if _has_others(missing, self.options.allow_missing):
            met.add(fail_on.MISSING)
        inexact = [f for f in self.findings if f.verdict is Verdict.CLOSE or f.verdict.is_bad]
        if _has_others(inexact, self.options.allow_differ):
            met.add(fail_on.INEXACT)
        if self.coverage.warnings:
            met.add(fail_on.WARNING)
        return frozenset(met)

    def to_json(self, schema: int = 2) -> Iterator[dict[str, Any]]:
        """Yield one object per line: the header, the findings, the summary; see :mod:`.json_lines`.

        ``schema`` 1 gives the fields of the previous release and is deprecated.
        """
        from tapscope.comparator.report.json_lines import lines

        yield from lines(self, schema)


_CONDITION_OF = {
    Verdict.DIFFERS: fail_on.DIFFERS,
    Verdict.NONFINITE: fail_on.NONFINITE,
    Verdict.SHAPE: fail_on.SHAPE,
}


def _has_others(findings: Sequence[Finding], globs: Sequence[str]) -> bool:
    """Return whether any finding has no name that matches one of the globs."""
    allowed = tuple(map(site_pattern, globs))
    names = ({f.site, *f.result.pair.names()} for f in findings)
    return any(not any(glob.matches(name) for glob in allowed for name in each) for each in names)


def header_of(run: Run, records: int) -> Header:
    """Return the header of a run; ``records`` is the number of selected records."""
    manifest = run.manifest
    framework, model, dtype = (str(manifest.get(key, "")) for key in ("framework", "model", "dtype"))
    kv = str(manifest.get("kv_cache_dtype", ""))
    count = len(run.steps)
    return Header(run.name, str(run.path), framework, model, dtype, run.mesh, count, records, not run.closed, kv)
