"""The dumper never breaks the model and never loses values silently."""

import copy
import copyreg
import functools
import importlib
import inspect
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import Job, ask, wait_until
from rank_worker import build
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tapscope.core.errors import ConfigError, RecorderError, RuleError, RunExistsError, StepError
from tapscope.core.observe import RankInfo, RowSpan, StepInfo
from tapscope.dumper import Dumper
from tapscope.run_format.run import Run
from tapscope.sources import open_run


class Twice(nn.Module):
    """Returns keys that are equal as text, and equal bytes under different names."""

    def forward(self, x: torch.Tensor) -> dict[Any, Any]:
        a = x + 1
        return {1: a, "1": x + 2, "c": a.clone(), "x:y": x, "": x + 3, "n": list(range(100))}


def test_dumper_similar_paths_are_separate_sites(tmp_path: Path) -> None:
    model = Twice()
    with Dumper(model, tmp_path / "run", keep="full"):
        model(torch.zeros(2))
    run = open_run(tmp_path / "run")
    values = {r.key.site: run.array(r).tolist() for r in run.records if r.dtype}
    assert values == {
        ":in[x]": [0, 0],
        ":out[1]": [1, 1],
        ":out[1~2]": [2, 2],
        ":out[c]": [1, 1],
        ":out[x;y]": [0, 0],
        ":out[(empty)]": [3, 3],
    }
    (plain,) = [r for r in run.records if r.value]
    assert plain.value == {"type": "list", "value": list(range(100))}


@pytest.mark.parametrize("keep", ["full", "stats"])
def test_dumper_default_device_and_fake_tensors_crash_nothing(tmp_path: Path, keep: str) -> None:
    model = nn.Linear(4, 4)
    with Dumper(model, tmp_path / "run", keep=keep), torch.no_grad():
        with torch.device("meta"):
            assert model(torch.ones(1, 4, device="cpu")).device.type == "cpu"
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.ones(1, 4))
        torch.vmap(model)(torch.ones(3, 4))
        model(torch.ones(1, 4))
    run = open_run(tmp_path / "run")
    account = run.ledger()
    assert account.failed > 0
    assert account.lost == 0
    assert {r.key.step for r in run.records} == {0, 3}


def test_dumper_copies_and_pickles_of_a_attached_model_are_plain_models_of_their_own(tmp_path: Path) -> None:
    model = build()
    x = torch.ones(1, 8)
    with torch.no_grad(), Dumper(model, tmp_path / "run") as dumper:
        expected = model(x)
        replica = copy.deepcopy(model)
        for parameter in replica.parameters():
            parameter.zero_()
        assert replica(x).abs().sum() == 0
        linear = pickle.loads(pickle.dumps(model.layers["0"]))  # noqa: S301 - our own bytes
        torch.testing.assert_close(linear(x), model.layers["0"](x))
        assert dumper.next_step == 1
        torch.testing.assert_close(model(x), expected)
    assert replica(x).abs().sum() == 0
    assert not any(r.key.step not in (0, 1) for r in open_run(tmp_path / "run").records)


PLAIN_LOADER = """
import sys, torch
from pathlib import Path
import zoo
class Refuse:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] == "tapscope":
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
for file in sorted(Path(".").glob("*/*.pt")):
    model = torch.load(file, weights_only=False)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules()), file
    assert not any(m._forward_pre_hooks_with_kwargs for m in model.modules()), file
    assert "forward" not in model.__dict__, file
    assert model(torch.ones(1, 4)).tolist() == torch.load(file.with_name("expected.out")).tolist()
    print(file)
"""
ZOO = """
from torch import nn
class Zoo(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU())
    def forward(self, x, *, scale=2.0):
        return self.b(self.a(x)) * scale
class Own(Zoo):
    def __getstate__(self):
        return super().__getstate__() | {"note": "mine"}
def theirs(module, args, output):
    pass
"""


