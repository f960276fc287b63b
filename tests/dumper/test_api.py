"""The process-wide dumper and explicit values: exactly the values that a program dumps by name reach the run."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import forkserver_pool as warm
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jobs import ask
from rank_worker import build
from torch import nn

from tapscope.core import site
from tapscope.core.errors import ConfigError, RecorderError, RuleError, RunExistsError, StepError
from tapscope.dumper import Dumper
from tapscope.dumper.process_dumper import ProcessDumper
from tapscope.dumper.steps.tag_context import ctx
from tapscope.dumper.steps.tag_naming import json_tags, layer_path, port_name
from tapscope.run_format.run import Run
from tapscope.sources import open_run


def _only_run(folder: Path) -> Run:
    (path,) = [each for each in folder.iterdir() if (each / "run.json").is_file()]
    return open_run(path)


def _script(tmp_path: Path, code: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run a script in a separate process, as a user would, with the given environment."""
    path = tmp_path / "program.py"
    path.write_text(code)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TAPSCOPE_")}
    return warm.run("-W", "error", path, env=clean | environ, cwd=tmp_path)


# ---- what is recorded


def test_api_every_kind_of_value_arrives_as_it_is(tmp_path: Path) -> None:
    big_endian = np.arange(4, dtype=">f4")
    frozen = np.arange(3)
    frozen.flags.writeable = False
    with Dumper(None, tmp_path / "run", keep="full") as dumper:
        dumper.dump("tensor", torch.arange(6).reshape(2, 3).T, dims="a b", layer_id=3)
        dumper.dump("array", np.float64(2.5) * np.ones((2, 2)))
        dumper.dump("swapped", big_endian)
        dumper.dump("frozen", frozen[::-1])
        dumper.dump("narrow", np.array([1.5, -2], ml_dtypes.bfloat16))
        dumper.dump("many", {"a": [torch.ones(1), 2], "b": "text"})
        dumper.dump("scalar", np.float32(0.5))
        dumper.dump("none", None)
        dumper.dump("late", lambda: torch.full((2,), 7.0))
        dumper.dump("words", np.array(["x"]))
    run = open_run(tmp_path / "run")
    by_site = {r.key.site: r for r in run.records}
    assert run.array(by_site["layers.3:tap[tensor]"]).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert by_site["layers.3:tap[tensor]"].dims == "a b"
    assert by_site["layers.3:tap[tensor]"].tags == {"layer_id": 3}
    assert run.array(by_site[":tap[swapped]"]).tolist() == [0, 1, 2, 3]
    assert run.array(by_site[":tap[frozen]"]).tolist() == [2, 1, 0]
    assert (by_site[":tap[narrow]"].dtype, run.array(by_site[":tap[narrow]"]).tolist()) == ("bfloat16", [1.5, -2])
    assert run.array(by_site[":tap[many.a.0]"]).tolist() == [1]
    assert by_site[":tap[many.a.1]"].value == {"type": "int", "value": 2}
    assert by_site[":tap[many.b]"].value == {"type": "str", "value": "text"}
    assert by_site[":tap[scalar]"].value == {"type": "float", "value": "0.5"}
    assert by_site[":tap[none]"].value == {"type": "none", "value": None}
    assert run.array(by_site[":tap[late]"]).tolist() == [7, 7]
    assert by_site[":tap[words]"].value == {"type": "object", "class": "numpy.ndarray"}
    assert run.ledger().complete


def test_api_call_overrules_the_context_and_the_layer_is_in_the_site(tmp_path: Path) -> None:
    with Dumper(None, tmp_path / "run", keep="off", rules=["layers.5.*=full", "layers.5:*=full"]) as dumper:
        with ctx(layer_id=4, stage="prefill"):
            dumper.dump("q", torch.ones(1), layer_id=5)
            dumper.dump("q", torch.ones(2))
        dumper.dump("q", torch.ones(3), layer=np.int64(5), stage=None)
    records = open_run(tmp_path / "run").records
    assert [(r.key.site, r.key.occurrence, r.tags) for r in records] == [
        ("layers.5:tap[q]", 0, {"layer_id": 5, "stage": "prefill"}),
        ("layers.5:tap[q]", 1, {"layer": 5}),
    ]


def test_api_function_is_called_once_and_only_for_a_value_that_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def make(name: str) -> Any:
        def value() -> torch.Tensor:
            calls.append(name)
            return torch.ones(2)

        return value

    rules = [
        "*:tap[kept]=full",
        "*:tap[part.a]=full",
        "*:tap[second]=full when=step == 1",
        "*:tap[big]=full min_bytes=1",
    ]
    with Dumper(None, tmp_path / "run", keep="off", rules=rules) as dumper:
        for _ in range(2):
            with dumper.step():
                for name in ("kept", "other", "second", "big", "part"):
                    dumper.dump(name, make(name))
    assert calls == ["kept", "big", "part", "kept", "second", "big", "part"]
    assert "rules that match nothing that was dumped: *:tap[part.a]=full" in caplog.text
    keys = [(r.key.site, r.key.step) for r in open_run(tmp_path / "run").records]
    assert keys == [(":tap[kept]", 0), (":tap[big]", 0), (":tap[kept]", 1), (":tap[second]", 1), (":tap[big]", 1)]


def test_exception_before_the_first_step_is_the_reason_for_an_empty_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Dumper(nn.Linear(2, 2), tmp_path / "idle"):
        pass
    assert f"{tmp_path / 'idle'} has no records: no step was taken" in caplog.text
    caplog.clear()
    with pytest.raises(ValueError, match="wrong input"), Dumper(nn.Linear(2, 2), tmp_path / "ended"):
        raise ValueError("wrong input")
    assert "has no records" not in caplog.text


