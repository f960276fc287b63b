"""Taps record all inputs and outputs of a module, with the values at the time of the firing."""

import gc
import json
import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from jobs import ask, wait_until
from torch import nn

from tapscope.core.observe import StepInfo
from tapscope.core.site import parse
from tapscope.dumper import Dumper
from tapscope.run_format.run import Run
from tapscope.sources import open_run


@dataclass
class Pack:
    left: torch.Tensor
    right: tuple[torch.Tensor, None]


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Zoo(nn.Module):
    """Returns every supported kind of container."""

    def forward(self, x: torch.Tensor, *, scale: float = 2.0, extra: dict[str, Any] | None = None) -> Any:
        return {"a": x, "b": [x * scale, Pack(x + 1, (x + 2, None))], "c": Pair(x + 3, x + 4), "n": 5, "s": "text"}


class InPlace(nn.Module):
    """Modifies its input in place, and later its own output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.zoo = Zoo()
        self.inplace = InPlace()
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.zoo(x, scale=3.0, extra={"mask": x > 0})
        y = self.inplace(x.clone())
        y.mul_(100)
        return self.inplace(y)


def _record(path: Path, model: nn.Module, *inputs: torch.Tensor, **settings: Any) -> Run:
    with torch.no_grad(), Dumper(model, path, **{"keep": "full", **settings}):
        for x in inputs:
            model(x)
    return open_run(path)


def _values(run: Run, site: str, occurrence: int = 0) -> np.ndarray:
    record = next(r for r in run.records if r.key.site == site and r.key.occurrence == occurrence)
    return run.array(record)


def test_taps_every_nested_output_and_named_input_is_kept_by_its_path(tmp_path: Path) -> None:
    x = torch.tensor([[1.0, -2.0]])
    run = _record(tmp_path / "run", Root(), x)
    values = {
        "zoo:in[x]": x,
        "zoo:in[extra.mask]": x > 0,
        "zoo:out[a]": x,
        "zoo:out[b.0]": x * 3,
        "zoo:out[b.1.left]": x + 1,
        "zoo:out[b.1.right.0]": x + 2,
        "zoo:out[c.first]": x + 3,
        "zoo:out[c.second]": x + 4,
    }
    for site, expected in values.items():
        np.testing.assert_array_equal(_values(run, site), expected.numpy())
    plain = {r.key.site: r.value for r in run.records if r.value}
    assert plain["zoo:out[n]"] == {"type": "int", "value": 5}
    assert plain["zoo:out[s]"] == {"type": "str", "value": "text"}
    assert plain["zoo:in[scale]"] == {"type": "float", "value": "3.0"}


def test_taps_later_change_in_place_does_not_show_and_firings_are_numbered(tmp_path: Path) -> None:
    run = _record(tmp_path / "run", Root(), torch.zeros(1, 2))
    assert _values(run, "inplace:in[x]").tolist() == [[0, 0]]
    assert _values(run, "inplace:out").tolist() == [[1, 1]]
    assert _values(run, "inplace:in[x]", 1).tolist() == [[100, 100]]
    assert _values(run, "inplace:out", 1).tolist() == [[101, 101]]


@pytest.mark.parametrize("how", ["call", "forward"])
def test_taps_root_is_seen_once_whether_called_or_forwarded(tmp_path: Path, how: str) -> None:
    model = Root()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        model(torch.ones(1, 2)) if how == "call" else model.forward(torch.ones(1, 2))
    run = open_run(tmp_path / "run")
    assert [r.key.site for r in run.records if r.key.site.startswith(":")] == [":in[x]", ":out"]
    assert len(run.steps) == 1


def test_tap_that_never_fired_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = _record(tmp_path / "run", Root(), torch.ones(1, 2))
    assert run.ledger().never_fired == ["unused:out"]
    assert "taps that never fired (1): unused:out" in caplog.text
    model = Root()
    model.unused.tap_is_optional = True
    assert _record(tmp_path / "optional", model, torch.ones(1, 2)).ledger().never_fired == []


def test_taps_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = Root()
    _record(tmp_path / "run", model, torch.ones(1, 2))
    assert "forward" not in model.__dict__
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_taps_nothing_selected_means_no_hook_at_all(tmp_path: Path) -> None:
    model = Root()
    with Dumper(model, tmp_path / "run", keep="off"):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with Dumper(model, tmp_path / "run2", keep="off", rules=["zoo:out[c.first]=full"]):
        hooked = [name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
        assert hooked == ["zoo"]
        model(torch.ones(1, 2))
    assert [r.key.site for r in open_run(tmp_path / "run2").records] == ["zoo:out[c.first]"]


def test_taps_first_rule_that_matches_decides(tmp_path: Path) -> None:
    run = _record(tmp_path / "run", Root(), torch.ones(1, 2), rules=["zoo:in*=off", "zoo=stats", "inplace:out=full"])
    kinds = {r.key.site: r.entry is not None for r in run.records if r.dtype}
    assert "zoo:in[x]" not in kinds
    assert kinds["zoo:out[a]"] is False
    assert kinds["inplace:out"] is True
    assert kinds[":out"] is True


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.tensor(3.5),
            torch.empty(0, 4),
            torch.arange(12.0).reshape(3, 4).t()[1:],
            torch.arange(6, dtype=torch.float32).expand(2, 6),
            torch.ones(4, dtype=torch.bfloat16) / 3,
            torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
            torch.tensor([1 + 2j, 3 - 4j]),
            torch.tensor([2**53 + 1]),
        ]


def test_taps_scalars_empties_views_and_rare_dtypes_are_kept_exactly(tmp_path: Path) -> None:
    model = Odd()
    with torch.inference_mode(), Dumper(model, tmp_path / "run", keep="full"):
        model(torch.ones(1))
    run = open_run(tmp_path / "run")
    expected = model(torch.ones(1))
    outs = [r for r in run.records if r.key.site.startswith(":out")]
    assert [r.shape for r in outs] == [tuple(t.shape) for t in expected]
    assert [r.dtype for r in outs] == [str(t.dtype).removeprefix("torch.") for t in expected]
    for record, tensor in zip(outs, expected, strict=True):
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert run.array(record).tobytes() == raw.tobytes()
        assert record.stats is not None
        assert record.stats.count == tensor.numel() * (2 if tensor.is_complex() else 1)


def test_taps_statistics_and_full_capture_agree_on_numbers_and_hash(tmp_path: Path) -> None:
    x = torch.randn(5, 2)
    full = _record(tmp_path / "full", Root(), x)
    model = Root()
    with torch.no_grad(), Dumper(model, tmp_path / "stats", keep="stats"):
        model(x)
    stats = open_run(tmp_path / "stats")
    assert [(r.key, r.stats, r.hash) for r in stats.records] == [(r.key, r.stats, r.hash) for r in full.records]
    assert not any(r.entry for r in stats.records)


class Declared(nn.Module):
    tap_dims = {"out": "t h[tp]", "in[x]": "t h"}
    tap_rows = {"out": "last"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[-1:]


def test_taps_dims_and_row_sets_that_a_module_declares_reach_the_record(tmp_path: Path) -> None:
    model = Declared()
    info = StepInfo(step=0, grid=(4,), row_sets={"last": [3]})
    with Dumper(model, tmp_path / "run", keep="full") as dumper, dumper.step_of(info):
        model(torch.ones(4, 2))
    records = {r.key.site: r for r in open_run(tmp_path / "run").records}
    assert (records[":out"].dims, records[":out"].rows) == ("t h[tp]", ((3, 1),))
    assert (records[":in[x]"].dims, records[":in[x]"].rows) == ("t h", None)


def test_taps_module_may_state_which_kinds_of_port_are_worth_a_tap(tmp_path: Path) -> None:
    model = Root()
    model.inplace.tap_ports = ("out",)
    run = _record(tmp_path / "run", model, torch.zeros(1, 2))
    assert {r.key.site for r in run.records if r.key.site.startswith("inplace")} == {"inplace:out"}


def test_taps_wrong_annotation_is_reported_and_left_out(tmp_path: Path) -> None:
    model = Declared()
    model.tap_dims = {"out": "t h s"}
    run = _record(tmp_path / "run", model, torch.ones(4, 2))
    assert next(r for r in run.records if r.key.site == ":out").dims is None
    assert any("name 3 axes but the tensor has 2" in e.fields["reason"] for e in run.events() if e.kind == "dims")


def test_taps_rows_are_read_off_a_padded_call(tmp_path: Path) -> None:
    class Lm(nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return input_ids.float()

    model = Lm()
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with Dumper(model, tmp_path / "run") as dumper, dumper.step(phase="prefill"):
        model(ids, attention_mask=mask, position_ids=torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]]))
    run = open_run(tmp_path / "run")
    info = run.steps[0][0].info
    assert info.grid == (2, 4)
    assert [(r.request, r.position, r.count, r.slot) for r in info.rows] == [("0", 0, 2, 2), ("1", 0, 4, 4)]
    assert run.tokens() == {"0": {0: 5, 1: 6}, "1": {0: 7, 1: 8, 2: 9, 3: 10}}
    assert info.num_rows == 6


def test_taps_equal_bytes_of_a_step_are_stored_once_and_read_back_everywhere(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    with torch.inference_mode(), Dumper(model, tmp_path / "run", keep="full", queue_bytes=1 << 20):
        for _ in range(30):
            model(torch.randn(4, 8))
    run = open_run(tmp_path / "run")
    assert run.ledger().complete
    arrays = {(r.key.step, r.key.site): (run.array(r), r.entry) for r in run.records}
    for step in range(30):
        for layer in range(5):
            out, entry = arrays[step, f"{layer}:out"]
            into, shared = arrays[step, f"{layer + 1}:in[input]"]
            np.testing.assert_array_equal(out, into)
            assert entry == shared
    assert len({r.entry for r in run.records}) == 30 * 7


def test_taps_layer_is_named_by_the_path_of_its_own_output_too(tmp_path: Path) -> None:
    class Layered(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({name: nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(7))})
            self.name = name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.inner[self.name]:
                x = layer(x)
            return x

    for name in ("layers", "h", "blocks"):
        run = _record(tmp_path / name, Layered(name), torch.ones(1, 2), keep="off", rules=["*=full layers=5"])
        sites = {r.key.site for r in run.records}
        assert sites == {f"inner.{name}.5{part}" for part in (":in[input]", ":out", ".0:in[input]", ".0:out")}
        assert {parse(site).layer for site in sites} == {5}


class Lm(nn.Module):
    """Returns logits and further outputs, like a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.lm_head = nn.Linear(4, 9)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor | None = None) -> Any:
        x = self.layers[0](self.embed(input_ids))
        return {"logits": self.lm_head(x), "hidden_states": (x,)}


