"""Floor effects: the effects that make up the noise floor of a site, one line each."""

from collections.abc import Iterator, Sequence

from tapscope.comparator.noise_floor.error_model import FloorEffect
from tapscope.comparator.verdict.finding import Finding
from tapscope.core.formatting import number

_NEGLIGIBLE = 1e-3


def floor_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """For every finding that lists its effects: the floor, and each effect with its contribution and a sentence."""
    for finding in findings:
        if not finding.floor_effects:
            continue
        over = f"error {number(finding.error)}, floor {number(finding.floor)} ({finding.ratio:.2f} of it)"
        yield f"floor     {finding.site}: {over}, by the test {finding.test}"
        shown = _notable(finding)
        sizes, names = [_size(each) for each in shown], [each.effect for each in shown]
        width, name_width = max(map(len, sizes)), max(map(len, names))
        for name, size, each in zip(names, sizes, shown, strict=True):
            yield f"          {name:{name_width}}  {size:>{width}}  {each.explanation}{_without(each, finding.floor)}"


def _notable(finding: Finding) -> list[FloorEffect]:
    """The effects without errors that are negligible relative to the largest and do not change the floor."""
    effects = finding.floor_effects
    least = _NEGLIGIBLE * max((each.contribution for each in effects if each.unit == "error"), default=0.0)
    return [
        each for each in effects if each.unit == "factor" or each.contribution >= least or _without(each, finding.floor)
    ]


def _size(effect: FloorEffect) -> str:
    """``2.2e-03`` for an error, ``×4`` for a factor."""
    return f"×{effect.contribution:.3g}" if effect.unit == "factor" else number(effect.contribution)


def _without(effect: FloorEffect, floor: float) -> str:
    """The floor without the effect, if it differs."""
    if effect.floor_without is None or abs(effect.floor_without - floor) <= 0.005 * floor:
        return ""
    return f" (floor without it {number(effect.floor_without)})"