def test_api_what_goes_wrong_in_a_dump_is_counted_and_never_raised(tmp_path: Path) -> None:
    class Odd:
        @property
        def broken(self) -> int:
            raise RuntimeError("not now")

        fine = 3

        def method(self) -> None: ...

    def fails() -> torch.Tensor:
        raise ValueError("no value today")

    with Dumper(None, tmp_path / "run", keep="full") as dumper:
        dumper.dump("bad", fails)
        dumper.dump(["no", "name"], torch.ones(1))  # type: ignore[arg-type]
        dumper.dump("wrong", torch.ones(2), dims="a b c")
        dumper.dump("tagged", torch.ones(1), layer_id=torch.tensor(3), odd={"x": float("nan"), 1: {2}}, what=object)
        dumper.dump_dict("state", Odd(), layer_id=1)
        dumper.dump_dict("plain", {"a/b": 1, "c]:[": torch.ones(1)})
        dumper.dump("meta", torch.ones(2, device="meta"))
        dumper.dump("told", {"dtype": torch.bfloat16, "device": torch.device("cpu"), "cache": object()})
        dumper.dump("five", torch.ones(2), dims=5)  # type: ignore[arg-type]
        assert dumper.dump_model("model") == 0  # type: ignore[arg-type]
    run = open_run(tmp_path / "run")
    reasons = " ".join(str(e.fields["reason"]) for e in run.events() if e.kind in ("failed", "dims"))
    for text in ("no value today", "unhashable", "'a b c'", "broken", "meta tensor", "'5'", "not a str"):
        assert text in reasons, text
    sites = {r.key.site for r in run.records}
    assert {":tap[wrong]", "layers.1:tap[state.fine]", ":tap[plain.a/b]", ":tap[plain.c);(]"} <= sites
    (tags,) = [r.tags for r in run.records if r.key.site == ":tap[tagged]"]
    assert tags == {"layer_id": "<Tensor of shape ()>", "odd": {"x": "nan", "1": [2]}, "what": "<class 'object'>"}
    account = run.ledger()
    assert (account.failed, account.lost, account.complete, account.problems) == (4, 0, False, [])
    told = {r.key.site: r.value.get("text") for r in run.records if "told" in r.key.site and isinstance(r.value, dict)}
    assert told == {":tap[told.dtype]": "torch.bfloat16", ":tap[told.device]": "cpu", ":tap[told.cache]": None}


@given(st.text(max_size=40) | st.integers() | st.none(), st.integers(-3, 3) | st.text(max_size=3) | st.booleans())
def test_api_any_name_makes_a_site_that_parses(name: Any, layer: Any) -> None:
    text = f"{layer_path(layer)}:tap[{port_name(name)}]"
    parsed = site.parse(text)
    assert (str(parsed), parsed.kind) == (text, "tap")
    assert parsed.layer == (layer if isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 else None)
    assert text.isprintable()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda children: st.lists(children, max_size=80) | st.dictionaries(st.text() | st.integers(), children, max_size=5),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), _JSON, max_size=4))
def test_api_any_tags_become_json(tags: dict[str, Any]) -> None:
    clean = json_tags(tags)
    assert json.loads(json.dumps(clean, allow_nan=False).encode()) == clean
    assert set(clean or ()) == {name for name, value in tags.items() if value is not None}


def test_api_gradients_of_explicit_values_follow_rules_and_the_call(tmp_path: Path) -> None:
    weight = torch.ones(2, requires_grad=True)
    with Dumper(None, tmp_path / "run", keep="full", rules=["*:tap[named].grad=full", "*:tap[off]=off"]) as dumper:
        with dumper.step(phase="train"):
            named, asked, plain, refused, off = (weight * n for n in (2, 3, 5, 7, 11))
            dumper.dump("named", named, dims="h", layer_id=1)
            dumper.dump("asked", asked, grad=True, dims="h", dims_grad="g")
            dumper.dump("plain", plain)
            dumper.dump("named", refused, grad=False)
            dumper.dump("off", off, grad=True)
        (named + asked * 2 + plain + refused + off).sum().backward()  # after the end of its step
    run = open_run(tmp_path / "run")
    grads = {r.key.site: r for r in run.records if r.key.site.endswith(".grad")}
    assert set(grads) == {"layers.1:tap[named].grad", ":tap[asked].grad"}
    named_grad, asked_grad = grads["layers.1:tap[named].grad"], grads[":tap[asked].grad"]
    assert run.array(asked_grad).tolist() == [2, 2]
    assert (named_grad.key.step, named_grad.key.pass_, named_grad.tags) == (0, "backward", {"layer_id": 1})
    assert (named_grad.dims, asked_grad.dims) == ("h", "g")
    assert run.ledger().complete


