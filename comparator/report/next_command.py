"""Next command: suggest the command to run after a comparison."""

import re
import shlex
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tapscope.comparator.explain.scale import LOSS_OF_RANK
from tapscope.comparator.report.flags import flags
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.core.site import Glob, split_call

if TYPE_CHECKING:
    from tapscope.comparator.report.report import Header, Report
    from tapscope.comparator.verdict.localise import Divergence

ACTIVATION_GRADIENTS = r"re::(in|out|tap).*\.grad$"
"""Pattern for ``--skip`` that excludes all gradients except those of parameters."""
_PREFIX = re.compile(r"is removed: --strip-prefix (\S+)$")
_DIMS = re.compile(r"--dims '((?:baseline|target):[^']+)'")


def next_command(report: "Report") -> str:
    """Return the command that helps most.

    In order: match names, if few match; exclude gradients of data-parallel losses; show the culprit's values;
    investigate sites that cannot be compared; view both runs.
    """
    if again := _with_prefix_removed(report):
        return again
    names_differ = any(sentence.endswith("sites have a counterpart") for sentence in report.coverage.partial)
    map_command = shlex.join(["tapscope", "map", report.baseline.path, report.target.path, "-o", "names.yaml"])
    if names_differ and report.coverage.proposed_map:
        return map_command  # the culprit is probably a module without a counterpart
    divergence = report.first_divergence
    if divergence is not None and divergence.explanation and divergence.explanation.name == LOSS_OF_RANK:
        options = replace(report.options, skip=(*report.options.skip, ACTIVATION_GRADIENTS))
        return shlex.join(["tapscope", "diff", report.baseline.path, report.target.path, *flags(options)])
    if divergence is not None and not (divergence.finding.test == "shape" and _hints(divergence.finding)):
        side, run = divergence.finding.target, report.target
        if side is None:  # for a gradient that the target lacks
            side, run = divergence.finding.baseline, report.baseline
        site = side.site if side else divergence.site
        _, call = split_call(divergence.site)
        call = call or _first_unequal(divergence)
        which = ["--occurrence", str(call)] if call else []
        rank = None if divergence.place is None else divergence.place.rank
        which += [] if rank is None else ["--rank", str(rank)]
        return shlex.join(["tapscope", "show", run.path, site, "--step", str(divergence.step), *which])
    if again := _with_dims_that_fit(report):
        return again
    if names_differ or (report.coverage.proposed_map and report.coverage.partial):
        return map_command
    if report.num_bad or report.coverage.partial:
        return shlex.join(["tapscope", "info", _in_question(report).path])
    return shlex.join(["tapscope", "view", report.baseline.path, report.target.path, *flags(report.options)])


def _first_unequal(divergence: "Divergence") -> int:
    """Return the first unequal call of the step if calls are not separated; 0 if they are."""
    pair, place = divergence.finding.result.pair, divergence.place
    if pair.baseline is None or pair.target is None or place is None:
        return 0
    sides = (pair.baseline, place.baseline_step), (pair.target, divergence.step)
    mine, other = ([firing for firing in side.firings if firing.step == step] for side, step in sides)
    unequal = (
        two.call[1]
        for one, two in zip(mine, other, strict=False)
        if [record.hash for record in one.records] != [record.hash for record in two.records]
    )
    return next(unequal, 0)


def _in_question(report: "Report") -> "Header":
    """Return the baseline if it is the only incomplete run, otherwise the target."""
    ledgers = report.coverage.ledgers
    return report.baseline if ledgers[1].complete and not ledgers[0].complete else report.target


def _with_dims_that_fit(report: "Report") -> str:
    """Return the command that repeats the comparison with every ``--dims`` suggested by notes.

    Empty if there are none, or if a map file has dims, which may be wrong and would still apply.
    """
    hints = dict.fromkeys(hint for f in report.findings for hint in _hints(f))
    if not hints or report.options.mapping.dims:
        return ""
    fine = [side.site for f in report.findings if not _hints(f) for side in (f.baseline, f.target) if side]
    # Drop user-given dims that only apply to the hinted sites: they would match nothing, which is an error.
    dims = tuple(entry for entry in report.options.dims if any(map(Glob(entry.site).matches, fine)))
    words = [word for hint in hints for word in ("--dims", hint)] + flags(replace(report.options, dims=dims))
    return shlex.join(["tapscope", "diff", report.baseline.path, report.target.path, *words])


def _with_prefix_removed(report: "Report") -> str:
    """Return the command that repeats the comparison without the prefix that prevents matches; empty if there is
    none."""
    prefixes = [hint[1] for warning in report.coverage.warnings if (hint := _PREFIX.search(warning))]
    if not prefixes or not report.coverage.partial:
        return ""
    words = ["--strip-prefix", prefixes[0], *flags(report.options)]
    return shlex.join(["tapscope", "diff", report.baseline.path, report.target.path, *words])


def _hints(finding: Finding) -> list[str]:
    if finding.verdict is not Verdict.SHAPE:
        return []
    return [hint for note in finding.notes for hint in _DIMS.findall(note) if not hint.endswith("=...")]
