"""Filters of findings and records, and sorting by a click on a column."""

import asyncio
import math

import ml_dtypes
import numpy as np
import pytest
from dashboard_driver import Driver
from dashboard_runs import toy_run
from factories import RunFactory
from hypothesis import given
from hypothesis import strategies as st
from toy_pair import SITE, toy_pair

from tapscope.comparator import CompareOptions
from tapscope.core.errors import ConfigError
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import Query, RunSource
from tapscope.dashboard.diff_source import SORTS, DiffQuery, DiffSource
from tapscope.dashboard.model import filter as filters
from tapscope.dashboard.model.filter import ChoiceField, NumberField
from tapscope.dashboard.model.finding_filter import matching_findings
from tapscope.dashboard.widgets.status_bar import KeyBar

pytestmark = pytest.mark.usefixtures("no_rest")

ITEMS = [("a.mlp:out", 1.0, ("red",)), ("b.mlp:in", 20.0, ("red", "blue")), ("c.norm:out", math.nan, ())]
FIELDS = {
    "n": NumberField(lambda: np.array([item[1] for item in ITEMS])),
    "is": ChoiceField(lambda name: np.array([name in item[2] for item in ITEMS]), ("red", "blue")),
}


def found(text):
    holds = filters.matching(text, lambda test: np.array([test(item[0]) for item in ITEMS]), FIELDS)
    return [item for item, kept in zip(ITEMS, np.broadcast_to(holds, len(ITEMS)), strict=True) if kept]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "abc"),
        ("MLP", "ab"),
        ("mlp:out", "a"),
        ("*:out", "ac"),
        ("-mlp", "c"),
        ("mlp -*:in", "a"),
        ("n:>1", "b"),
        ("n:>=1", "ab"),
        ("n:1", "a"),
        ("n:0..5", "a"),
        ("-n:>1", "ac"),
        ("is:red", "ab"),
        ("is:red -is:blue", "a"),
        ("is:red n:>5 mlp", "b"),
    ],
)
def test_filter_words_must_all_hold(text, wanted):
    assert "".join(item[0][0] for item in found(text)) == wanted