def test_api_models_parameters_gradients_and_buffers_on_request(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model(torch.randn(4, 2)).square().sum().backward()
    model[0].weight.main_grad = torch.full((2, 2), 9.0)
    with Dumper(None, tmp_path / "run", keep="full", rules=["*:param[bias]=off"]) as dumper:
        taken = dumper.dump_model(model, prefix="actor", epoch=2)
        assert dumper.dump_model(model, prefix="actor.", epoch=2) == taken, "as keys of a state dict are prefixed"
    run = open_run(tmp_path / "run")
    values = {r.key.site: run.array(r) for r in run.records}
    assert taken == len(values) == 9
    assert values["actor.0:param[weight].grad"].tolist() == [[9, 9], [9, 9]]
    np.testing.assert_array_equal(values["actor.1:param[weight]"], model[1].weight.detach().numpy())
    assert "actor.1:buffer[running_mean]" in values
    assert "actor.0:param[bias]" not in values
    assert "actor.0:param[bias].grad" in values
    assert {json.dumps(r.tags) for r in run.records} == {'{"epoch": 2}'}


# ---- steps


def test_api_loop_that_calls_step_at_the_end_of_each_iteration(tmp_path: Path) -> None:
    with Dumper(None, tmp_path / "run") as dumper:
        dumper.dump("early", 1)
        for number in range(3):
            if number != 1:
                dumper.dump("x", number)
            dumper.step()
        dumper.dump("x", 3)
        assert repr(dumper) == f"<Dumper {tmp_path / 'run'}: open, next step 3>"
    assert repr(dumper) == f"<Dumper {tmp_path / 'run'}: closed>"
    run = open_run(tmp_path / "run")
    assert [(r.key.site, r.key.step) for r in run.records] == [
        (":tap[early]", 0),
        (":tap[x]", 0),
        (":tap[x]", 2),
        (":tap[x]", 3),
    ]
    assert sorted(run.steps) == [0, 1, 2, 3]  # an iteration without a value also counts as a step
    assert run.ledger().complete


def test_api_values_outside_a_block_belong_to_the_step_before_or_to_the_first(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="off", rules=[":out=stats", "*:tap*=stats"]) as dumper:
        dumper.dump("before", 0)
        for _ in range(2):
            with dumper.step(phase="train"):
                model(torch.ones(1, 8))
            dumper.dump("after", 0)
        model(torch.ones(1, 8))
        dumper.dump("loss", 0)
    run = open_run(tmp_path / "run")
    assert [(r.key.site, r.key.step) for r in run.records] == [
        (":tap[before]", 0),
        (":out", 0),
        (":tap[after]", 0),
        (":out", 1),
        (":tap[after]", 1),
        (":out", 2),
        (":tap[loss]", 2),
    ]
    assert [run.steps[step][0].info.phase for step in (0, 1, 2)] == ["train", "train", "forward"]
    assert run.ledger().complete


def test_api_value_before_the_call_leaves_the_rows_of_the_call_known(tmp_path: Path) -> None:
    model = nn.Embedding(10, 4)
    with Dumper(model, tmp_path / "run", keep="full") as dumper:
        dumper.dump("before", 0)
        model(torch.tensor([[1, 2, 3]]))
    line = open_run(tmp_path / "run").steps[0][0]
    assert (line.info.grid, list(line.info.token_ids)) == ((1, 3), [1, 2, 3])


def test_api_micro_batches_number_explicit_values(tmp_path: Path) -> None:
    with Dumper(None, tmp_path / "run") as dumper, dumper.step():
        for number in range(2):
            with dumper.micro(number):
                dumper.dump("x", number)
                dumper.dump("x", number)
    keys = [(r.key.micro, r.key.occurrence) for r in open_run(tmp_path / "run").records]
    assert keys == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_api_threads_that_dump_at_once_lose_nothing(tmp_path: Path) -> None:
    with Dumper(None, tmp_path / "run", keep="full") as dumper:

        def work(number: int) -> None:
            for _ in range(200):
                with ctx(thread=number):
                    dumper.dump("x", torch.full((4,), float(number)))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run = open_run(tmp_path / "run")
    assert sorted(r.key.occurrence for r in run.records) == list(range(800))
    assert all(run.array(r)[0] == r.tags["thread"] for r in run.records if r.tags)
    assert run.ledger().complete


# ---- several dumpers and models


def test_api_dumpers_of_one_model_may_close_in_any_order(tmp_path: Path) -> None:
    model = build()
    plain = model.forward
    first = Dumper(model, tmp_path / "first", keep="full").open()
    second = Dumper(model, tmp_path / "second", keep="full").open()
    model(torch.ones(1, 8))
    first.close()
    model(torch.ones(1, 8))
    third = Dumper(model, tmp_path / "third", keep="full").open()
    model(torch.ones(1, 8))
    second.close()
    third.close()
    assert "forward" not in model.__dict__
    assert model.forward == plain
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert [len(open_run(tmp_path / name).steps) for name in ("first", "second", "third")] == [1, 3, 1]
    for name in ("first", "second", "third"):
        assert open_run(tmp_path / name).ledger().complete


def test_api_several_models_of_one_dumper_are_reported_separately(tmp_path: Path) -> None:
    actor, draft = build(), build()
    with Dumper({"actor": actor, "draft": draft}, tmp_path / "run", keep="full") as dumper, dumper.step():
        actor(torch.ones(1, 8))
        draft(torch.zeros(1, 8))
    records = open_run(tmp_path / "run").records
    assert {r.key.model for r in records} == {"actor", "draft"}
    assert len({r.key for r in records}) == len(records) == 12


@pytest.mark.parametrize("settings", [{"rules": ('*:out=full when=model == "actor"',)}, {"filter": 'model == "actor"'}])
def test_api_condition_on_the_model_selects_one_of_several(tmp_path: Path, settings: dict[str, Any]) -> None:
    models = {"actor": nn.Linear(2, 2), "draft": nn.Linear(2, 2)}
    keep = "full" if "filter" in settings else "off"
    with Dumper(models, tmp_path / "run", keep=keep, **settings) as dumper, dumper.step():
        for model in models.values():
            model(torch.ones(1, 2))
    assert {record.key.model for record in open_run(tmp_path / "run").records} == {"actor"}


def test_api_model_that_is_gone_leaves_no_trace(tmp_path: Path) -> None:
    import gc
    import weakref

    model = build()
    gone = weakref.ref(model)
    with Dumper(model, tmp_path / "run", keep="full") as dumper:
        model(torch.ones(1, 8))
        del model
        gc.collect()
        assert gone() is None
        dumper.dump("after", 1)
    assert open_run(tmp_path / "run").ledger().complete


def test_api_capture_that_is_closed_while_an_exception_is_handled_was_not_interrupted(tmp_path: Path) -> None:
    dumper = Dumper(build(), tmp_path / "run").open()
    try:
        raise ValueError("something else")
    except ValueError:
        dumper.close()
    assert open_run(tmp_path / "run").ledger().interrupted_ranks == []


def test_api_exception_is_not_followed_by_the_taps_that_it_kept_from_firing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    with pytest.raises(RuntimeError, match="shapes"), Dumper(model, tmp_path / "run"):
        model(torch.ones(3, 5))
    assert "never fired" not in caplog.text
    assert open_run(tmp_path / "run").ledger().never_fired


@pytest.mark.parametrize(("end", "count"), [("", 1), ("one.open().close(); two.open().close()", 0), ("1 / 0", 0)])
def test_api_process_says_once_at_its_end_that_dumpers_were_never_opened(tmp_path: Path, end: str, count: int) -> None:
    code = f"""
from torch import nn
from tapscope import Dumper
one, two = (Dumper(nn.Linear(2, 2), {str(tmp_path)!r} + "/" + name) for name in ("one", "two"))
{end}
"""
    ended = warm.run("-c", code)
    assert ended.stderr.count("a Dumper was never opened and recorded nothing") == count, ended.stderr


def test_api_dumper_that_was_never_opened_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dumper = Dumper(build(), tmp_path / "run")
    dumper.dump("one", 1)
    dumper.dump("two", 2)
    assert caplog.text.count("dump() of a Dumper that was never opened records nothing") == 1
    with dumper:
        dumper.dump("three", 3)
    dumper.dump("after the end", 4)
    assert caplog.text.count("never opened") == 1


# ---- in memory


def test_api_what_is_recorded_can_be_looked_at_in_memory(tmp_path: Path) -> None:
    model = build()
    dumper = Dumper(model, keep="stats", rules=["layers.1*=off", "*:tap[secret]=off"])
    value = torch.ones(2)
    with dumper.capture_output() as outer, ctx(layer_id=3):
        dumper.dump("x", value, dims="h", note="hi")
        value.add_(1)
        with dumper.capture_output(rules=["layers.1:out=full"], keep="off") as inner:
            model(torch.ones(1, 8))
        dumper.dump("x", value)
        dumper.dump("secret", value)
        dumper.dump("plain", {"a": 1})
    assert [each.tolist() for each in outer.values("x")] == [[1, 1], [2, 2]]
    assert [each.occurrence for each in outer.select("x")] == [0, 1]
    assert (outer[0].site, outer[0].dims, outer[0].tags) == ("layers.3:tap[x]", "h", {"layer_id": 3, "note": "hi"})
    assert inner.sites == ["layers.1:out"]
    assert outer.sites == ["layers.3:tap[x]", "layers.1:out", "layers.3:tap[plain.a]"]
    assert outer.values("plain.a") == [1]
    assert not any(m._forward_hooks for m in model.modules())
    assert list(tmp_path.iterdir()) == []
    with dumper.capture_output() as again:
        model(torch.ones(1, 8))
    assert again.sites == [":in[x]", "layers.0:in[input]", "layers.0:out", ":out"]


def test_api_capture_in_memory_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="full") as dumper:
        model(torch.ones(1, 8))
        with pytest.raises(KeyError), dumper.capture_output() as captures:
            model(torch.ones(1, 8))
            raise KeyError
        model(torch.ones(1, 8))
    assert len(captures) == 6
    run = open_run(tmp_path / "run")
    assert sorted({r.key.step for r in run.records}) == [0, 2]
    assert run.ledger().complete


