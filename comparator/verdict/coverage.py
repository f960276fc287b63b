"""Coverage: the part of both runs that the verdict covers, and the reasons why data is partial."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct

from tapscope.comparator.alignment.forks import Fork
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.alignment.steps import IN_ORDER, ROWLESS_IN_ORDER
from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.modules import ancestors, parent
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.comparator.verdict.localise import Divergence
from tapscope.comparator.verdict.model_mismatch import differences
from tapscope.core import formatting
from tapscope.core.deprecation import deprecated_attributes
from tapscope.core.site import layer_of, module_of, port_of
from tapscope.expr.site_pattern import SitePattern, site_pattern
from tapscope.run_format.ledger import Ledger
from tapscope.run_format.manifest import CHECKPOINT_FORMAT, FORMAT
from tapscope.run_format.run import Run

MODELS_DIFFER = "the models are configured differently"
"""Beginning of the sentence about different hyperparameters."""
WEIGHTS_MAY_DIFFER = "the weights may differ"
"""Beginning of the sentence about parameters that a training run did not record."""
SAME_DIRECTORY = "baseline and target are the same directory"
"""Note about a run compared with itself."""


@deprecated_attributes(
    {
        "sites_matched": "num_sites_matched",
        "sites_only_baseline": "num_sites_only_baseline",
        "sites_only_target": "num_sites_only_target",
        "sites_not_comparable": "num_sites_not_comparable",
        "sites_unread": "num_sites_unread",
        "rows_aligned": "num_rows_aligned",
        "rows_forked": "num_rows_forked",
        "rows_unaligned": "num_rows_unaligned",
        "rows_again": "num_rows_recomputed",
        "rows_superseded": "num_rows_replaced",
    }
)
class Coverage(Struct, frozen=True):
    """The coverage of a comparison; ``partial`` and ``warnings`` are sentences."""

    num_sites_matched: int
    num_sites_only_baseline: int
    num_sites_only_target: int
    num_sites_not_comparable: int
    rows_known: bool
    """Whether both runs record the token rows of their steps."""
    num_rows_aligned: int
    num_rows_forked: tuple[int, int]
    num_rows_unaligned: tuple[int, int]
    num_rows_recomputed: tuple[int, int]
    num_rows_replaced: tuple[int, int]
    forks: tuple[Fork, ...]
    ledgers: tuple[Ledger, Ledger]
    partial: tuple[str, ...]
    """Missing data, because of which agreement of the rest is not a verdict on the whole."""
    warnings: tuple[str, ...]
    """Assumptions and exclusions that do not weaken the verdict."""
    num_sites_unread: int = 0
    """Sites whose recorded hashes are equal, so that their values were not read."""
    damaged: tuple[str, ...] = ()
    """Values of a run whose bytes are missing or corrupt; part of :attr:`partial`."""
    removed_prefixes: tuple[str, ...] = ()
    """``baseline:PREFIX`` or ``target:PREFIX`` for each prefix that was removed automatically to make names match."""
    proposed_map: str = ""
    """A map file (YAML) for modules that seem to have other names in the baseline; empty unless many sites are
    unmatched."""

    @property
    def is_complete(self) -> bool:
        """Whether the verdict covers everything that both runs have in common and should have in common."""
        return not self.partial


def cover(
    runs: tuple[Run, Run],
    rows: RowMap,
    results: Sequence[PairResult],
    findings: Sequence[Finding],
    num_objects: int,
    notes: Sequence[str] = (),
    *,
    options: CompareOptions | None = None,
    divergences: Sequence[Divergence] = (),
) -> Coverage:
    """Compute the coverage of a comparison.

    ``num_objects`` is the number of records of objects without a comparable value. ``notes`` are further assumptions.
    """
    options = options or CompareOptions()
    allowed = tuple(map(site_pattern, options.allow_missing))
    counts = Counter(f.verdict for f in findings)
    ledgers = runs[0].ledger(), runs[1].ledger()
    remarks = [(ledger, f"{r.name}: {s}") for r, ledger in zip(runs, ledgers, strict=True) for s in ledger.sentences()]
    partial = [
        *rows.problems,
        *_unaligned(runs, rows),
        *_prompts(rows.forks),
        *_orphans(runs, _counted(findings, allowed), ledgers),
    ]
    partial += [sentence for ledger, sentence in remarks if not ledger.complete]
    with_gaps = [one for one in results if any(one.meta.num_missing)]
    excused = {one.site: None for one in with_gaps if _may_lack(one.pair.names(), allowed)}
    partial += _gaps(runs, [one for one in with_gaps if one.site not in excused])
    warnings = [SAME_DIRECTORY] * (runs[0].path.resolve() == runs[1].path.resolve())
    warnings += [*rows.notes, *notes, *_left_out(results), *_config_differences(runs), *_unrecorded(runs, divergences)]
    warnings += [sentence for ledger, sentence in remarks if ledger.complete]
    warnings += [*_assumed(results, findings), *_never_fired(runs, findings, ledgers)]
    left = [f.site for f in findings if f.verdict.is_orphan and _may_lack(f.result.pair.names(), allowed)]
    if left := [*left, *excused]:
        warnings.append(f"{formatting.plural(len(left), 'site')} allowed to be missing, e.g. {left[0]}")
    if num_objects:
        warnings.append(f"{num_objects:,} non-tensor records were skipped")
    are_recorded = all(run.manifest.get("format") == FORMAT for run in runs)  # otherwise, hashing reads the values
    return Coverage(
        num_sites_matched=sum(n for v, n in counts.items() if not v.is_orphan),
        num_sites_only_baseline=counts[Verdict.ONLY_BASELINE],
        num_sites_only_target=counts[Verdict.ONLY_TARGET],
        num_sites_not_comparable=counts[Verdict.SHAPE],
        rows_known=rows.known,
        num_rows_aligned=rows.num_pairs,
        num_rows_forked=rows.num_forked,
        num_rows_unaligned=rows.num_unaligned,
        num_rows_recomputed=rows.num_recomputed,
        num_rows_replaced=rows.num_replaced,
        forks=rows.forks,
        ledgers=ledgers,
        partial=tuple(partial),
        warnings=tuple(warnings),
        num_sites_unread=0 if options.verify or not are_recorded else _unread(findings),
    )


def _counted(findings: Sequence[Finding], allowed: tuple[SitePattern, ...]) -> list[Finding]:
    """Return the findings without the orphans that are allowed to be missing."""
    return [f for f in findings if not (f.verdict.is_orphan and _may_lack(f.result.pair.names(), allowed))]


def _may_lack(names: Iterable[str], allowed: tuple[SitePattern, ...]) -> bool:
    return bool(allowed) and any(glob.matches(name) for glob in allowed for name in names)


def _gaps(runs: tuple[Run, Run], results: Sequence[PairResult]) -> list[str]:
    """Return a sentence for each run that lacks records of the other run, with the number of sites."""
    sentences: list[str] = []
    for side, lacks, has in ((0, "baseline", "target"), (1, "target", "baseline")):
        sites = list(dict.fromkeys(one.site for one in results if one.meta.num_missing[side]))
        if sites:
            where = f"at {sites[0]}" if len(sites) == 1 else f"at {len(sites):,} sites, first {sites[0]}"
            sentences.append(f"the {lacks} ({runs[side].name}) lacks records that the {has} has, {where}")
    return sentences


def _unread(findings: Sequence[Finding]) -> int:
    return sum(f.basis == "hash" and f.verdict is Verdict.SAME for f in findings)


def _assumed(results: Sequence[PairResult], findings: Sequence[Finding]) -> list[str]:
    """Return sentences about findings that are weaker than they appear."""
    sites_of: dict[str, list[str]] = {}
    for one in results:
        for warning in one.meta.warnings:
            sites_of.setdefault(warning, []).append(one.site)
    sentences = [f"{sites[0]}{_and_more(sites)}: {warning}" for warning, sites in sites_of.items()]
    if by_stats := sum(f.basis == "stats" for f in findings):
        what = "differences that leave mean, rms and maximum unchanged are not seen"
        sentences.append(f"{formatting.plural(by_stats, 'site')} compared by statistics alone: {what}")
    if sketched := [f for f in findings if f.basis == "sketch"]:
        most = max(max((step.num_rows for step in f.steps), default=f.rows.num_compared) for f in sketched)
        root = "the square root of the rows of a step"
        limit = f"{math.sqrt(most):.0f} times the floor ({root})" if most > 1 else "the floor"
        sentences.append(
            f"{formatting.plural(len(sketched), 'site')} estimated from sketches: an error in a single token row is "
            f"seen if it exceeds {limit}"
        )
    if plain := [f.site for f in findings if f.test == "plain" and not f.verdict.is_bad]:
        sentences.append(f"{formatting.plural(len(plain), 'plain value')} not equal, e.g. {plain[0]}")
    if allowed := [f for f in findings if f.judged_by.startswith("--allow-differ")]:
        sentences.append(f"{formatting.plural(len(allowed), 'site')} allowed to differ, e.g. {allowed[0].site}")
    if moved := [one for one in results if one.extras.propagated is not None]:
        where = f"{formatting.plural(len(moved), 'site')}, e.g. {moved[0].site}"
        sentences.append(f"token rows left out at {where}: {moved[0].notes[0]}")
        sentences.append(
            "the floors of later layers include the errors of these rows, and a bug may pass in rows of the same "
            "requests: for strict floors, dump the target with --experts-from BASELINE"
        )
    if unclear := [one for one in results if one.pair.note.startswith("could be")]:
        sentences.append(
            f"{formatting.plural(len(unclear), 'site')} not matched, e.g. {unclear[0].site} {unclear[0].pair.note}"
        )
    return sentences


def _config_differences(runs: tuple[Run, Run]) -> list[str]:
    names = differences(*runs)
    return [f"{MODELS_DIFFER}: {', '.join(names)}"] if names else []


def _unrecorded(runs: tuple[Run, Run], divergences: Sequence[Divergence]) -> list[str]:
    """Return a note if a module with weights adds an error in a comparison of two trainings without recorded
    weights."""
    ports = [{port_of(site) for site in run.sites} for run in runs]
    is_training = all(any(port.endswith(".grad") for port in ports_of_run) for ports_of_run in ports)
    is_known = all(any(_is_weight(port) for port in ports_of_run) for ports_of_run in ports)
    if not is_training or is_known:
        return []
    with_weights = {module_of(site) for run in runs for site, info in run.sites.items() if info.params}
    if not any(each.module in with_weights and _is_unexplained(each) for each in divergences[:1]):
        return []
    return [f"{WEIGHTS_MAY_DIFFER}: record both runs with params=true to compare them"]


def _is_weight(port: str) -> bool:
    return port.startswith("param[") and not port.endswith(".grad")


def _is_unexplained(divergence: Divergence) -> bool:
    return divergence.explanation is None or not divergence.explanation.is_clear


def _and_more(sites: Sequence[str]) -> str:
    return f" and {len(sites) - 1} more" if len(sites) > 1 else ""


def _left_out(results: Sequence[PairResult]) -> list[str]:
    """Return sentences about sites that were not compared, or only by an assumption, although nothing is wrong."""
    reasons: dict[str, list[str]] = {}
    for one in results:
        if one.exclusion_reason:
            reasons.setdefault(one.exclusion_reason, []).append(one.site)
    sentences = [
        f"{formatting.plural(len(sites), 'site')} not compared, e.g. {sites[0]}: {why}"
        for why, sites in reasons.items()
    ]
    orders = (IN_ORDER, ROWLESS_IN_ORDER)
    return sentences + list(dict.fromkeys(note for one in results for note in one.notes if note.startswith(orders)))


def _unaligned(runs: tuple[Run, Run], rows: RowMap) -> list[str]:
    return [
        f"{count:,} token rows of {run.name} were never computed by {other.name}{_missing(run, other, late)}"
        for run, other, count, late in zip(runs, runs[::-1], rows.num_unaligned, rows.late_starts[::-1], strict=True)
        if count
    ]


def _missing(run: Run, other: Run, late: tuple[str, int] | None) -> str:
    """Name a request of the other run that begins late, as after a cached prefix, or whose positions have a gap."""
    if late is not None:
        where = f"request {late[0]} begins at position {late[1]} there"
        return f" ({where}, as after a cached prefix: dump without prefix caching)"
    gap = _first_gap(other)
    return f" ({gap} there: its positions are wrong, or steps were not recorded)" if gap and not _first_gap(run) else ""


def _first_gap(run: Run) -> str:
    """Describe the first gap in the positions of a request between steps; empty if all positions are contiguous."""
    ends: dict[str, int] = {}
    for step in sorted(run.steps):
        rows = [row for line in run.steps[step].values() for row in line.info.rows]
        for row in sorted(rows, key=lambda row: row.position):  # ranks may hold parts of a sequence in any order
            end = ends.get(row.request, row.position)
            if row.position > end:
                return f"request {row.request} goes from position {end - 1} to {row.position} at step {step}"
            ends[row.request] = max(end, row.position + row.count)
    return ""


def _prompts(forks: Sequence[Fork]) -> list[str]:
    given = [f for f in forks if f.in_prompt]
    if not given:
        return []
    return [f"the prompts differ: request {given[0].request} at position {given[0].position}, {len(given)} in all"]


def _orphans(runs: tuple[Run, Run], findings: Sequence[Finding], ledgers: tuple[Ledger, Ledger]) -> list[str]:
    """Return sentences about gaps in matching.

    Orphans are normal between frameworks, unless they are a layer, most of a run or a tapped module.
    """
    sentences: list[str] = []
    matched = [f for f in findings if not f.verdict.is_orphan]
    if len(matched) == len(findings):
        return sentences
    layers = {layer_of(module_of(f.site)) for f in matched}
    agreeing = _agreeing(matched)
    sides = ((Verdict.ONLY_BASELINE, 0), (Verdict.ONLY_TARGET, 1))
    are_weights = all(run.manifest.get("format") == CHECKPOINT_FORMAT for run in runs)
    for verdict, side in sides:
        alone = [f for f in findings if f.verdict is verdict]
        if are_weights and alone:
            verb, sites = "is" if len(alone) == 1 else "are", formatting.listed([f.site for f in alone])
            sentences.append(f"{formatting.plural(len(alone), 'tensor')} {verb} only in {runs[side].name}: {sites}")
            continue
        lost = sorted({layer for f in alone if (layer := layer_of(module_of(f.site))) is not None} - layers)
        if lost:
            sentences.append(
                f"layer {lost[0]} and {len(lost) - 1} more are only in {runs[side].name}"
                if len(lost) > 1
                else f"layer {lost[0]} is only in {runs[side].name}"
            )
        silent = [
            f.site for f in _silent(findings, verdict, ledgers[1 - side]) if not _is_within_agreeing(f.site, agreeing)
        ]
        if silent:
            sentences.append(f"{silent[0]} was tapped in {runs[1 - side].name} and never fired")
    fewer = len(matched) + min(sum(f.verdict is v for f in findings) for v, _ in sides)
    if matched and 2 * len(matched) < fewer:
        sentences.append(f"only {len(matched)} of at least {fewer} sites have a counterpart")
    return sentences


def _silent(findings: Sequence[Finding], verdict: Verdict, ledger: Ledger) -> list[Finding]:
    """Return the findings on sites of one run that the other run tapped but that never fired there."""
    tapped = set(ledger.never_fired)
    return [f for f in findings if f.verdict is verdict and f.site in tapped]


def _agreeing(findings: Sequence[Finding]) -> frozenset[str]:
    """Return the modules, except the root, whose outputs were compared and agree."""
    made = [(module_of(f.site), f) for f in findings if port_of(f.site).startswith("out")]
    bad = {path for path, f in made if f.verdict.is_bad}
    return frozenset(path for path, f in made if path and path not in bad and f.basis in ("values", "hash"))


def _is_within_agreeing(site: str, agreeing: Collection[str]) -> bool:
    return any(above in agreeing for above in ancestors(parent(module_of(site))))


def _never_fired(runs: tuple[Run, Run], findings: Sequence[Finding], ledgers: tuple[Ledger, Ledger]) -> list[str]:
    """Return sentences about taps that never fired inside modules that agree (a fused product, a compiled module).

    No data is missing in this case.
    """
    agreeing, sentences = _agreeing([f for f in findings if not f.verdict.is_orphan]), []
    for verdict, side in ((Verdict.ONLY_BASELINE, 0), (Verdict.ONLY_TARGET, 1)):
        sites = [f.site for f in _silent(findings, verdict, ledgers[1 - side]) if _is_within_agreeing(f.site, agreeing)]
        if sites:
            where = f"{sites[0]}{_and_more(sites)}: tapped in {runs[1 - side].name} and never fired"
            sentences.append(f"{where}; the enclosing module agrees")
    return sentences
