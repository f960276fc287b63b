"""The module graph: its view model of real runs and comparisons, and every key of the list."""

import asyncio
from itertools import combinations

import numpy as np
import pytest
from dashboard_driver import Driver
from dashboard_runs import toy_run
from factories import RunFactory
from hypothesis import given
from hypothesis import strategies as st
from toy_pair import toy_pair

from tapscope.comparator import CompareOptions
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.diff_source import DiffSource
from tapscope.dashboard.model.data_flow import FUNCTION
from tapscope.dashboard.model.flow_lanes import flow_lanes, visible_modules
from tapscope.dashboard.model.module_graph import DataFlow, ModuleGraph, ModuleNode
from tapscope.dashboard.model.number import MISSING
from tapscope.dashboard.model.schema import json_schema, to_json
from tapscope.dashboard.screens.modules import ModulesScreen, flow_text
from tapscope.dashboard.widgets.module_list import FlowGutter


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = toy_pair(tmp_path_factory.mktemp("modules"))
    toy_run(root / "run")
    return root


def compared(root):
    return DiffSource.open((root / "base", root / "target"), CompareOptions())


class ModulesDriver(Driver):
    @property
    def list(self):
        return self.app.screen.list

    def line(self, name):
        return str(self.app.screen.query_one(f"#{name}").content)


def drive(app, steps, size=(120, 40), before=()):
    async def go():
        async with app.run_test(size=size) as pilot:
            driver = ModulesDriver(app, pilot)
            await driver.settle()
            await driver.press(*before, "T")
            await driver.settle()
            await steps(driver)

    asyncio.run(go())


def of_run(root):
    return TapscopeApp(lambda: RunSource.open(root / "run"))


def of_pair(root):
    def open_source(way, progress):
        return DiffSource.open((root / "base", root / "target"), way.of(CompareOptions()), progress)

    return TapscopeApp(open_diff=(open_source, "base → target"))


def test_graph_of_a_comparison_carries_the_numbers_of_its_findings(root):
    source = compared(root)
    graph = source.modules()
    by_path = {node.path: node for node in graph.nodes}
    assert len(by_path) == len(graph.nodes)
    for finding in source.report.findings:
        node = by_path[finding.site.rpartition(":")[0]]
        assert node.ratio.value is None or node.ratio.value >= finding.ratio
    causes = {d.finding.site.rpartition(":")[0] for d in source.report.divergences}
    assert causes
    assert {node.path for node in graph.nodes if node.is_cause} == causes
    for node in graph.nodes[1:]:
        parent = graph.nodes[node.parent]
        assert node.path.startswith(f"{parent.path}." if parent.path else "")
        assert node.depth == parent.depth + 1
    culprit = source.culprit.site.rpartition(":")[0]
    parts = culprit.split(".")
    assert all(by_path[".".join(parts[:i])].worst_inside == "differs" for i in range(1, len(parts)))
    source.close()


def test_graph_is_json_with_a_schema(root):
    graph = RunSource.open(root / "run").module_graph(1, 0)
    assert b'"path":"model.layers.2.self_attn.o_proj"' in to_json(graph)
    schema = json_schema(ModuleGraph)
    assert {"ModuleNode", "DataFlow"} <= set(schema["$defs"])


def test_graph_of_a_run_shows_shape_and_what_is_not_finite(root):
    graph = RunSource.open(root / "run").module_graph(1, 0)
    node = next(each for each in graph.nodes if each.path == "model.layers.2.self_attn.o_proj")
    assert (node.verdict, node.glyph, node.shape, node.dtype) == ("nonfinite", "%", "2×64", "bf16")
    layer = graph.nodes[next(e for e in graph.nodes if e.path == "model.layers.2.self_attn").parent]
    assert (layer.name, layer.verdict, layer.worst_inside) == ("layers.2", "", "nonfinite")


def test_data_flows_from_an_output_to_the_input_that_holds_its_bytes(tmp_path):
    with RunFactory(tmp_path / "run") as run:
        run.step()
        first, second = np.ones((2, 4), np.float32), np.full((2, 4), 2.0, np.float32)
        run.put("m.a:in[input]", second)
        run.put("m.a:out", first)
        run.put("m.b:in[input]", first)
        run.put("m.b:out", second)
        run.put("m:out", second)
        run.put("m.c:in[input]", np.full((2, 4), 3.0, np.float32))
    path = tmp_path / "run"
    for graph in (
        RunSource.open(path).module_graph(0, 0),
        DiffSource.open((path, path), CompareOptions()).modules(),
    ):
        paths = {(graph.nodes[f.producer].path, graph.nodes[f.consumer].path): f.is_inferred for f in graph.flows}
        assert paths == {("m.a", "m.b"): False, ("m.b", "m.c"): True}
        at = next(i for i, node in enumerate(graph.nodes) if node.path == "m.b")
        assert flow_text(graph, at) == "m.b · from a · perhaps to c through a function"


def tree(*flows):
    """Build a graph of two layers with two modules each; ``flows`` are (producer path, consumer path)."""
    paths = ("", "a", "a.x", "a.y", "b", "b.x", "b.y", "c")
    parents = [paths.index(path.rpartition(".")[0]) if path else None for path in paths]
    nodes = [
        ModuleNode(path, path, "", path.count(".") + bool(path), parent, "", "", "", "", "", "·", MISSING, False)
        for path, parent in zip(paths, parents, strict=True)
    ]
    found = tuple(DataFlow(paths.index(one), paths.index(other), *how) for one, other, *how in flows)
    return ModuleGraph("t", tuple(nodes), found, ())