# ---- changes


def test_api_configure_changes_this_process_between_steps(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="off", control="127.0.0.1:0") as dumper:
        dumper.dump("a", 1)
        with dumper.step():
            dumper.configure(keep="full")
            dumper.dump("b", 1)
            model(torch.ones(1, 8))
        with dumper.step():
            dumper.dump("c", 1)
            model(torch.ones(1, 8))
        assert (
            ask(f"http://{dumper.http}/dumper/configure", {"rules": ["layers.0*=off"]})[1]["config"]["keep"] == "full"
        )
        with pytest.raises(RuleError, match="no site matches"):
            dumper.configure(rules=["layers.7:out=full"])
        with pytest.raises(ConfigError, match="fixed when the dumper starts"):
            dumper.configure(queue_bytes=1)
        dumper.configure(enabled=False)
        assert not any(m._forward_hooks for m in model.modules())
        model(torch.ones(1, 8))
    records = open_run(tmp_path / "run").records
    assert {r.key.step for r in records} == {1}
    assert ":tap[c]" in {r.key.site for r in records}


@pytest.mark.parametrize("expression", ["name == 'q'", "match('q', name)", "name in ('q', 'other')"])
def test_api_name_in_an_expression_is_what_a_value_was_dumped_as(tmp_path: Path, expression: str) -> None:
    with Dumper(None, tmp_path / "run", keep="full", filter=expression) as dumper, dumper.step():
        with ctx(layer_id=1):
            dumper.dump("q", torch.ones(2))
            dumper.dump("k", torch.ones(2))
        dumper.dump("q", {"left": torch.ones(1), "right": 1})
    run = open_run(tmp_path / "run")
    assert [r.key.site for r in run.records] == ["layers.1:tap[q]", ":tap[q.left]", ":tap[q.right]"]
    assert run.ledger().never_held == []


def test_api_expression_that_never_held_is_named_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules = ["*:out=full when=path == 'layers.9'", "*:out=full when=numel > 1000000000", "*:in*=stats when=step == 0"]
    model = build()
    with Dumper(model, tmp_path / "run", keep="off", rules=rules):
        model(torch.ones(1, 8))
    never = ["numel > 1000000000", "path == 'layers.9'"]
    assert sorted(open_run(tmp_path / "run").ledger().never_held) == never
    assert "expressions that were never true: " in caplog.text
    with Dumper(None, tmp_path / "denied", keep="full", filter="name == 'nothing'") as dumper:
        dumper.dump("q", 1)
    said = open_run(tmp_path / "denied").ledger().sentences()
    assert said[0] == "no records: the filter was never true: name == 'nothing'"


