"""What holds of every comparison, whatever the model, the bug and the capture: properties over random toys.

Each property meets the same examples in every run; ``make soak`` draws new ones, and more of them
(``TAPSCOPE_EXAMPLES`` multiplies the counts):

| property | examples | in soak |
|---|---|---|
| more sites recorded: no `differs` becomes `close`, and the first culprit does not move downstream | 12 | 240 |
| more steps recorded: the same | 8 | 160 |
| baseline and target swapped: the same verdicts and culprit | 8 | 160 |
| modules renamed, requests permuted: the same verdicts and culprit but for names | 8 | 160 |
| the same values recorded by more ranks and in more files: the same verdicts and culprit | 12 | 240 |
| a culprit that is certain is the module with the bug, whatever was left out | 12 | 240 |
| exit code 0: nothing that was compared differs beyond its floor | 8 | 160 |
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from comparator_toy import HIDDEN, Array, Toy, damaged, prompts, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace
from soak_cases import EXAMPLES

from tapscope.comparator import CompareOptions, Finding, Report, Verdict, compare

MARGINAL = 3.0
"""Times its floor that a site may be off by for its verdict to depend on what else is known: floors are estimates."""
pytestmark = pytest.mark.timeout(180 * EXAMPLES)
PREFIX = "policy."
"""Of the modules that were renamed."""
PASSES = (Verdict.SAME, Verdict.CLOSE)


class Case(Struct, frozen=True):
    """Two runs of one toy, of which the target may have a bug."""

    seed: int
    layers: int
    lengths: tuple[int, ...]
    cuts: tuple[int, ...]
    """Where prompts are cut into steps."""
    dtype: str
    tp: int
    padded: bool
    experts: int
    """Of every layer; 0 for a dense MLP."""
    module: str
    """With the bug; empty for none."""
    how: str
    """What the bug does: to a weight, or to what a module gives out from a step on."""
    step: int

    def write(self, path: Path, *, is_target: bool, **other: Any) -> Path:
        tables: Mapping[str, Array] = weights(self.seed, self.layers, self.experts)
        hooks: dict[str, Callable[[Array], Array]] = {}
        texts = prompts(self.lengths, self.seed)
        if other.pop("permuted", False):
            texts = dict(reversed(texts.items()))
        if is_target and self.module and self.how in ("noise", "zeroed"):
            tables = damaged(tables, self.module, self.how)
        elif is_target and self.module:
            hooks = {f"{self.module}:out": _Harm(self.how, self.step)}
        how = {"dtype": self.dtype, "tp": self.tp, "padded": self.padded} if is_target else {}
        Toy(tables, hooks=hooks, **{**how, **other}).write(path, texts, steps=self.cuts).close()
        return path


class _Harm:
    """Does harm to the values of a module from one of its calls on."""

    def __init__(self, how: str, step: int) -> None:
        self.how, self.step, self.calls = how, step, 0

    def __call__(self, value: Array) -> Array:
        self.calls += 1
        if self.calls <= self.step:
            return value
        if self.how == "sign":
            value = -value
        elif self.how == "columns":
            value[:, : HIDDEN // 4] = 0.0
        else:
            value[-1] = value[-1, ::-1]
        return value


ATTENTION = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")
DENSE, ROUTED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), ("mlp.experts",)
NORMS = ("input_layernorm", "post_attention_layernorm")


@st.composite
def cases(draw: st.DrawFn, *, bug: bool | None = None, steps: bool = False) -> Case:
    layers = draw(st.integers(1, 3))
    lengths = tuple(draw(st.lists(st.integers(4, 12), min_size=2, max_size=3)))
    longest = max(lengths)
    cuts = draw(st.lists(st.integers(1, longest - 1), min_size=1 if steps else 0, max_size=3, unique=True))
    has_bug = draw(st.booleans()) if bug is None else bug
    experts = draw(st.sampled_from((0, 0, 6)))
    part = draw(st.sampled_from((*ATTENTION, *(ROUTED if experts else DENSE), *NORMS)))
    is_norm = part.endswith("norm")
    how = draw(
        st.sampled_from(("sign", "columns", "row") if is_norm else ("noise", "zeroed", "sign", "columns", "row"))
    )
    return Case(
        seed=draw(st.integers(0, 10_000)),
        layers=layers,
        lengths=lengths,
        cuts=tuple(sorted(cuts)),
        dtype=draw(st.sampled_from(("float32", "bfloat16"))),
        tp=draw(st.sampled_from((1, 1, 2))),
        padded=draw(st.booleans()),
        experts=experts,
        module=f"model.layers.{draw(st.integers(0, layers - 1))}.{part}" if has_bug else "",
        how=how,
        step=draw(st.integers(0, len(cuts))) if how in ("sign", "columns", "row") else 0,
    )


@contextmanager
def written(case: Case, **other: Any) -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        yield case.write(Path(folder) / "b", is_target=False), case.write(Path(folder) / "t", is_target=True, **other)


def examples(count: int) -> settings:
    return settings(max_examples=count)


def judged(report: Report) -> dict[str, Finding]:
    return {f.site.removeprefix(PREFIX): f for f in report.findings if not f.verdict.is_orphan}


def unlike(one: Report, other: Report) -> list[tuple[Finding, Finding]]:
    """Sites with another verdict, but for those that are next to their floor in both, or around a router whose
    scores are."""
    mine, theirs = judged(one), judged(other)
    assert mine.keys() == theirs.keys()
    pairs = [(each, theirs[site]) for site, each in mine.items() if each.verdict.is_bad != theirs[site].verdict.is_bad]
    return [pair for pair in pairs if not is_marginal(pair) and not is_marginal(scores_of(pair[0], mine, theirs))]


def is_marginal(pair: tuple[Finding, ...]) -> bool:
    return bool(pair) and all(0.5 < each.ratio < 2.0 for each in pair)


def scores_of(one: Finding, *reports: dict[str, Finding]) -> tuple[Finding, ...]:
    """The findings of the router's scores in the MLP that a site belongs to; empty elsewhere."""
    block, mlp, _ = one.site.partition(".mlp")
    return tuple(known[site] for known in reports if mlp and (site := f"{block}.mlp.gate:out[0]") in known)