@given(st.lists(st.sampled_from(["mlp", "-out", "n:>1", "is:red", "-is:blue", "*:in", "n:0..5"]), max_size=4))
def test_filter_is_the_intersection_of_its_words_in_any_order(words):
    wanted = [item for item in ITEMS if all(item in found(word) for word in words)]
    assert found(" ".join(words)) == found(" ".join(words[::-1])) == wanted


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("n:x", "invalid filter n:x: expected a number such as >10, <=1e-3, 0..3 or 7"),
        ("n:3..0", "invalid filter n:3..0: expected a number such as"),
        ("mlp n:", "invalid filter n:: expected a number"),
        ("is:rde", "invalid filter is:rde .did you mean red..: expected is: and red, blue"),
    ],
)
def test_filter_refuses_invalid_values_in_a_sentence(text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        found(text)


def test_record_filters_name_dtypes(tmp_path):
    with RunFactory(tmp_path) as run:
        run.step()
        for site, dtype in (
            ("a:out", ml_dtypes.float8_e4m3fn),
            ("b:out", ml_dtypes.float8_e5m2),
            ("c:out", np.float32),
        ):
            run.put(site, {0: np.ones((2, 2), dtype)})
    source = RunSource.open(tmp_path)

    def found(text):
        return [record.key.site for record in source.records(Query(0, 0, find=text))]

    assert found("dtype:fp8") == ["a:out", "b:out"]
    assert found("-dtype:fp8") == found("dtype:float32") == found("dtype:fp32") == ["c:out"]
    assert found("dtype:fp8e5") == ["b:out"]
    assert found("dtype:float8_e4m3fn") == ["a:out"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = toy_pair(tmp_path_factory.mktemp("filter"))
    toy_run(root / "odd")
    return root


@pytest.fixture(scope="module")
def source(runs):
    return DiffSource.open((runs / "base", runs / "target"), CompareOptions())


def test_finding_filters_agree_with_the_report(source):
    findings = source.report.findings

    def found(text):
        return source.findings(DiffQuery(find=text))

    assert found("is:differs") == [f for f in findings if str(f.verdict) == "differs"]
    assert {f.site for f in found("is:cause")} == {SITE}
    assert found("ratio:>100") == [f for f in findings if f.floor > 0 and f.ratio > 100]
    assert found("layer:2..3 max:>0") == [f for f in found("layer:2..3") if f.metrics and f.metrics.max_abs > 0]
    assert found("dtype:fp32 -is:bad") == [
        f for f in findings if not f.verdict.is_bad and f not in found("-dtype:fp32")
    ]
    with pytest.raises(ConfigError, match="did you mean differs"):
        matching_findings((), "is:difers")


@pytest.mark.parametrize("sort", SORTS)
def test_findings_are_sorted_and_turned_around(source, sort):
    forward = source.findings(DiffQuery(sort=sort))
    assert source.findings(DiffQuery(sort=sort, reverse=True)) == forward[::-1]
    assert sorted(f.order for f in forward) == list(range(len(source.report.findings)))


def test_record_filters_agree_with_the_records(runs):
    source = RunSource.open(runs / "odd")

    def found(text):
        return [record.key.site for record in source.records(Query(1, 0, find=text))]

    assert found("is:nonfinite") == ["model.layers.2.self_attn.o_proj:out"]
    assert found("is:zeros") == ["lm_head:out"]
    assert set(found("is:anomaly")) == {"model.layers.2.self_attn.o_proj:out", "lm_head:out"}
    tops = {r.key.site: r.stats.absmax for r in source.records(Query(1, 0)) if r.stats}
    assert found("max:>2") == [site for site, top in tops.items() if top is not None and top > 2]
    assert all(".layers.1." in site for site in found("layer:1 proj"))
    assert found("dtype:bf16 layer:1") == [site for site in found("layer:1") if not site.endswith("layers.1:out")]


def drive(app, steps):
    async def go():
        async with app.run_test(size=(120, 36)) as pilot:
            driver = Driver(app, pilot)
            await driver.settle()
            await steps(driver)

    asyncio.run(go())


async def click_column(driver, widget, name):
    """Click the header of a column of a list."""
    line = "".join(segment.text for segment in widget.render_line(0))
    await driver.pilot.click(widget, offset=(line.index(name) + 1 + (widget.size.width < widget.outer_size.width), 1))
    await driver.settle()


def test_diff_screen_filters_and_sorts_by_columns(runs):
    paths = runs / "base", runs / "target"

    async def steps(driver):
        screen = driver.screen
        screen.action_find()
        await driver.press(*"is:cause")
        assert [f.site for f in screen.table.findings] == [SITE]
        await driver.press(*"x")
        assert "did you mean cause" in screen.query_one(KeyBar).said
        assert [f.site for f in screen.table.findings] == [SITE]
        await driver.press("enter", "escape", "d")
        await click_column(driver, screen.table, "max |Δ|")
        assert screen.query_now.sort == "by max |Δ|"
        sizes = [f.metrics.max_abs for f in screen.table.findings if f.metrics]
        assert sizes == sorted(sizes, reverse=True)
        await click_column(driver, screen.table, "max |Δ|")
        assert "by max |Δ|, reversed" in str(screen.table.border_subtitle)
        await click_column(driver, screen.table, "site")
        assert screen.query_now.order == "in order"

    open_diff = (lambda way, progress: DiffSource.open(paths, CompareOptions())), "base → target"
    drive(TapscopeApp(open_diff=open_diff), steps)


def test_browse_screen_filters_and_sorts_by_columns(runs, monkeypatch):
    async def steps(driver):
        screen = driver.screen
        await click_column(driver, screen.table, "|max|")
        assert screen.query_now.order == "by |max|"
        tops = [r.stats.absmax for r in screen.table.records if r.stats and r.stats.absmax is not None]
        assert tops == sorted(tops, reverse=True)
        await click_column(driver, screen.table, "rms")
        assert "Not sorted by rms" in screen.query_one(KeyBar).said
        screen.action_find()
        await driver.press(*"max:>")
        assert "expected a number" in screen.query_one(KeyBar).said
        await driver.press(*"2")
        assert all(r.stats.absmax > 2 for r in screen.table.records)

    drive(TapscopeApp(lambda: RunSource.open(runs / "odd")), steps)