def test_taps_mode_core_keeps_inputs_of_the_model_and_final_logits(tmp_path: Path) -> None:
    model = Lm()
    ids = torch.tensor([[1, 2]])
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full", mode="core") as dumper, dumper.step():
        hooked = [name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
        model(ids, positions=torch.tensor([[0, 1]]))
    run = open_run(tmp_path / "run")
    found = {":in[input_ids]", ":in[positions]", "lm_head:out", ":out[logits]"}
    assert {r.key.site for r in run.records} == found
    assert hooked == ["lm_head"]
    assert run.ledger().never_fired == []


def test_taps_mode_off_places_no_tap(tmp_path: Path) -> None:
    model = Lm()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full", mode="off"):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        model(torch.tensor([[1]]))
    assert not open_run(tmp_path / "run").records


def test_taps_module_under_two_names_is_one_tap_that_reports_both(tmp_path: Path) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.second = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    run = _record(tmp_path / "run", Shared(), torch.ones(1, 2))
    assert [r.key.occurrence for r in run.records if r.key.site == "first:out"] == [0, 1]
    lines = (tmp_path / "run" / "rank-00000" / "records.jsonl").read_text().splitlines()
    sites = {line["site"]: line for line in map(json.loads, lines) if line["type"] == "site"}
    assert sites["first:out"]["aliases"] == ["second"]
    assert sites["first:out"]["parent"] == "Shared"


def test_taps_hook_captured_away_by_others_is_reported_once(tmp_path: Path) -> None:
    model = Root()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="stats"):
        model(torch.ones(1, 2))
        model.zoo._forward_hooks.clear()
        for _ in range(40):
            model(torch.ones(1, 2))
    failed = [e.fields for e in open_run(tmp_path / "run").events() if e.kind == "failed"]
    assert [(e["where"], "removed by other code" in e["reason"]) for e in failed] == [("zoo:out", True)]