def test_api_name_that_no_expression_knows_is_refused_unless_it_is_a_declared_tag(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown name 'nmae' \(did you mean name\?\).*declare a tag: tags=\['nmae'\]"
    ):
        Dumper(None, tmp_path / "run", filter="nmae == 'q'")
    with pytest.raises(RuleError, match="rule .*: unknown name 'user'"):
        Dumper(None, tmp_path / "run", rules=["*=full when=user == 'a'"])
    Dumper(None, tmp_path / "run", rules=["*=full when=user == 'a'", "*=stats tag.user=b"])
    with Dumper(None, tmp_path / "run", filter="user == 'a'", tags=["user"], keep="full") as dumper:
        for user in ("a", "b"):
            dumper.dump(user, 1, user=user)
    assert [r.key.site for r in open_run(tmp_path / "run").records] == [":tap[a]"]


def test_api_what_is_sglangs_alone_is_served_or_complained_of(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Dumper(None, tmp_path / "run", keep="full", grads=True) as dumper, dumper.step():
        dumper.dump("kept", 1, save=True)
        dumper.dump("left", 1, save=False)
        dumper.dump_dict("left", {"a": 1}, save=False)
        assert dumper.dump_model(model, save=False) == 0
        dumper.dump("odd", 1, step=7, get_grad=None, user="a")
        dumper.dump_model(model, get_grad=lambda parameter: parameter * 3, step=9)
    run = open_run(tmp_path / "run")
    records = {r.key.site: r for r in run.records}
    assert sorted(site for site in records if ":tap" in site) == [":tap[kept]", ":tap[odd]"]
    assert records[":tap[odd]"].tags == {"user": "a"}
    assert run.array(records[":param[weight].grad"]).tolist() == (model.weight * 3).tolist()
    reasons = [e.fields["reason"] for e in run.events() if e.kind == "failed"]
    text = "dump_model(step=9) came in step 0, and is recorded there, with the tag step"
    assert reasons == ["dump() takes no get_grad, step: left out", text]


def test_api_deep_wide_and_endless_containers_are_recorded_as_far_as_they_go(tmp_path: Path) -> None:
    deep: Any = torch.ones(2)
    for _ in range(40):
        deep = [deep]
    endless: dict[str, Any] = {"x": torch.ones(1)}
    endless["self"] = endless
    doubling: Any = 1.5
    for _ in range(30):
        doubling = (doubling, doubling)
    names = [f"request-{number}" for number in range(5000)]
    model = nn.Identity()
    with Dumper(model, tmp_path / "run", keep="full") as dumper:
        for name, value in (("deep", deep), ("endless", endless), ("doubling", doubling), ("names", names)):
            dumper.dump(name, value)
        for _ in range(3):
            model({"deep": deep, "endless": endless})
    run = open_run(tmp_path / "run")
    records = {r.key.site: r for r in run.records}
    assert run.array(records[f":tap[deep.{'.'.join('0' * 40)}]"]).tolist() == [1, 1]
    assert records[":tap[endless.self]"].value == {"type": "object", "class": "builtins.dict"}
    assert 20_000 <= sum(site.startswith(":tap[doubling") for site in records) < 50_000
    assert records[":tap[names]"].value["cut"] == 5000
    assert records[":tap[names]"].value["value"][:2] == ["request-0", "request-1"]
    assert records[f":out[deep.{'.'.join('0' * 40)}]"].shape == (2,)
    assert (run.ledger().failed, run.ledger().complete) == (0, True)


def test_api_sets_queues_and_views_are_recorded_in_an_order_that_runs_share(tmp_path: Path) -> None:
    large, small = torch.ones(2, 3), torch.zeros(2)
    mixed = {"plain": {3, 1, 2}, "names": frozenset("ba"), "tensors": {large, small}, "one": frozenset([large])}
    mixed |= {"alike": {small, small.clone()}, "queue": deque([small, large]), "values": {"x": large}.values()}
    mixed |= {"items": {"x": small}.items(), "by_tensor": {large: 1.5}}
    queue: deque[Any] = deque([small])
    queue.append(queue)
    model = nn.Identity()
    with Dumper(model, tmp_path / "run", keep="full") as dumper:
        dumper.dump("v", mixed | {"endless": queue})
        for _ in range(3):  # after the first call, the fast path handles the value
            model(mixed)
    run = open_run(tmp_path / "run")
    records = {r.key.site: r for r in run.records if not r.key.occurrence}
    for place in (":tap[v.{}]", ":out[{}]"):
        assert records[place.format("plain")].value == {"type": "list", "value": [1, 2, 3]}
        assert records[place.format("names")].value == {"type": "list", "value": ["a", "b"]}
        shapes = {name: records[place.format(name)].shape for name in ("tensors.0", "tensors.1", "one.0", "queue.1")}
        assert shapes == {"tensors.0": (2,), "tensors.1": (2, 3), "one.0": (2, 3), "queue.1": (2, 3)}
        assert run.array(records[place.format("values.0")]).tolist() == large.tolist()
        assert run.array(records[place.format("items.0.1")]).tolist() == [0, 0]
        assert records[place.format("by_tensor.0")].value == {"type": "float", "value": "1.5"}
        assert records[place.format("alike")].value == {"type": "object", "class": "builtins.set"}
    assert records[":tap[v.endless.1]"].value is not None
    assert (run.ledger().failed, run.ledger().complete) == (0, True)


def test_api_reset_continues_in_a_new_run_next_to_the_old_one(tmp_path: Path) -> None:
    model = build()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("mine")
    with Dumper(model, tmp_path / "run", keep="full", control="127.0.0.1:0") as dumper, ctx(a=1):
        model(torch.ones(1, 8))
        http = dumper.http
        dumper.reset()
        dumper.dump("x", 1)
        model(torch.ones(1, 8))
        with pytest.raises(RunExistsError, match="not a tapscope run"):
            dumper.reset("taken")
        for taken in ("run", "run-2"):  # the first run, and the current run
            with pytest.raises(RunExistsError, match="already holds a run"):
                dumper.reset(taken)
        with pytest.raises(ConfigError, match="plain name"):
            dumper.reset("../elsewhere")
        with dumper.step(), pytest.raises(StepError, match="do not nest"):
            dumper.reset()
        dumper.reset("third")
        assert (dumper.next_step, dumper.http) == (0, http)
        with dumper.step():
            model(torch.ones(1, 8))
    runs = [open_run(tmp_path / name) for name in ("run", "run-2", "third")]
    assert [sorted(run.steps) for run in runs] == [[0], [0, 1], [0]]
    assert [r.tags for r in runs[1].records if r.value] == [{"a": 1}]
    assert [len(run.records) for run in runs] == [6, 7, 6]
    assert all(run.ledger().complete for run in runs)


def test_api_attached_models_come_and_go(tmp_path: Path) -> None:
    first, second = build(), nn.Linear(8, 2)
    with Dumper(first, tmp_path / "run", keep="full", control="127.0.0.1:0") as dumper:
        handle = dumper.attach(second, name="head")
        with pytest.raises(ConfigError, match="already attached"):
            dumper.attach(first)
        with dumper.step():
            second(first(torch.ones(1, 8)))
        listed = ask(f"http://{dumper.http}/dumper/sites")[1]["modules"]
        handle.remove()
        handle.remove()
        second(torch.ones(1, 8))
    assert any(module["path"].startswith("head") for module in listed)
    assert "forward" not in second.__dict__
    run = open_run(tmp_path / "run")
    assert sorted({(r.key.model, r.key.step) for r in run.records}) == [("", 0), ("head", 0)]


def test_api_two_models_by_one_name_are_refused_for_their_keys_would_be_the_same(tmp_path: Path) -> None:
    first, second = build(), build()
    with Dumper(first, tmp_path / "run", keep="stats") as dumper:
        with pytest.raises(ConfigError, match="another model has this name"):
            dumper.attach(second)
        dumper.attach(second, name="draft").remove()
        dumper.attach(nn.Linear(2, 2), name="draft")  # not referenced, so it is freed immediately
        dumper.attach(second, name="draft")
        state = dumper.get_state()
        assert (state["open"], state["step"], state["config"]["keep"]) == (True, 0, "stats")
        with dumper.step():
            second(first(torch.ones(1, 8)))
    keys = [r.key for r in open_run(tmp_path / "run").records]
    assert len(keys) == len(set(keys))
    assert {key.model for key in keys} == {"", "draft"}


# ---- the process-wide dumper


def test_api_disabled_it_does_nothing_at_all(tmp_path: Path) -> None:
    code = """
import torch
from tapscope import dumper
model = torch.nn.Linear(2, 2)
handle = dumper.attach(model)
dumper.dump("x", lambda: 1 / 0)
dumper.dump_dict("x", {})
with dumper.step(phase="train") as info, dumper.micro(0):
    model(torch.ones(1, 2))
dumper.step()
dumper.metric("loss", 1.0)
assert not dumper.may_enable()
assert dumper.get_state()["open"] is False
handle.remove()
"""
    done = _script(tmp_path, code, TAPSCOPE_DIR=str(tmp_path / "runs"))
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "runs").exists()


