"""Injection: recorded values, matched by request and position, replace those of a live model."""

import pytest
import torch
from torch import nn

from tapscope.core.errors import ConfigError
from tapscope.core.observe import RowSpan, StepInfo
from tapscope.dumper import Dumper
from tapscope.dumper.injection import Injector, StoredTensors
from tapscope.sources import open_run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, pair, *, extra):
        return {"sum": self.proj(pair["x"][0]) + extra}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block()
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.block({"x": (x,)}, extra=x)["sum"])


def step_of(number, positions, request="r"):
    """Return a packed step with consecutive positions of one request."""
    span = RowSpan(request, positions[0], len(positions), 0, 0)
    return StepInfo(step=number, grid=(len(positions),), rows=(span,), token_ids=list(positions))


@pytest.fixture
def recorded(tmp_path):
    """Record a run with positions 0-3 and 4-5 of one request."""
    model, x = Net(), torch.arange(24, dtype=torch.float32).reshape(6, 4)
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full") as dumper:
        for number, (a, b) in enumerate([(0, 4), (4, 6)]):
            with dumper.step_of(step_of(number, range(a, b))):
                model(x[a:b])
    with open_run(tmp_path / "run") as run:
        yield run, model, x


def inject(run, model, x, sites, step):
    with torch.no_grad(), Injector(model, StoredTensors(run), sites, lambda: step) as injector:
        return model(x), injector


def test_injector_replaces_nested_arguments_and_keyword_arguments(recorded):
    run, model, x = recorded
    sites = {name: name for name in ("block:in[pair.x.0]", "block:in[extra]")}
    out, injector = inject(run, model, torch.zeros(4, 4), sites, step_of(0, range(4)))
    assert injector.problems == []
    assert injector.injected == dict.fromkeys(sites, 1)
    with torch.no_grad():
        assert torch.equal(out, model(x[:4]))


def test_injector_finds_rows_by_position_in_other_steps(recorded):
    run, model, x = recorded
    out, injector = inject(run, model, torch.zeros(3, 4), {"block:out[sum]": "block:out[sum]"}, step_of(7, range(2, 5)))
    assert injector.problems == []
    with torch.no_grad():
        assert torch.allclose(out, model(x[2:5]))


def test_injector_reports_rows_that_were_not_recorded(recorded):
    run, model, _ = recorded
    zeros = torch.zeros(3, 4)
    out, injector = inject(run, model, zeros, {"last:in[input]": "last:in[input]"}, step_of(0, range(5, 8)))
    assert [p.reason for p in injector.problems] == ["2 of 3 token rows were not recorded"]
    with torch.no_grad():
        assert torch.equal(out, model(zeros))


def test_injector_reports_another_shape(recorded):
    run, _, _ = recorded
    model = nn.Sequential(nn.Linear(3, 3))
    zeros = torch.zeros(4, 3)
    _, injector = inject(run, model, zeros, {"0:in[input]": "last:in[input]"}, step_of(0, range(4)))
    assert [p.reason for p in injector.problems] == ["shape 4×3, recorded 4×4"]


def test_injector_does_not_change_the_callers_mapping(recorded):
    run, model, x = recorded
    given = {"x": (torch.zeros(4, 4),)}
    with (
        torch.no_grad(),
        Injector(model, StoredTensors(run), {"block:in[pair.x.0]": "block:in[pair.x.0]"}, lambda: step_of(0, range(4))),
    ):
        model.block(given, extra=x[:4])
    assert not given["x"][0].any()


def test_injector_rejects_unknown_module(recorded):
    run, model, _ = recorded
    with pytest.raises(ConfigError, match=r"^nowhere:out is not an input or output of a module of this model$"):
        Injector(model, StoredTensors(run), {"nowhere:out": "last:out"}, lambda: None)
