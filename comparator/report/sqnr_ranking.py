"""SQNR ranking: the outputs with the lowest signal-to-quantization-noise ratio, next to that of their inputs."""

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct

from tapscope.comparator.verdict.finding import Finding
from tapscope.core import dtypes
from tapscope.core.site import module_of

LABEL = 10


class SiteSqnr(Struct, frozen=True):
    """The SQNR of a module's output, in dB."""

    site: str
    sqnr: float
    inputs: float | None
    """The lowest SQNR of the module's inputs; None if none was compared."""

    @property
    def loss(self) -> float:
        """How much lower the output is than the inputs."""
        return max(0.0, self.inputs - self.sqnr) if self.inputs is not None else 0.0


def sqnr_ranking(findings: Sequence[Finding]) -> list[SiteSqnr]:
    """Outputs, and weights in a quantized form, that were compared by values and differ; the lowest SQNR first."""
    inputs: dict[str, float] = {}
    outputs: list[tuple[str, float]] = []
    for finding in findings:
        path, _, port = finding.site.rpartition(":")
        if finding.metrics is None or finding.basis != "values" or not _is_float(finding) or port.endswith(".grad"):
            continue
        sqnr = finding.metrics.sqnr
        if math.isnan(sqnr):
            continue
        if port.startswith("in["):
            inputs[path] = min(inputs.get(path, sqnr), sqnr)
        elif (port.startswith("out") or finding.judged_by == "quantization") and sqnr != math.inf:
            outputs.append((finding.site, sqnr))
    ranking = [SiteSqnr(site, sqnr, inputs.get(module_of(site))) for site, sqnr in outputs]
    return sorted(ranking, key=lambda one: one.sqnr)


def sqnr_lines(findings: Sequence[Finding], count: int) -> Iterator[str]:
    """One line for each of the ``count`` lowest, with the SQNR of the inputs."""
    return ranking_lines(sqnr_ranking(findings)[:count])


def ranking_lines(ranked: Sequence[SiteSqnr]) -> Iterator[str]:
    """One line each, with the SQNR of the inputs where it is known."""
    for i, one in enumerate(ranked):
        given = "" if one.inputs is None else f"  inputs {one.inputs:.1f} dB"
        yield f"{'' if i else 'sqnr':<{LABEL}}{one.sqnr:6.1f} dB  {one.site}{given}"


def _is_float(finding: Finding) -> bool:
    return all(side is not None and dtypes.is_float(side.dtype) for side in (finding.baseline, finding.target))
