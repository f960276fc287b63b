"""Strip: layers against steps, one verdict a cell."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tapscope.comparator import Finding, StepResult, Verdict
from tapscope.core.site import layer_of

_WORST_FIRST = (
    Verdict.NONFINITE,
    Verdict.DIFFERS,
    Verdict.SHAPE,
    Verdict.CLOSE,
    Verdict.SAME,
    Verdict.ONLY_BASELINE,
    Verdict.ONLY_TARGET,
)
EMPTY = "·"
"""Nothing was compared."""


@dataclass(frozen=True, slots=True)
class Group:
    """A line of the strip: a layer, or a module outside every layer."""

    name: str
    """The layer's number, or the module's path (empty for the model itself)."""
    is_layer: bool
    verdict: Verdict
    """The worst of its findings."""
    steps: dict[int, Verdict]
    """The worst in each target step."""
    label: str
    """``layer 12``, ``lm_head``; ``(root)`` for the model itself."""

    def glyph(self, step: int) -> str:
        """One character for a step."""
        verdict = self.steps.get(step)
        return verdict.glyph if verdict else EMPTY


def group_of(finding: Finding) -> tuple[str, bool]:
    """Name of the group a finding belongs to, and whether that is a layer."""
    path = finding.site.rpartition(":")[0]
    layer = layer_of(path)
    return (path, False) if layer is None else (str(layer), True)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The one that weighs most."""
    return min(verdicts, key=_WORST_FIRST.index)


def groups(findings: Sequence[Finding], equal_steps: Callable[[Finding], Iterable[int]] = lambda f: ()) -> list[Group]:
    """All groups, in the order in which they fire first; ``equal_steps`` are those of which a finding says nothing
    because their hashes are equal."""
    members: dict[tuple[str, bool], list[Finding]] = {}
    for finding in findings:
        members.setdefault(group_of(finding), []).append(finding)
    labels = _labels(members)
    return [
        Group(*who, worst([f.verdict for f in own]), _by_step(own, equal_steps), labels[who])
        for who, own in members.items()
    ]


def _labels(names: Iterable[tuple[str, bool]]) -> dict[tuple[str, bool], str]:
    """The last component of a module's path, or where several end like that the whole path."""
    last = {who: who[0].rpartition(".")[2] for who in names if not who[1]}
    often = Counter(last.values())
    found = {who: name if often[name] == 1 else who[0] for who, name in last.items()}
    return {who: f"layer {who[0]}" if who[1] else found[who] or "(root)" for who in names}


def _by_step(findings: Sequence[Finding], equal_steps: Callable[[Finding], Iterable[int]]) -> dict[int, Verdict]:
    found: dict[int, list[Verdict]] = {step: [Verdict.SAME] for f in findings for step in equal_steps(f)}
    for finding in findings:
        for result in finding.steps:
            found.setdefault(result.step, []).append(step_verdict(finding, result))
    return {step: worst(verdicts) for step, verdicts in found.items()}


def step_verdict(finding: Finding, result: StepResult) -> Verdict:
    """What a finding shows in one step: a site that differs in one of many agrees in the others."""
    if not finding.verdict.is_bad:
        return Verdict.SAME if result.max_abs == 0.0 else finding.verdict
    largest = max(each.error for each in finding.steps)
    if result.error >= 0.5 * largest or (result.error > finding.floor and result.error >= 0.05 * largest):
        return finding.verdict
    return Verdict.SAME if result.max_abs == 0.0 else Verdict.CLOSE