def test_flow_lines_lead_to_visible_modules_and_never_cross_in_a_lane():
    graph = tree(("a.x", "a.y"), ("a.x", "b"), ("a.x", "b.x"), ("b.x", "b.y"), ("b.y", "c"), ("b.y", "b"))
    rows = visible_modules(graph, ())
    assert rows == list(range(8))
    found = {(lane.producer, lane.consumers) for lane in flow_lanes(graph, rows)}
    assert found == {(2, (3, 5)), (5, (6,)), (6, (7,))}  # b.x represents b, and b.y is part of b
    gutter = FlowGutter(flow_lanes(graph, rows))
    assert [gutter.text(row) for row in range(8)] == ["  ", "  ", "╭─", "├→", "│ ", "├→", "├→", "╰→"]
    rows = visible_modules(graph, (1, 4))
    assert rows == [0, 1, 4, 7]
    found = {(lane.producer, lane.consumers) for lane in flow_lanes(graph, rows)}
    assert found == {(1, (2,)), (2, (3,))}


def test_inferred_lines_are_dashed_and_give_way_to_what_is_shown():
    graph = tree(("a.x", "b.x", FUNCTION), ("a.x", "b", FUNCTION), ("a.x", "c", FUNCTION), ("a.y", "c"))
    rows = visible_modules(graph, ())
    found = {(lane.producer, lane.consumers, lane.is_inferred) for lane in flow_lanes(graph, rows)}
    assert found == {(2, (5, 7), True), (3, (7,), False)}  # b.x represents b
    gutter = FlowGutter(flow_lanes(graph, rows))
    assert [gutter.text(row) for row in range(8)] == ["   ", "   ", "╭──", "┊╭─", "┊│ ", "├┼⇢", "┊│ ", "╰┴→"]
    folded = flow_lanes(graph, visible_modules(graph, (1, 4)))
    found = {(lane.producer, lane.consumers, lane.is_inferred) for lane in folded}
    assert found == {(1, (2,), True), (1, (3,), False)}  # a has both kinds: the proven one takes precedence
    graph = tree(("a.x", "b.x", FUNCTION), ("a.x", "b"))
    found = {(lane.producer, lane.consumers, lane.is_inferred) for lane in flow_lanes(graph, rows)}
    assert found == {(2, (5,), True), (2, (4,), False)}  # a proven flow is not dropped in favor of an inferred one


HOW = st.sampled_from(["", "add", FUNCTION])


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), HOW), max_size=12), st.sets(st.integers(0, 7)))
def test_flow_lines_of_one_lane_share_at_most_a_row(flows, folded):
    paths = [node.path for node in tree().nodes]
    graph = tree(*((paths[one], paths[other], how) for one, other, how in flows))
    lanes = flow_lanes(graph, visible_modules(graph, folded))
    for one, other in combinations(lanes, 2):
        assert one.lane != other.lane or one.last <= other.first or other.last <= one.first
        assert (
            one.is_inferred == other.is_inferred
            or one.producer != other.producer
            or {*one.consumers}.isdisjoint(other.consumers)
        )
    gutter = FlowGutter(lanes)
    for row in range(8):
        text = gutter.text(row)
        assert len(text) == gutter.width
        received = [lane for lane in lanes if row in lane.consumers]
        assert text.endswith("→") == any(not lane.is_inferred for lane in received)
        assert text.endswith("⇢") == (bool(received) and all(lane.is_inferred for lane in received))


def test_list_of_a_comparison_opens_at_the_culprit_and_enter_shows_the_finding(root):
    async def steps(d):
        assert isinstance(d.app.screen, ModulesScreen)
        node = d.list.node
        assert node.is_cause
        text = d.list.format_row(d.list.cursor, 110).plain
        assert node.ratio.text in text
        assert node.shape in text
        assert d.line("value").startswith(f" {node.path}")
        await d.press("enter")
        await d.settle()
        assert d.screen.table.finding.site == node.site

    drive(of_pair(root), steps)


def test_modules_fold_and_unfold_and_n_visits_what_is_not_finite(root):
    async def steps(d):
        num = d.list.num_rows
        await d.press("j", "left")
        assert d.list.num_rows < num
        await d.press("right")
        assert d.list.num_rows == num
        at = d.list.cursor
        await d.press("l")
        assert d.list.cursor == at + 1
        await d.press("h", "h")
        assert d.list.cursor <= at
        await d.press("n")
        assert d.list.node.path == "model.layers.2.self_attn.o_proj"
        await d.press("n")
        assert "No other module adds an error of its own." in d.line("keys")
        await d.press("escape")
        assert not isinstance(d.app.screen, ModulesScreen)

    drive(of_run(root), steps, before=["full_stop"])


@pytest.mark.parametrize("width", [40, 80, 200])
def test_narrow_lists_leave_columns_out_and_never_the_name(root, width):
    async def steps(d):
        await d.press("n")
        text = d.list.format_row(d.list.cursor, width - 6).plain
        assert d.list.node.name in text
        assert len(text) <= width - 6
        assert d.list.header(width - 4).plain.lstrip().startswith("module")
        assert text.startswith("│") is (width > 40)

    drive(of_pair(root), steps, (width, 24))