def test_taps_module_that_is_replaced_is_reported_and_tapped_again_when_configured(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="stats", control="127.0.0.1:0") as dumper:
        model(torch.ones(1, 2))
        model[1] = nn.Sequential(nn.Linear(2, 2))
        model(torch.ones(1, 2))
        assert ask(f"http://{dumper.http}/dumper/configure", {"keep": "full"})[0] == 200
        wait_until(lambda: _step_holds(model, tmp_path / "run", "1.0:out"), "the new module is tapped")
    failed = [e.fields["reason"] for e in open_run(tmp_path / "run").events() if e.kind == "failed"]
    assert any("was replaced by a Sequential" in reason for reason in failed)


def _step_holds(model: nn.Module, path: Path, site: str) -> bool:
    model(torch.ones(1, 2))
    return any(r.key.site == site for r in open_run(path).records)


def test_taps_model_that_is_dropped_while_tapped_is_freed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    gone = weakref.ref(model)
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full", params=True) as dumper:
        with dumper.step():
            model(torch.ones(1, 2))
        del model
        gc.collect()
        assert gone() is None
        with dumper.step():
            pass
    assert len(open_run(tmp_path / "run").steps) == 2


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.up(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("first", ["compiled", "opened"])
def test_taps_dumper_captures_inside_a_compiled_module_or_names_its_silent_taps(
    tmp_path: Path, fullgraph: bool, first: str
) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(2, 2), Inner(), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    expected = model(x)

    def compile_one() -> None:
        model[1].compile(backend="eager", fullgraph=fullgraph)
        model(x)

    if first == "compiled":
        compile_one()
    with Dumper(model, tmp_path / "run", keep="full", grads=True):
        if first == "opened":
            compile_one()
        assert torch.equal(model(x), expected)
    run = open_run(tmp_path / "run")
    sites = {r.key.site for r in run.records}
    assert {"0:out", "2:out", ":out"} <= sites
    if first == "compiled":
        assert {"1.up:out", "1.act:out"} <= set(run.ledger().never_fired)
    else:
        assert {"1:out", "1.up:in[input]", "1.up:out", "1.act:out"} <= sites
        assert not run.ledger().never_fired
    assert torch.equal(model(x), expected)


REMEDY = "call torch.compiler.reset() once the Dumper is open: the next call compiles the taps in"
LATE = "compiled before the taps were placed, which do not fire there"


def in_place(module: nn.Module, **options: Any) -> nn.Module:
    module.compile(backend="eager", **options)
    return module


def wrapped(module: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(module, backend="eager", **options)  # type: ignore[return-value]


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("form", [in_place, wrapped])
def test_taps_dumper_captures_inside_a_compiled_model_unless_it_was_called_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: Any, is_warm: bool, fullgraph: bool
) -> None:
    torch.compiler.reset()
    model = form(Inner(), fullgraph=fullgraph)
    x = torch.ones(1, 2)
    expected = model(x)
    if not is_warm:
        torch.compiler.reset()
    with Dumper(model, tmp_path / "run", keep="full"):
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)
    sentence = f"{LATE}: the model itself; {REMEDY}"
    assert caplog.text.count(sentence) == is_warm
    run = open_run(tmp_path / "run")
    account = run.ledger()
    if not is_warm:
        inside = ["up:in[input]", "up:out", "act:in[input]", "act:out"]
        assert [r.key.site for r in run.records] == [":in[x]", *inside, ":out"]
        assert not account.sentences()
        return
    assert [r.key.site for r in run.records] == [":in[x]", ":out"]
    assert account.never_fired == ["act:out", "up:out"]
    assert account.compiled == ["the model itself"]
    assert sentence in account.sentences()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("form", [in_place, wrapped])
