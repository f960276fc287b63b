"""What a tap sees: everything that goes in and comes out, as it was at that moment."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from tapscope.dumper import Dumper
from tapscope.observe import StepInfo
from tapscope.run import Run, open_run


@dataclass
class Pack:
    left: torch.Tensor
    right: tuple[torch.Tensor, None]


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Zoo(nn.Module):
    """Returns every container there is."""

    def forward(self, x: torch.Tensor, *, scale: float = 2.0, extra: dict[str, Any] | None = None) -> Any:
        return {"a": x, "b": [x * scale, Pack(x + 1, (x + 2, None))], "c": Pair(x + 3, x + 4), "n": 5, "s": "text"}


class InPlace(nn.Module):
    """Changes its input, and its own output later."""

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
    with torch.no_grad(), Dumper(model, path, keep="full", **settings):
        for x in inputs:
            model(x)
    return open_run(path)


def _values(run: Run, site: str, occurrence: int = 0) -> np.ndarray:
    record = next(r for r in run.records if r.key.site == site and r.key.occurrence == occurrence)
    return run.array(record)


def test_every_nested_output_and_named_input_is_kept_by_its_path(tmp_path: Path) -> None:
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


def test_a_later_change_in_place_does_not_show_and_firings_are_numbered(tmp_path: Path) -> None:
    run = _record(tmp_path / "run", Root(), torch.zeros(1, 2))
    assert _values(run, "inplace:in[x]").tolist() == [[0, 0]]
    assert _values(run, "inplace:out").tolist() == [[1, 1]]
    assert _values(run, "inplace:in[x]", 1).tolist() == [[100, 100]]
    assert _values(run, "inplace:out", 1).tolist() == [[101, 101]]


@pytest.mark.parametrize("how", ["call", "forward"])
def test_the_root_is_seen_once_whether_called_or_forwarded(tmp_path: Path, how: str) -> None:
    model = Root()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        model(torch.ones(1, 2)) if how == "call" else model.forward(torch.ones(1, 2))
    run = open_run(tmp_path / "run")
    assert [r.key.site for r in run.records if r.key.site.startswith(":")] == [":in[x]", ":out"]
    assert len(run.steps) == 1


def test_a_tap_that_never_fired_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = _record(tmp_path / "run", Root(), torch.ones(1, 2))
    assert run.ledger().never_fired == ["unused:out"]
    assert "taps that never fired (1): unused:out" in caplog.text


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = Root()
    _record(tmp_path / "run", model, torch.ones(1, 2))
    assert "forward" not in model.__dict__
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_nothing_selected_means_no_hook_at_all(tmp_path: Path) -> None:
    model = Root()
    with Dumper(model, tmp_path / "run", keep="off"):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with Dumper(model, tmp_path / "run2", keep="off", rules=["zoo:out[c.first]=full"]):
        hooked = [name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
        assert hooked == ["zoo"]
        model(torch.ones(1, 2))
    assert [r.key.site for r in open_run(tmp_path / "run2").records] == ["zoo:out[c.first]"]


def test_the_first_rule_that_matches_decides(tmp_path: Path) -> None:
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


def test_scalars_empties_views_and_rare_dtypes_are_kept_exactly(tmp_path: Path) -> None:
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


def test_what_cannot_be_captured_is_counted_and_said_not_raised(tmp_path: Path) -> None:
    class Sparse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to_sparse()

    run = _record(tmp_path / "run", Sparse(), torch.eye(3))
    account = run.ledger()
    assert (account.failed, account.complete) == (1, False)
    assert any("sparse" in e.fields["reason"] for e in run.events() if e.kind == "failed")


def test_statistics_and_full_capture_agree_on_numbers_and_hash(tmp_path: Path) -> None:
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


def test_dims_and_row_sets_that_a_module_declares_reach_the_record(tmp_path: Path) -> None:
    model = Declared()
    info = StepInfo(step=0, grid=(4,), row_sets={"last": [3]})
    with Dumper(model, tmp_path / "run", keep="full") as dumper, dumper.step_of(info):
        model(torch.ones(4, 2))
    records = {r.key.site: r for r in open_run(tmp_path / "run").records}
    assert (records[":out"].dims, records[":out"].rows) == ("t h[tp]", ((3, 1),))
    assert (records[":in[x]"].dims, records[":in[x]"].rows) == ("t h", None)


def test_a_module_may_say_which_kinds_of_port_are_worth_a_tap(tmp_path: Path) -> None:
    model = Root()
    model.inplace.tap_ports = ("out",)
    run = _record(tmp_path / "run", model, torch.zeros(1, 2))
    assert {r.key.site for r in run.records if r.key.site.startswith("inplace")} == {"inplace:out"}


def test_a_wrong_annotation_is_said_and_left_out(tmp_path: Path) -> None:
    model = Declared()
    model.tap_dims = {"out": "t h s"}
    run = _record(tmp_path / "run", model, torch.ones(4, 2))
    assert next(r for r in run.records if r.key.site == ":out").dims is None
    assert any("name 3 axes but the tensor has 2" in e.fields["reason"] for e in run.events() if e.kind == "failed")


def test_rows_are_read_off_a_padded_call(tmp_path: Path) -> None:
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


def test_equal_bytes_of_a_step_are_stored_once_and_read_back_everywhere(tmp_path: Path) -> None:
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