def is_near_tie(one: Finding) -> bool:
    """Whether a finding says that rounding decided which experts its rows went to."""
    return any("near tie" in note or "closer together than their own error" in note for note in one.notes)


def culprit(report: Report) -> tuple[str, int] | None:
    first = report.first_divergence
    return None if first is None else (first.module.removeprefix(PREFIX), first.step)


def order_of(report: Report, site: str) -> int:
    return next(f.order for f in report.findings if f.site == site)


def worse(few: Report, many: Report) -> list[tuple[Finding, Finding]]:
    """Sites that clearly differ where little was recorded and pass where more was, not behind a router's near tie."""
    known = {f.site: f for f in many.findings}
    found = [(f, known[f.site]) for f in few.findings if f.verdict.is_bad and f.ratio > MARGINAL and f.site in known]
    return [(one, two) for one, two in found if two.verdict in PASSES and two.order < first_tie(many)]


def first_tie(report: Report) -> float:
    """The place in execution order of the first router whose near tie a finding names."""
    return min((f.order for f in report.findings if is_near_tie(f)), default=float("inf"))


def is_explained(few: Report, many: Report) -> bool:
    """Whether the first culprit of ``few`` comes after a router's near tie, which only ``many`` shows."""
    first = few.first_divergence
    return first is not None and order_of(many, first.site) >= first_tie(many)