def test_api_environment_enables_it_and_the_end_of_the_process_closes_the_run(tmp_path: Path) -> None:
    code = """
import torch
from tapscope import dumper
for number in range(3):
    dumper.dump("x", torch.full((2,), float(number)), layer_id=number)
    dumper.metric("loss", number / 2)
    dumper.step()
"""
    environ = {"TAPSCOPE_ENABLED": "1", "TAPSCOPE_KEEP": "full", "TAPSCOPE_CONSOLE": "yes"}
    done = _script(tmp_path, code, TAPSCOPE_DIR=str(tmp_path / "runs"), **environ)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f"[tapscope rank 0 step {n}] layers.{n}:tap[x] float32 [2] mean {n} absmax {n} nan 0" for n in range(3)
    ]
    run = _only_run(tmp_path / "runs")
    assert [(r.key.site, r.key.step) for r in run.records] == [(f"layers.{n}:tap[x]", n) for n in range(3)]
    assert [m.value for m in run.metrics() if m.name == "loss"] == [0, 0.5, 1]
    assert run.ledger().complete
    assert run.name.startswith("dump-")


def test_api_uncaught_exception_marks_the_run_and_a_wrong_environment_is_reported(tmp_path: Path) -> None:
    code = "from tapscope import dumper\ndumper.dump('x', 1)\nraise KeyError('boom')\n"
    where = {"TAPSCOPE_ENABLED": "1", "TAPSCOPE_DIR": str(tmp_path / "runs"), "TAPSCOPE_EXP_NAME": "one"}
    done = _script(tmp_path, code, **where)
    assert "KeyError: 'boom'" in done.stderr
    account = open_run(tmp_path / "runs/one").ledger()
    assert (account.interrupted_ranks, account.recorded) == ([0], 1)
    done = _script(tmp_path, "from tapscope import dumper\ndumper.dump('x', 1)\nprint('on')", **where)
    assert (done.stdout, done.returncode) == ("on\n", 0)
    assert "tapscope records nothing" in done.stderr
    assert "already holds a run" in done.stderr
    done = _script(tmp_path, "from tapscope import dumper\ndumper.step()", **where)
    assert "RunExistsError" in done.stderr
    done = _script(tmp_path, "from tapscope import dumper\ndumper.dump('x', 1)", **where | {"TAPSCOPE_KEEP": "some"})
    assert (done.returncode, "TAPSCOPE_KEEP" in done.stderr) == (0, True)