def test_taps_capture_inside_compiled_submodules_not_called_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: Any
) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(2, 2), Inner(), Inner())
    with Dumper(model, tmp_path / "plain", keep="full", params=True):
        expected = model(torch.ones(1, 2))
    for i in (1, 2):
        model[i] = form(model[i])
    with Dumper(model, tmp_path / "cold", keep="full", params=True):
        assert torch.equal(model(torch.ones(1, 2)), expected)
    assert not caplog.text
    cold = open_run(tmp_path / "cold")
    assert [(r.key, r.hash) for r in cold.records] == [(r.key, r.hash) for r in open_run(tmp_path / "plain").records]
    torch.compiler.reset()
    model(torch.ones(1, 2))
    with Dumper(model, tmp_path / "run", keep="full", params=True):
        assert torch.equal(model(torch.ones(1, 2)), expected)
    assert f"{LATE}: 1, 2; {REMEDY}" in caplog.text
    plain, run = open_run(tmp_path / "plain"), open_run(tmp_path / "run")
    sites = {r.key.site for r in run.records}
    assert run.ledger().never_fired == ["1.act:out", "2.act:out"]  # the other taps recorded parameters
    assert run.ledger().compiled == ["1", "2"]
    assert {r.key.site for r in plain.records} - sites == {
        f"{i}.{port}" for i in (1, 2) for port in ("up:in[input]", "up:out", "act:in[input]", "act:out")
    }
    assert {"1:in[x]", "1:out", "2:in[x]", "2:out", "1.up:param[weight]"} <= sites
    assert run.ledger().complete
    with torch.compiler.set_stance("force_eager"), Dumper(model, tmp_path / "eager", keep="full", params=True):
        caplog.clear()
        assert torch.equal(model(torch.ones(1, 2)), expected)
    assert not caplog.text
    eager = open_run(tmp_path / "eager")
    assert [r.key for r in eager.records] == [r.key for r in plain.records]