@examples(12)
@given(case=cases(bug=True), data=st.data())
def test_invariants_more_sites_never_change_a_verdict(case: Case, data: st.DataObject) -> None:
    with written(case) as (one, two):
        many = compare(one, two)
        names = [f.site for f in many.findings]
        kept = data.draw(st.lists(st.sampled_from(names), min_size=3, max_size=len(names), unique=True))
        few = compare(one, two, CompareOptions(sites=tuple(kept)))
        assert worse(few, many) == []
        if few.first_divergence is not None and not is_explained(few, many):
            assert many.first_divergence is not None
            assert order_of(many, many.first_divergence.site) <= order_of(many, few.first_divergence.site)
            assert many.first_divergence.step <= few.first_divergence.step


@examples(8)
@given(case=cases(bug=True, steps=True), data=st.data())
def test_invariants_more_steps_never_change_a_verdict(case: Case, data: st.DataObject) -> None:
    with written(case) as (one, two):
        many = compare(one, two)
        last = data.draw(st.integers(0, len(case.cuts) - 1))
        few = compare(one, two, CompareOptions(steps=frozenset(range(last + 1))))
        assert worse(few, many) == []
        if few.first_divergence is not None:
            assert culprit(many) == culprit(few)


@examples(8)
@given(case=cases())
def test_invariants_swapped_runs_get_the_same_verdicts(case: Case) -> None:
    with written(case) as (one, two):
        forth, back = compare(one, two), compare(two, one)
        assert unlike(forth, back) == []
        assert culprit(forth) == culprit(back)


@examples(8)
@given(case=cases().filter(lambda case: case.how != "row"))  # the last row is another request's in another order
def test_invariants_names_and_order_change_only_names(case: Case) -> None:
    with written(case) as (one, two), tempfile.TemporaryDirectory() as folder:
        plain = compare(one, two)
        other = case.write(Path(folder) / "o", is_target=True, permuted=True, prefix=PREFIX)
        again = compare(one, other, CompareOptions(strip_prefix=("target:policy",)))
        assert unlike(plain, again) == []
        assert culprit(plain) == culprit(again)


@examples(12)
@given(case=cases(), spread=st.sampled_from((2, 4)))
def test_invariants_sharded_run_gets_the_same_verdicts(case: Case, spread: int) -> None:
    case = replace(case, tp=1)
    with written(case) as (one, two), tempfile.TemporaryDirectory() as folder:
        whole = compare(one, two)
        split = case.write(Path(folder) / "s", is_target=True, spread=spread, segment_bytes=4096)
        assert len(list(split.glob("**/*.safetensors"))) > spread
        again = compare(one, split)
        assert unlike(whole, again) == []
        assert culprit(whole) == culprit(again)
        assert whole.exit_code == again.exit_code


@examples(12)
@given(case=cases(bug=True), data=st.data())
def test_invariants_certain_culprit_is_the_bug(case: Case, data: st.DataObject) -> None:
    with written(case) as (one, two):
        every = compare(one, two)
        names = [f.site for f in every.findings]
        skipped = data.draw(st.lists(st.sampled_from(names), max_size=len(names) - 3, unique=True))
        report = compare(one, two, CompareOptions(skip=tuple(skipped)))
        first = report.first_divergence
        if first is not None and first.is_certain:
            named = first.module
            assert case.module == named or case.module.startswith(f"{named}.") or not named


@examples(8)
@given(case=cases())
def test_invariants_exit_code_0_means_nothing_differs(case: Case) -> None:
    with written(case) as (one, two):
        report = compare(one, two)
        passing = [f for f in report.findings if not f.verdict.is_orphan]
        if report.exit_code == 0:
            assert {f.verdict for f in passing} <= set(PASSES)
            assert [f.site for f in passing if f.verdict is Verdict.CLOSE and f.ratio > 1.0] == []
            assert [f.site for f in passing if f.verdict is Verdict.SAME and f.result.num_unequal] == []
        else:
            assert any(f.verdict.is_bad for f in passing) or report.coverage.partial
        assert case.module or report.exit_code == 0
