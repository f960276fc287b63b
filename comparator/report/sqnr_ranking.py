"""SQNR ranking: outputs with the lowest signal-to-quantization-noise ratio, and the SQNR of their inputs."""

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
    """Lowest SQNR of the module's inputs; None if no input was compared."""

    @property
    def loss(self) -> float:
        """SQNR lost between inputs and output, in dB; 0 if the inputs are unknown."""
        return max(0.0, self.inputs - self.sqnr) if self.inputs is not None else 0.0


def sqnr_ranking(findings: Sequence[Finding]) -> list[SiteSqnr]:
    """Return the SQNR of outputs and quantized weights that were compared by values and differ, lowest first."""
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
    """Yield one line for each of the ``count`` outputs with the lowest SQNR, with the SQNR of their inputs."""
    return ranking_lines(sqnr_ranking(findings)[:count])


def ranking_lines(ranked: Sequence[SiteSqnr]) -> Iterator[str]:
    """Yield one line per site, with the SQNR of the inputs if known."""
    for i, one in enumerate(ranked):
        given = "" if one.inputs is None else f"  inputs {one.inputs:.1f} dB"
        yield f"{'' if i else 'sqnr':<{LABEL}}{one.sqnr:6.1f} dB  {one.site}{given}"


def _is_float(finding: Finding) -> bool:
    return all(side is not None and dtypes.is_float(side.dtype) for side in (finding.baseline, finding.target))