def test_api_http_enables_it_later(tmp_path: Path) -> None:
    dumper = ProcessDumper()
    dumper.configure(dir=tmp_path, exp_name="run", control="127.0.0.1:0", keep="full")
    try:
        dumper.dump("x", 1)
        dumper.step()
        assert dumper.may_enable()
        url = f"http://{dumper.http}/dumper/configure"
        assert ask(url, {"enabled": True})[0] == 200
        dumper.step()
        dumper.step()
        dumper.dump("x", 2)
        assert dumper.get_state()["config"]["enabled"] is True
        with pytest.raises(ConfigError, match="fixed while a run is open"):
            dumper.configure(exp_name="other")
    finally:
        dumper.close()
    dumper.dump("x", 3)
    assert [r.value["value"] for r in open_run(tmp_path / "run").records] == [2]


def test_api_configure_default_gives_way_to_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPSCOPE_KEEP", "full")
    monkeypatch.setenv("TAPSCOPE_EXP_NAME", "mine")
    monkeypatch.setenv("TAPSCOPE_BACKPRESSURE", " ")
    dumper = ProcessDumper()
    dumper.configure_default(keep="off", backpressure="drop", exp_name="other", dir=tmp_path)
    state = dumper.get_state()
    assert (state["config"]["keep"], state["config"]["backpressure"]) == ("full", "drop")
    assert state["experiment"] == {"dir": str(tmp_path), "exp_name": "mine", "cleanup_previous": False}
    for wrong in ({"exp_name": "a/b"}, {"exp_name": ".."}, {"cleanup_previous": "yes"}, {"nothing": 1}):
        with pytest.raises(ConfigError):
            dumper.configure(**wrong)
    for wrong in ({"keep": "fulll"}, {"exp_name": "a/b"}, {"nothing": 1}):
        with pytest.raises(ConfigError):
            dumper.configure_default(**wrong)
    with pytest.raises(ConfigError, match="settings are dir, exp_name, cleanup_previous, enabled, keep"):
        dumper.configure(nothing=1)


def test_api_opening_in_the_background_keeps_what_came_first(tmp_path: Path) -> None:
    dumper = ProcessDumper()
    dumper._config = dumper._config.updated({"enabled": True, "keep": "full"})
    dumper._has_read = True
    dumper._experiment = type(dumper._experiment)(dir=tmp_path, exp_name="run")
    dumper.dump("first", torch.ones(2))
    assert dumper._recording is not None
    assert dumper._recording.client is not None
    assert dumper._recording.run is None  # no call has waited for the recorder yet
    dumper.dump("second", torch.ones(2))
    dumper.close()
    run = open_run(tmp_path / "run")
    assert [r.key.site for r in run.records] == [":tap[first]", ":tap[second]"]
    assert run.ledger().complete


def test_api_cleanup_removes_runs_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("old", "busy", "named"):
        with Dumper(None, tmp_path / name) as old:
            old.dump("x", 1)
    (tmp_path / "dump_mine").mkdir()
    (tmp_path / "dump_mine/notes.txt").write_text("mine")
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    with Dumper(None, outside) as old:
        old.dump("x", 1)
    (tmp_path / "link").symlink_to(outside)
    busy = Dumper(None, tmp_path / "busy2").open()
    dumper = ProcessDumper()
    with caplog.at_level(logging.WARNING, "tapscope"):
        dumper.configure(dir=tmp_path, exp_name="named", cleanup_previous=True, enabled=True)
    dumper.dump("x", 2)
    dumper.close()
    busy.close()
    left = sorted(each.name for each in tmp_path.iterdir())
    assert left == ["busy2", "dump_mine", "link", "named"]
    assert open_run(outside).records
    assert [r.value["value"] for r in open_run(tmp_path / "named").records] == [2]
    assert "removed 3 runs" in caplog.text
    assert "is being recorded" in caplog.text


# ---- processes


_RANK = """
import os, sys
from tapscope import dumper
dumper.dump("x", int(os.environ["RANK"]))
dumper.step()
"""


