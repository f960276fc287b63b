"""Data flow through functions: what values show, what is inferred from the order, and what is neither."""

import asyncio
import shutil

import ml_dtypes
import numpy as np
import pytest
import torch
from dashboard_driver import Driver
from factories import RunFactory
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tapscope import Dumper, open_run
from tapscope.comparator import CompareOptions
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.diff_source import DiffSource
from tapscope.dashboard.model.data_flow import FUNCTION
from tapscope.dashboard.model.flow_proof import function_of

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def _cast(a, b):
    return a.astype(np.float32 if a.dtype != np.float32 else ml_dtypes.bfloat16)


def _wide(function):
    return lambda a, b: function(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype)


FUNCTIONS = {
    "cast": (_cast, 1),
    "slice": (lambda a, b: a[:, 1:-1], 1),
    "slice rows": (lambda a, b: a[1:-1], 1),
    "slice heads": (lambda a, b: a[..., :8].reshape(*a.shape[:-1], 2, 4), 1),
    "concatenate": (lambda a, b: np.concatenate([a, b], -1), 2),
    "concatenate rows": (lambda a, b: np.concatenate([b, a]), 2),
    "select rows": (lambda a, b: a.reshape(-1, a.shape[-1])[[4, 0, 4]], 1),
    "add": (_wide(np.add), 2),
    "add positions": (lambda a, b: _wide(np.add)(a, b[:1]), 2),
    "multiply": (_wide(np.multiply), 2),
    "multiply channels": (lambda a, b: _wide(np.multiply)(b[0, 0], a), 2),
}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(FUNCTIONS)), st.sampled_from(DTYPES), st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_functions_are_found_among_other_values_and_a_changed_result_is_not(name, dtype, seed, num_others):
    rng = np.random.default_rng(seed)
    values = [rng.standard_normal((3, 4, 16)).astype(dtype) for _ in range(2 + num_others)]
    values.append(np.ones((3, 4, 16), dtype))
    function, num_arguments = FUNCTIONS[name]
    one, other = rng.choice(len(values) - 1, 2, replace=False).tolist()
    result = function(values[one], values[other])
    if name == "add positions":
        values[other] = values[other][:1]
    if name == "multiply channels":
        values[other] = values[other][0, 0]
    found = function_of(result, values)
    assert found is not None
    assert found[0] in name
    assert set(found[1]) == set((one, other)[:num_arguments])
    flat = result.copy().reshape(-1)
    flat[rng.integers(flat.size)] += 1
    assert function_of(flat.reshape(result.shape), values) is None


def test_values_that_are_equal_by_accident_show_nothing():
    ones, zeros = np.ones((8, 16), np.float32), np.zeros((8, 16), np.float32)
    values = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    assert function_of(ones + ones, [ones, zeros]) is None
    assert function_of(values, [zeros, ones, values * 2]) is None
    assert function_of(np.arange(128).reshape(8, 16), [np.arange(128)]) is None
    tiny = np.full((8, 16), 1e-12, np.float32)  # below the resolution of float32: which value was added is undetermined
    changed = values + tiny
    changed[0, 0] += 1
    assert function_of(changed, [values, tiny]) is None


class Block(nn.Module):
    """Block with fused queries and keys, softmax, a residual, and a concatenation with the first value."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(7, 7)
        self.qk, self.v, self.o = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(16, 16)
        self.q_norm, self.norm, self.join, self.head = (
            nn.LayerNorm(16),
            nn.LayerNorm(16),
            nn.Linear(32, 16),
            nn.Linear(16, 5),
        )

    def forward(self, x):
        q, k = self.qk(x).chunk(2, dim=-1)
        mixed = (self.q_norm(q) @ k.mT).softmax(-1) @ self.v(x)
        hidden = x + self.o(mixed)
        normed = self.norm(hidden)
        self.mix(normed.mT)
        return self.head(self.join(torch.cat([normed, x], dim=-1))[:, -1:])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(50, 16), Block()

    def forward(self, ids):
        return self.block(self.embed(ids))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    torch.manual_seed(0)
    path, model = tmp_path_factory.mktemp("flow") / "run", Model().to(torch.bfloat16)
    with torch.no_grad(), Dumper(model, out=path, keep="full"):
        model(torch.arange(14).reshape(2, 7))
    return path


WANTED = {
    ("embed", "block", ""),
    ("embed", "block.qk", ""),
    ("embed", "block.v", ""),
    ("block.qk", "block.q_norm", "slice"),
    ("block.q_norm", "block.o", FUNCTION),
    ("block.v", "block.o", FUNCTION),
    ("embed", "block.norm", "add"),
    ("block.o", "block.norm", "add"),
    ("block.norm", "block.mix", "permute"),
    ("block.norm", "block.join", "concatenate"),
    ("embed", "block.join", "concatenate"),
    ("block.join", "block.head", "slice"),
}


def flows_of(graph):
    return {(graph.nodes[each.producer].path, graph.nodes[each.consumer].path, each.through) for each in graph.flows}


def test_flows_of_a_real_model_go_through_its_functions(recorded):
    assert flows_of(RunSource.open(recorded).module_graph(0, 0)) == WANTED


class Experts(nn.Module):
    """Sixteen experts of two layers; each receives some of the rows."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)) for _ in range(16))

    def forward(self, x):
        rows = [expert(x[[i, (2 * i + 9) % 32, 31 - i]]) for i, expert in enumerate(self.experts)]
        return torch.cat(rows)