def test_taps_dumper_captures_a_model_inside_a_larger_compiled_function(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    model = Inner()
    compiled = torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=True)
    x = torch.ones(1, 2)
    expected = compiled(x)
    with Dumper(model, tmp_path / "run", keep="full"):
        assert torch.equal(compiled(x), expected)
    assert not caplog.text
    run = open_run(tmp_path / "run")
    assert [r.key.site for r in run.records] == [":in[x]", "up:in[input]", "up:out", "act:in[input]", "act:out", ":out"]
    assert torch.equal(compiled(x), expected)


def test_taps_dumper_captures_a_model_that_is_compiled_while_it_is_open(tmp_path: Path) -> None:
    torch.compiler.reset()
    model = nn.Sequential(Inner())
    with Dumper(model, tmp_path / "run", keep="full") as dumper:
        in_place(model[0])
        in_place(model)
        model(torch.ones(1, 2))
        dumper.configure(keep="full")
        model(torch.ones(1, 2))
    run = open_run(tmp_path / "run")
    assert {":in[input]", "0:in[x]", "0.up:out", "0.act:out", "0:out", ":out"} <= {
        r.key.site for r in run.records if r.key.step == 0
    }
    assert model._compiled_call_impl is not None
    assert "_method" not in repr(model.__dict__["_compiled_call_impl"])


def test_taps_scripted_child_takes_no_hook_and_that_is_reported(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.GELU()))
    model = nn.Sequential(nn.Linear(2, 2), scripted)
    x = torch.ones(1, 2)
    expected = model(x)
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full") as dumper, dumper.step():
        assert torch.equal(model(x), expected)
    run = open_run(tmp_path / "run")
    assert {"1:out", "1.0:out", "1.1:out"} == set(run.ledger().never_fired)
    reasons = {e.fields["where"]: e.fields["reason"] for e in run.events() if e.kind == "failed"}
    assert all("not supported on ScriptModules" in reasons[f"{path}:in"] for path in ("1", "1.0", "1.1"))


def test_taps_threads_that_call_the_model_at_once_lose_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    calls, threads = 20, 3

    def work() -> None:
        for _ in range(calls):
            model(torch.randn(2, 4)).sum().backward()

    with Dumper(model, tmp_path / "run", keep="full", grads=True) as dumper, dumper.step():
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    run = open_run(tmp_path / "run")
    forward = Counter(r.key.site for r in run.records if r.key.pass_ == "forward")
    backward = Counter(r.key.site for r in run.records if r.key.pass_ == "backward")
    assert set(forward.values()) == {calls * threads}
    assert backward["0:out.grad"] == calls * threads
    assert len({r.key for r in run.records}) == len(run.records)
    account = run.ledger()
    assert (account.complete, account.seen) == (True, len(run.records))