def test_api_ranks_of_a_job_agree_on_a_name_and_jobs_stay_separately(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(_RANK)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TAPSCOPE_")}
    clean |= {"TAPSCOPE_ENABLED": "1", "TAPSCOPE_DIR": str(tmp_path / "runs"), "WORLD_SIZE": "2"}

    def start(job: int, rank: int) -> "subprocess.Popen[bytes]":
        environ = clean | {"RANK": str(rank), "MASTER_PORT": str(20000 + job)}
        return warm.start(program, env=environ)

    ranks = [start(job, rank) for job in range(2) for rank in (1, 0)]
    assert [process.wait(60) for process in ranks] == [0, 0, 0, 0]
    runs = [open_run(path) for path in sorted((tmp_path / "runs").iterdir()) if (path / "run.json").is_file()]
    assert [run.ranks for run in runs] == [(0, 1), (0, 1)]
    assert all(run.ledger().complete for run in runs)


def test_api_rank_that_nobody_names_the_run_for_states_so(tmp_path: Path) -> None:
    from tapscope.dumper.job.run_naming import RunNaming

    with pytest.raises(RecorderError, match=r"rank 1: rank 0 has not named the run in time \(0\.1 s\)"):
        RunNaming(tmp_path, rank=1, world_size=2).agree(timeout_s=0.1)


def test_api_through_the_store_of_torch_distributed(tmp_path: Path) -> None:
    code = """
import sys, torch.distributed as dist
from tapscope import dumper
rank = int(sys.argv[1]) if len(sys.argv) > 1 else None
import torch.multiprocessing as mp

def work(rank, port_file):
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    dumper.configure(enabled=True, keep="full")
    dumper.dump("x", rank)
    dumper.step()
    dist.barrier()
    dist.destroy_process_group()
    dumper.close()

if __name__ == "__main__":
    mp.start_processes(work, ("STORE",), nprocs=2, start_method="fork")
""".replace("STORE", str(tmp_path / "store"))
    done = _script(
        tmp_path,
        code.replace('init_method=f"file', 'init_method="file').replace("{port_file}", str(tmp_path / "store")),
        TAPSCOPE_DIR=str(tmp_path / "runs"),
    )
    assert done.returncode == 0, done.stderr
    run = _only_run(tmp_path / "runs")
    assert run.ranks == (0, 1)
    assert run.ledger().complete


def test_api_forked_child_records_nothing_until_it_opens_its_own_run(tmp_path: Path) -> None:
    code = """
import os, torch
from tapscope import dumper
model = torch.nn.Linear(2, 2)
dumper.start(exp_name="parent", keep="full")
dumper.attach(model)
model(torch.ones(1, 2))
if not os.fork():
    model(torch.ones(1, 2))
    dumper.dump("silent", 1)
    dumper.step()
    dumper.configure(exp_name="child", enabled=True)
    dumper.dump("heard", 1)
    model(torch.ones(1, 2))
    raise SystemExit
os.wait()
model(torch.ones(1, 2))
"""
    done = _script(tmp_path, code, TAPSCOPE_DIR=str(tmp_path))
    assert done.returncode == 0
    (said,) = done.stderr.splitlines()
    assert "nothing is recorded in this process, which was forked from one that records; open a Dumper here" in said
    parent, child = open_run(tmp_path / "parent"), open_run(tmp_path / "child")
    assert sorted(parent.steps) == [0, 1]
    assert parent.ledger().complete
    assert [r.key.site for r in child.records if r.key.site.startswith(":tap")] == [":tap[heard]"]
    assert child.ledger().complete
    assert len(child.records) == 3


def test_api_run_whose_model_was_called_only_in_a_forked_child_states_so(tmp_path: Path) -> None:
    code = """
import os, torch
from tapscope import Dumper
model = torch.nn.Linear(2, 2)
with Dumper(model, "run", keep="full"):
    if not os.fork():
        model(torch.ones(1, 2)), model.forward(torch.ones(1, 2))
        raise SystemExit
    os.wait()
assert "forward" not in model.__dict__
"""
    done = _script(tmp_path, code)
    assert done.returncode == 0
    assert done.stderr.count("nothing is recorded in this process") == 1
    reason = "the model was called only in a forked process, which records nothing; open a Dumper there"
    assert reason in done.stderr
    for command in ("info", "verify"):
        shown = subprocess.run(
            [sys.executable, "-m", "tapscope", command, "run"], cwd=tmp_path, capture_output=True, text=True
        )
        assert shown.returncode == 1
        assert f"no records: {reason}" in shown.stdout
        assert "NO" in shown.stdout


def test_api_torch_is_not_loaded_by_the_package_alone() -> None:
    code = "import sys\nfrom tapscope import dumper\nassert 'torch' not in sys.modules\nassert dumper.dump"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_api_context_holds_for_what_taps_bring_too(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="off", rules=["layers.0:out=full tag.part=actor"]) as dumper:
        with ctx(part="actor", note=torch.ones(3), rate=float("inf")):
            model(torch.ones(1, 8))
        with dumper.ctx(part="critic"):
            model(torch.ones(1, 8))
        model(torch.ones(1, 8))
    run = open_run(tmp_path / "run")
    tags = {"part": "actor", "note": "<Tensor of shape (3,)>", "rate": "inf"}
    assert [(r.key.site, r.key.step, r.tags) for r in run.records] == [("layers.0:out", 0, tags)]
    assert run.ledger().complete


def test_api_compiled_region_leaves_dumps_out_and_states_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dumper = Dumper(None, tmp_path / "run", keep="full")

    @ctx(lambda x: {"size": 1})
    def compute(x: torch.Tensor) -> torch.Tensor:
        dumper.dump("inside", x * 2)
        with ctx(layer_id=3):
            return x + 1

    compiled = torch.compile(compute, backend="eager", fullgraph=True)
    with dumper:
        assert compiled(torch.ones(2)).tolist() == [2, 2]
        compute(torch.ones(2))
    assert caplog.text.count("dump('inside') is called in a compiled region") == 1
    assert [r.key.site for r in open_run(tmp_path / "run").records] == [":tap[inside]"]


def test_api_second_process_dumper_of_the_same_rank_is_refused_and_its_model_runs_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"ENABLED": "1", "DIR": str(tmp_path), "EXP_NAME": "run"}.items():
        monkeypatch.setenv(f"TAPSCOPE_{name}", text)
    first, second, third = ProcessDumper(), ProcessDumper(), ProcessDumper()
    first.step()
    model = build()
    plain = model(torch.ones(1, 8))
    for _ in range(3):
        second.dump("x", model(torch.ones(1, 8)))
    second.close()
    with pytest.raises(RecorderError, match="already has a writer"):
        third.attach(model)
    third.dump("x", 1)  # the open is not retried
    assert third.get_state()["open"] is False
    torch.testing.assert_close(model(torch.ones(1, 8)), plain)
    assert "forward" not in model.__dict__
    first.dump("x", 1)
    first.close()
    assert "tapscope records nothing: rank 0 of" in caplog.text
    assert len(open_run(tmp_path / "run").records) == 1