def test_rows_of_every_expert_come_from_what_their_module_received(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Experts())
    with torch.no_grad(), Dumper(model, out=tmp_path / "run", keep="full"):
        model(torch.randn(32, 16))
    found = flows_of(RunSource.open(tmp_path / "run").module_graph(0, 0))
    assert {each for each in found if each[0] == "0"} == {
        ("0", "1", ""),
        *(("0", f"1.experts.{i}", "select rows") for i in range(16)),
        *(("0", f"1.experts.{i}.0", "select rows") for i in range(16)),
    }


def test_the_shape_of_a_module_is_that_of_its_output(tmp_path):
    with RunFactory(tmp_path / "run") as run:
        run.step()
        run.put("m.rotary:in[x]", np.ones((2, 8), np.float32))
        run.put("m.rotary:out[0]", np.ones((2, 4), np.float16))
        run.put("m.rotary:out[1]", np.ones((2, 2), np.float16))
    (node,) = (n for n in RunSource.open(tmp_path / "run").module_graph(0, 0).nodes if n.path == "m.rotary")
    assert (node.shape, node.dtype, node.site) == ("2×4", "fp16", "m.rotary:out[0]")


def test_a_comparison_shows_the_functions_of_its_target(recorded):
    source = DiffSource.open((recorded, recorded), CompareOptions())
    found = flows_of(source.modules())
    source.close()
    assert {each for each in found if each[2]} == {each for each in WANTED if each[2]}
    assert {each for each in found if not each[2]} <= {each for each in WANTED if not each[2]}


def test_statistics_show_no_function_and_the_order_is_said_to_be_inferred(tmp_path, recorded):
    run = open_run(recorded)
    with RunFactory(tmp_path / "stats") as factory:
        factory.step()
        for record in run.records:
            if record.dtype is not None:
                factory.put(record.key.site, run.array(record), keep="stats")
    found = flows_of(RunSource.open(tmp_path / "stats").module_graph(0, 0))
    assert {each[2] for each in found} == {"", FUNCTION}
    assert {each for each in found if not each[2]} == {each for each in WANTED if not each[2]}
    assert ("block.o", "block.norm", FUNCTION) in found  # the residual alone cannot be inferred
    assert ("embed", "block.norm", FUNCTION) not in found


def test_nothing_is_inferred_where_an_input_is_known_or_none_came_before(tmp_path):
    rng = np.random.default_rng(0)
    value, mask, result = (rng.standard_normal((4, 8)).astype(np.float32) for _ in range(3))
    with RunFactory(tmp_path / "run") as run:
        run.step()
        run.put("m.first:in[0]", mask)
        run.put("m.first:out", value)
        run.put("m.second:in[0]", value)
        run.put("m.second:in[mask]", mask * 3)
        run.put("m.second:out", result)
        run.put("other.third:in[0]", mask * 5)
    found = flows_of(RunSource.open(tmp_path / "run").module_graph(0, 0))
    assert found == {("m.first", "m.second", ""), ("m.second", "other.third", FUNCTION)}


def test_values_that_cannot_be_read_leave_flows_inferred(recorded, tmp_path):
    path = shutil.copytree(recorded, tmp_path / "torn")
    source = RunSource.open(path)
    for segment in path.rglob("*.safetensors"):
        segment.unlink()
    found = flows_of(source.module_graph(0, 0))
    assert {each[2] for each in found} == {"", FUNCTION}
    assert ("block.o", "block.norm", FUNCTION) in found


def test_screen_names_the_function_and_draws_inferred_flows_apart(recorded):
    async def go():
        app = TapscopeApp(lambda: RunSource.open(recorded))
        async with app.run_test(size=(140, 40)) as pilot:
            driver = Driver(app, pilot)
            await driver.settle()
            await driver.press("T")
            await driver.settle()
            screen = app.screen
            names = [node.path for node in screen.graph.nodes]
            lines = {}
            for path in ("block.norm", "block.o", "block.v"):
                screen.list.reveal(names.index(path))
                await driver.settle()
                text = screen.list.format_row(screen.list.cursor, 120).plain
                lines[path] = str(screen.query_one("#value").content), text
        assert " · from embed, o through add" in lines["block.norm"][0]
        assert " · perhaps from q_norm, v through a function" in lines["block.o"][0]
        assert " · perhaps to o through a function" in lines["block.v"][0]
        assert "→" in lines["block.norm"][1]
        assert "⇢" not in lines["block.norm"][1]
        assert "⇢" in lines["block.o"][1]

    asyncio.run(go())