def test_dumper_model_saved_under_taps_is_loaded_plain_where_there_is_no_tapscope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zoo.py").write_text(ZOO)
    (tmp_path / "load.py").write_text(PLAIN_LOADER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "zoo", raising=False)
    zoo = importlib.import_module("zoo")
    table = dict(copyreg.dispatch_table)
    for kind in ("Zoo", "Own"):
        model, to = getattr(zoo, kind)(), tmp_path / kind
        to.mkdir()
        with Dumper(model, to / "run", keep="full", grads=True), Dumper(model, to / "other", keep="stats"):
            with torch.no_grad():
                torch.save(model(torch.ones(1, 4)), to / "expected.out")
            torch.save(model, to / "saved.pt")
            torch.save(copy.deepcopy(model), to / "deepcopy.pt")
            torch.save(copy.copy(model), to / "copy.pt")
            for protocol in (2, pickle.HIGHEST_PROTOCOL):
                torch.save(pickle.loads(pickle.dumps(model, protocol)), to / f"{protocol}.pt")  # noqa: S301
    assert copyreg.dispatch_table == table
    done = subprocess.run([sys.executable, "load.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 10


def test_dumper_copy_keeps_the_hooks_of_others_and_an_own_forward(tmp_path: Path) -> None:
    model = build()
    model.layers["0"].register_forward_hook(_of_others, with_kwargs=True)
    model.forward = functools.partial(type(model).forward, model)
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        replica = copy.deepcopy(model)
    (hook,) = replica.layers["0"]._forward_hooks.values()
    assert hook is _of_others
    assert list(replica.layers["0"]._forward_hooks_with_kwargs.values()) == [True]
    assert isinstance(replica.forward, functools.partial)
    assert replica.forward.args[0] is replica


def _of_others(*args: Any) -> None:
    """A forward hook of other code."""


def _own_forward(model: nn.Module) -> Any:
    return model.forward.__func__(model, torch.ones(1, 8))  # type: ignore[attr-defined]


READERS: dict[str, Callable[[nn.Module], Any]] = {
    "export": lambda model: torch.export.export(model, (torch.ones(1, 8),)).module()(torch.ones(1, 8)),
    "strict export": lambda m: torch.export.export(m, (torch.ones(1, 8),), strict=True).module()(torch.ones(1, 8)),
    "fx": lambda model: torch.fx.symbolic_trace(model)(torch.ones(1, 8)),
    "jit.script": lambda model: torch.jit.script(model)(torch.ones(1, 8)),
    "jit.trace": lambda model: torch.jit.trace(model, (torch.ones(1, 8),))(torch.ones(1, 8)),
    "functional_call": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (torch.ones(1, 8),)),
    "__func__": _own_forward,
    "signature": lambda model: inspect.signature(model.forward).parameters and model(torch.ones(1, 8)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dumper_what_reads_a_model_reads_a_attached_one_alike(tmp_path: Path, reader: str) -> None:
    model = build()
    read = READERS[reader]
    with torch.no_grad():
        expected = read(model)
        with Dumper(model, tmp_path / "run", keep="full"):
            assert torch.equal(read(model), expected)
            assert model.forward.__self__ is model
            model(torch.ones(1, 8))
    assert "forward" not in model.__dict__
    sites = {r.key.site for r in open_run(tmp_path / "run").records}
    assert {":out", "layers.0:out"} <= sites


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dumper_scripted_wrapper_shares_parameters_and_keeps_the_taps(tmp_path: Path) -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    inner.append(inner[0])  # the same module at two paths
    outer, x = nn.Sequential(nn.ReLU(), inner), torch.ones(1, 8)
    with torch.no_grad(), Dumper(inner, tmp_path / "run", keep="full"):
        scripted = torch.jit.script(outer)
        assert outer[1] is inner
        assert torch.equal(scripted(x), outer(x))
        inner[0].weight.mul_(2)
        assert torch.equal(scripted(x), outer(x))
    assert not hasattr(nn.Module, "__prepare_scriptable__")
    assert {r.key.step for r in open_run(tmp_path / "run").records if r.key.site == "1.0:out"} == {0, 1}


class Root(nn.Module):
    """Calls a child whose forward has no named arguments, and one with keyword-only arguments."""

    class Open(nn.Module):
        def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            return args[0] + kwargs["bias"]

    class Keyword(nn.Module):
        def forward(self, *, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    def __init__(self) -> None:
        super().__init__()
        self.op, self.kw = Root.Open(), Root.Keyword()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kw(x=self.op(x, bias=x))


def _record(path: Path, model: nn.Module, *inputs: torch.Tensor, **settings: Any) -> Run:
    with torch.no_grad(), Dumper(model, path, **{"keep": "full"} | settings):
        for x in inputs:
            model(x)
    return open_run(path)


def test_dumper_inputs_that_no_signature_names_are_captured(tmp_path: Path) -> None:
    everything = {r.key.site for r in _record(tmp_path / "all", Root(), torch.ones(2)).records}
    assert {"op:in[args.0]", "op:in[bias]", "kw:in[x]"} <= everything
    chosen = _record(tmp_path / "some", Root(), torch.ones(2), keep="off", rules=["op:in*=full"])
    assert {r.key.site for r in chosen.records} == {"op:in[args.0]", "op:in[bias]"}


@pytest.mark.parametrize("rule", ["layers.[0-1].0=full", "layers.0:in[nothing]=full"])
def test_dumper_rule_with_brackets_that_can_match_nothing_is_refused(tmp_path: Path, rule: str) -> None:
    with pytest.raises(RuleError, match="no site matches"):
        Dumper(build(), tmp_path / "run", rules=[rule]).open()


def test_dumper_rows_that_the_host_reports_are_never_replaced(tmp_path: Path) -> None:
    model = nn.Embedding(10, 4)
    rows = [RowSpan("req7", 3, 4, 0, 0)]
    with Dumper(model, tmp_path / "run") as dumper:
        with dumper.step(rows=rows, token_ids=[1, 2, 3, 4]):
            model(torch.tensor([[1, 2, 3, 4]]))
        with dumper.step_of(StepInfo(step=1, row_sets={"a": [1]})):
            model(torch.tensor([[1, 2]]))
        with dumper.step():
            model(torch.tensor([[1, 2]]))
            model(torch.tensor([[1, 2, 3]]))
    run = open_run(tmp_path / "run")
    assert run.steps[0][0].info.rows == tuple(rows)
    assert run.steps[1][0].info.row_sets == {"a": (1,)}
    assert run.steps[2][0].info.grid == (1, 2)
    assert any("called again in step 2" in e.fields["reason"] for e in run.events() if e.kind == "failed")


@pytest.mark.soak
def test_dumper_two_changes_while_idle_are_both_applied_in_order(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="stats", control="127.0.0.1:0") as dumper:
        url = f"http://{dumper.http}/dumper"
        assert ask(f"{url}/reset", {"run": "second"})[0] == 200
        assert ask(f"{url}/configure", {"keep": "full"})[0] == 200
        model(torch.ones(1, 8))
        assert ask(f"{url}/configure", {"keep": "stats"})[0] == 200
        assert ask(f"{url}/reset", {"run": "third"})[0] == 200
        model(torch.ones(1, 8))
    first, second, third = (open_run(tmp_path / name) for name in ("run", "second", "third"))
    assert first.records == []
    assert all(r.entry for r in second.records)
    assert second.records
    assert third.records
    assert not any(r.entry for r in third.records)
    assert third.manifest["config"]["keep"] == "stats"


def test_dumper_rank_that_comes_late_takes_over_configuration_and_run(tmp_path: Path) -> None:
    first, late = build(), build()
    ranks = [RankInfo(rank=rank, world_size=2) for rank in (0, 1)]
    with Dumper(first, tmp_path / "run", info=ranks[0], keep="stats", control="127.0.0.1:0") as dumper:
        url = f"http://{dumper.http}/dumper"
        assert ask(f"{url}/configure", {"keep": "full"})[0] == 200
        assert ask(f"{url}/reset", {"run": "second"})[0] == 200
        first(torch.ones(1, 8))
        with Dumper(late, tmp_path / "run", info=ranks[1], keep="stats") as other:
            late(torch.ones(1, 8))
            assert other.epoch == dumper.epoch
    run = open_run(tmp_path / "second")
    assert run.ranks == (0, 1)
    assert all(r.entry for r in run.records)


def test_dumper_failed_reset_is_an_answer_and_the_recording_continues(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", control="127.0.0.1:0") as dumper:
        url = f"http://{dumper.http}/dumper"
        status, answer = ask(f"{url}/reset", {"run": "x" * 115 + "y" * 200})
        assert (status, "plain name" in answer["error"]) == (400, True)
        (tmp_path / "taken").write_text("")
        status, answer = ask(f"{url}/reset", {"run": "taken"})
        assert (status, "exists" in answer["error"]) == (400, True)
        model(torch.ones(1, 8))
    assert open_run(tmp_path / "run").ledger().complete


def test_dumper_strict_leaves_the_users_own_exception_alone(tmp_path: Path) -> None:
    class Interrupted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    model = Interrupted()
    with pytest.raises(KeyboardInterrupt), Dumper(model, tmp_path / "run", keep="full", backpressure="strict"):
        os.kill(json.loads((tmp_path / "run/recorder.json").read_text())["pid"], signal.SIGKILL)
        model(torch.ones(1))


def test_dumper_dropped_values_are_reported_at_once_at_the_end_and_in_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full", backpressure="drop", queue_bytes=4096):
        for _ in range(20):
            model(torch.ones(64, 8))
    run = open_run(tmp_path / "run")
    assert "drops values from step" in caplog.text
    assert "values were dropped" in caplog.text
    assert sum(e.fields["num_values"] for e in run.events() if e.kind == "dropped") == run.ledger().dropped > 0


def test_dumper_reopening_with_control_works_at_once(tmp_path: Path) -> None:
    model = build()
    for number in range(3):
        with Dumper(model, tmp_path / "run", force=True, control="127.0.0.1:0") as dumper:
            model(torch.ones(1, 8))
            assert ask(f"http://{dumper.http}/dumper/configure", {"keep": "full"})[1]["epoch"] == 1, number
            model(torch.ones(1, 8))
    assert sorted(open_run(tmp_path / "run").steps) == [0, 1]


@pytest.mark.soak
def test_dumper_same_dumper_may_be_opened_again(tmp_path: Path) -> None:
    model = build()
    dumper = Dumper(model, tmp_path / "run", force=True, control="127.0.0.1:0")
    for _ in range(2):
        with dumper:
            ask(f"http://{dumper.http}/dumper/configure", {"keep": "full"})
            model(torch.ones(1, 8))
    run = open_run(tmp_path / "run")
    assert list(run.steps) == [0]
    assert all(r.entry for r in run.records)


def test_dumper_capture_that_waits_for_a_rank_gives_way_to_the_next(tmp_path: Path) -> None:
    model, info = build(), RankInfo(rank=0, world_size=2)
    for _ in range(2):
        with Dumper(model, tmp_path / "run", info=info, force=True):
            model(torch.ones(1, 8))
    assert open_run(tmp_path / "run").ledger().missing_ranks == [1]


def test_dumper_ranks_that_took_different_steps_are_incomplete(tmp_path: Path) -> None:
    with Job(tmp_path / "run", 2, keep="stats", control="127.0.0.1:0") as job:
        wait_until(lambda: min(job.steps()) > 1, "both step")
        job.end()
    run = open_run(tmp_path / "run")
    numbers = [sum(rank in by_rank for by_rank in run.steps.values()) for rank in (0, 1)]
    uneven = [rank for rank in (0, 1) if numbers[rank] < len(run.steps)]
    assert run.ledger().uneven_ranks == uneven
    assert run.ledger().complete is not bool(uneven)


def test_dumper_metrics_that_are_no_numbers_are_null_on_disk_and_nan_in_memory(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run") as dumper:
        with dumper.step():
            model(torch.ones(1, 8))
            dumper.metric("loss", float("nan"))
        with pytest.raises(StepError, match="outside a step"):
            dumper.metric("loss", 1.0)
    lines = (tmp_path / "run/rank-00000/records.jsonl").read_text().splitlines()
    parsed = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert {"type": "metric", "step": 0, "name": "loss", "value": None} in parsed
    assert all("time" in line for line in parsed if line["type"] == "event")
    (loss,) = [m.value for m in open_run(tmp_path / "run").metrics() if m.name == "loss"]
    assert np.isnan(loss)
    with pytest.raises(StepError, match="not open"), dumper.step():
        pass


def test_dumper_text_that_is_no_text_does_not_end_the_capture(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> list[Any]:
            return [x, "\ud800", np.float64(3)]

    run = _record(tmp_path / "run", Odd(), torch.ones(2), torch.ones(2))
    assert run.ledger().complete
    assert [r.value for r in run.records if r.value][:2] == [
        {"type": "str", "value": "?"},
        {"type": "float", "value": "3.0"},
    ]


def test_dumper_place_where_no_run_can_be_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file/run", tmp_path / "file"):
        with pytest.raises((ConfigError, RecorderError, Exception)) as caught:
            Dumper(build(), out).open()
        assert type(caught.value).__module__ == "tapscope.core.errors"
    assert not any(m._forward_hooks for m in build().modules())


def test_dumper_what_a_failed_start_left_does_not_block_the_next(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recorder.log").write_text("it said something")
    (tmp_path / "run/recorder.json").write_text('{"pid": 999999999, "address": "ipc:///nowhere/x", "wire": 1}')
    _record(tmp_path / "run", build(), torch.ones(1, 8))
    assert open_run(tmp_path / "run").ledger().complete


def test_dumper_odd_parameters_do_not_keep_a_model_from_being_attached(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, dtype=torch.complex128))
            self.lazy = nn.LazyLinear(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lazy(x)

    run = _record(tmp_path / "run", Odd(), torch.ones(1, 3))
    assert run.manifest["dtype"] == "complex128"
    assert {r.key.site for r in run.records} >= {"lazy:out"}


def test_dumper_root_heeds_the_ports_it_declares(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.tap_ports = ("out",)
    assert {r.key.site for r in _record(tmp_path / "run", model, torch.ones(1, 2)).records} == {":out"}


def test_dumper_capture_that_ended_by_an_exception_states_so(tmp_path: Path) -> None:
    model = build()
    with pytest.raises(KeyboardInterrupt), Dumper(model, tmp_path / "run"):
        model(torch.ones(1, 8))
        raise KeyboardInterrupt
    account = open_run(tmp_path / "run").ledger()
    assert (account.interrupted_ranks, account.complete) == ([0], False)
    assert "cut short by an exception or a signal: rank 0" in account.sentences()


def test_dumper_foreign_directory_is_left_untouched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with pytest.raises(RunExistsError, match="not a tapscope run"):
        Dumper(build(), tmp_path / "mine", force=True).open()
    assert [entry.name for entry in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("glob", "meant"),
    [
        ("layers.0.out", "layers.0:out"),
        ("*tap[*]", "*:tap[*]"),
        ("1.param[weight]", "1:param[weight]"),
        ("*:in.grad", "*:in[*].grad"),
    ],
)
def test_dumper_rule_that_forgets_the_colon_or_the_brackets_is_reported_so(
    tmp_path: Path, glob: str, meant: str
) -> None:
    with pytest.raises(RuleError, match=f"did you mean '{re.escape(meant)}'"):
        Dumper(build(), tmp_path / "run", rules=[f"{glob}=full"]).open()
    Dumper(build(), tmp_path / "run", rules=[f"{meant}=full"]).open().close()


def test_dumper_what_is_no_model_and_what_are_no_rows_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model is a str; a Dumper needs a torch\.nn\.Module"):
        Dumper("model", tmp_path / "run")
    with Dumper(build(), tmp_path / "run") as dumper:
        for rows in ([(1, 0, 17)], [RowSpan(1, 0, 17, 0, 0)]):
            with pytest.raises(StepError, match="is not a tapscope.core.observe.RowSpan"), dumper.step(rows=rows):
                pass


@pytest.mark.parametrize(
    ("about", "rule"),
    [
        ({"phase": None}, "phase=None: must be a string"),
        ({"grid": 17}, "grid=17: must be a one-dimensional sequence of integers"),
        ({"grid": (1, -1)}, "must be the lengths of the token axes"),
        ({"rows": None}, "rows=None: must be a list"),
        ({"rows": [RowSpan("a", -1, 3, 0, 0)]}, "must be integers ≥ 0"),
        ({"rows": [RowSpan("a", 0, 5, 0, 2)], "grid": (2, 3)}, r"slot 6, but grid=\(2, 3\) has 6 slots"),
        ({"rows": [RowSpan("a", 0, 5, 0, 0)], "token_ids": [1, 2]}, "token_ids has 2 numbers, but rows has 5 rows"),
        ({"token_ids": ["a"]}, "token_ids=.*integers"),
    ],
)
def test_dumper_step_that_no_reader_would_take_is_refused_where_it_is_reported(
    tmp_path: Path, about: dict[str, Any], rule: str
) -> None:
    model = build()
    with Dumper(model, tmp_path / "run") as dumper:
        with pytest.raises(StepError, match=rule):
            dumper.step(**about)
        with dumper.step():
            model(torch.ones(1, 8))
            for call in (lambda: dumper.micro(-1), lambda: dumper.metric("loss", "low"), lambda: dumper.metric(1, 2)):
                with pytest.raises(StepError):
                    call()
    assert sorted(open_run(tmp_path / "run").steps) == [0]


def test_dumper_rows_of_a_step_may_be_reported_by_tensors_and_arrays(tmp_path: Path) -> None:
    model, ids = build(), torch.arange(6)
    with Dumper(model, tmp_path / "run") as dumper:
        for told in (ids, ids.numpy(), list(ids.numpy())):
            with dumper.step(grid=torch.Size([2, 3]), rows=[RowSpan("a", 0, 6, 0, 0)], token_ids=told):
                model(torch.ones(1, 8))
                dumper.metric("loss", torch.tensor(0.5))
    run = open_run(tmp_path / "run")
    assert [tuple(run.steps[step][0].info.token_ids) for step in range(3)] == [tuple(range(6))] * 3


def test_dumper_what_was_flushed_is_in_the_run_while_it_is_open(tmp_path: Path) -> None:
    model = build()
    with torch.no_grad(), Dumper(model, tmp_path / "run") as dumper:
        for expected in range(1, 4):
            model(torch.ones(1, 8))
            assert dumper.flush()
            assert len(open_run(tmp_path / "run").steps) == expected
    with pytest.raises(StepError, match=r"flush\(\)"):
        dumper.flush()