def test_taps_calls_that_overlap_in_threads_are_reported_separately(tmp_path: Path) -> None:
    """The records of each call form a group: the output of one module equals the input of the next."""

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            barrier.wait(10)
            return x + 1

    barrier = threading.Barrier(3)
    model = nn.Sequential(nn.Identity(), Slow(), nn.Identity(), Slow(), nn.Identity())
    with Dumper(model, tmp_path / "run", keep="full") as dumper:
        for _ in range(3):
            starts = [torch.tensor(100.0 * number) for number in range(3)]
            workers = [threading.Thread(target=lambda x: [model(x + i) for i in range(5)], args=(x,)) for x in starts]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        dumper.flush()
    run = open_run(tmp_path / "run")
    groups: dict[Any, dict[str, float]] = {}
    for record in run.records:
        key = record.key
        sites = groups.setdefault((key.step, key.micro, key.occurrence), {})
        assert key.site not in sites
        sites[key.site] = float(run.array(record))
        assert (record.tags or {}).get("call", 0) == key.micro
    assert len(groups) == 45
    for sites in groups.values():
        start = sites[":in[input]"]
        assert [sites[f"{i}:out"] - start for i in range(5)] == [0, 1, 1, 2, 2]
        assert sites[":out"] == start + 2
    assert run.ledger().complete


def test_taps_what_is_called_by_forward_is_named_as_silent(tmp_path: Path) -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner.forward(x)

    assert _record(tmp_path / "run", Direct(), torch.ones(1, 2)).ledger().never_fired == ["inner:out"]


@pytest.mark.parametrize("form", [in_place, wrapped])
def test_taps_modules_of_a_compiled_model_are_not_reported_as_removed(tmp_path: Path, form: Any) -> None:
    torch.compiler.reset()
    model = form(Inner())
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        model(torch.ones(1, 2))
    assert not [event for event in open_run(tmp_path / "run").events() if event.kind == "failed"]


def test_taps_gradients_inside_compiled_code_are_reported_once(tmp_path: Path) -> None:
    torch.compiler.reset()
    model = in_place(Inner())
    with Dumper(model, tmp_path / "run", keep="off", rules=["*:out=stats", "*:out.grad=stats"]):
        model(torch.ones(1, 2)).sum().backward()
    events = [event for event in open_run(tmp_path / "run").events() if event.kind == "failed"]
    assert ["gradients of values inside compiled code" in str(event.fields["reason"]) for event in events] == [True]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.float32])
def test_taps_input_that_is_not_of_integers_has_no_token_ids(tmp_path: Path, dtype: torch.dtype) -> None:
    with warnings.catch_warnings(), Dumper(model := nn.Identity(), tmp_path / "run", keep="full"):
        warnings.simplefilter("error")
        model(torch.ones(2, 3, dtype=dtype))
    run = open_run(tmp_path / "run")
    assert run.steps[0][0].info.rows == ()
    assert not [event for event in run.events() if event.kind == "failed"]


@pytest.mark.parametrize(("rule", "reported"), [("*=stats", ["1:out"]), ("0:out=stats", [])])
def test_taps_module_added_after_they_were_placed_is_reported_where_rules_select_it(
    tmp_path: Path, rule: str, reported: list[str]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="off", rules=[rule]) as dumper:
        model(torch.ones(1, 2))
        model.append(nn.Sequential(OrderedDict(inner=nn.Linear(2, 2))))
        model(torch.ones(1, 2))
        dumper.configure(enabled=True)
        model(torch.ones(1, 2))
    run = open_run(tmp_path / "run")
    events = [event.fields for event in run.events() if event.kind == "failed"]
    assert [event["where"] for event in events] == reported
    assert all("added after the taps were placed" in str(event["reason"]) for event in events)
    assert {record.key.step for record in run.records if record.key.site.startswith("1")} == (
        {2} if reported else set()
    )
