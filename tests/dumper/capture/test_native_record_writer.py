"""The native record writer writes the same lines as the capturer, in the same order, and declines unusual memory.

A hook with a fast path records the same values as the collector.
"""

import itertools
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from native_helpers import needs_library
from torch import nn
from transformers.utils import ModelOutput

from tapscope.core.observe import RowSpan, StepInfo
from tapscope.dumper import Dumper
from tapscope.dumper.capture import capturer, native_record_writer
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_lines import RecordLines
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.steps.deferred_line import LateInfo
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.steps.tag_context import ctx
from tapscope.dumper.taps.collector import Collector
from tapscope.dumper.taps.taps import Tap
from tapscope.sources import open_run

pytestmark = needs_library


class Odd(nn.Module):
    """Returns a different output per step: other shapes and dtypes, views, and tensors not in plain memory."""

    outputs: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: x,
        lambda x: x.T,
        lambda x: x.double(),
        lambda x: x[:0],
        lambda x: x.sum(),
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: torch.complex(x, x)[:1, :1].conj().imag,
        lambda x: x[:1, :1].contiguous(),
        lambda x: x.to_sparse(),
        lambda x: torch.func.vmap(lambda row: row)(x),
        lambda x: x.expand(2, *x.shape),
        lambda x: nn.Parameter(x),
        lambda x: x.repeat(4096, 1),
        lambda x: torch.full_like(x, torch.nan),
    )

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outputs[self.turn % len(self.outputs)](x)


class Mixed(nn.Module):
    """Takes and returns several values of several types, some of which change from step to step."""

    def forward(self, x: torch.Tensor, pair: Any, *, mask: Any = None, flag: Any = None, cache: Any = None) -> Any:
        return x + 1, (pair[0], None), flag, cache


@dataclass(frozen=True)
class Pair:
    first: torch.Tensor
    second: Any = None


class Pairs(nn.Module):
    """Returns named values, as fields and as a varying number of items."""

    def forward(self, x: torch.Tensor, turn: int) -> Any:
        more: dict[str, Any] = {"second": x.sum(1)} if turn % 3 == 1 else {"third": x} if turn % 3 == 2 else {}
        if turn % 4 == 3:
            return Pair(x, tuple(more.values()))
        return (dict, OrderedDict, ModelOutput)[turn % 4](first=x, **more)


class Last(nn.Module):
    """Outputs one row per request."""

    tap_rows: ClassVar[dict[str, str]] = {"in[x]": "last", "out": "last"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


PLAIN = (True, True, False, 1, 1, 2, "a", "a", "b", 1.0, 1.0, float("nan"), Mixed, object(), object(), [1], [1], ())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 4096)  # at least 64 KiB: deduplicated within a step
        self.narrow = nn.Linear(4096, 8)
        self.odd = Odd()
        self.twice = nn.ReLU(inplace=True)
        self.mixed = Mixed()
        self.pairs = Pairs()
        self.last = Last()
        self.turn = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, bias: Any = None) -> torch.Tensor:
        hidden = self.twice(self.twice(self.wide(x)))
        if bias is not None:
            hidden = hidden + bias
        narrow = self.narrow(hidden * scale)
        self.odd(narrow)
        flag, pair = PLAIN[self.turn % len(PLAIN)], (hidden, narrow)[:: self.turn % 5 - 2 or 1]
        self.mixed(narrow, pair, mask=None if self.turn % 4 else narrow > 0, flag=flag, cache=self.turn % 7 == 6 or [])
        pair = self.pairs(narrow, self.turn // 3)
        self.last((pair.first if isinstance(pair, Pair) else pair["first"])[-2:])
        return narrow


def run_of(out: Path, **settings: Any) -> list[bytes]:
    torch.manual_seed(0)
    model = Net().eval()
    with torch.no_grad(), Dumper(model, out, force=True, **settings) as dumper:
        for step in range(3 * len(Odd.outputs)):
            model.odd.turn, model.turn = step // 3, step
            last = (2, 3) if step % 4 else (1, 3)
            info = StepInfo(step=step, grid=(4,), row_sets={"last": list(last)})
            with (
                dumper.step_of(info) if step % 5 else nullcontext(),
                ctx(stage="late") if step % 7 == 5 else nullcontext(),
            ):
                model(torch.randn(4 if step % 5 else 6, 8), **({"bias": torch.ones(1)} if step % 4 == 3 else {}))
        unusuals = (lambda: ctx(stage="early"), lambda: dumper.micro(1), dumper.capture_output, nullcontext)
        for unusual in unusuals:
            for turn in range(3):  # the unusual call runs first, second, or both calls are unusual
                with dumper.step():
                    for is_unusual in (turn != 1, turn > 0, False):
                        with unusual() if is_unusual else nullcontext():
                            model(torch.randn(4, 8))
    lines = [line for file in sorted(out.glob("**/*.jsonl")) for line in file.read_bytes().splitlines()]
    return [line for line in lines if line.startswith((b'{"type":"record"', b'{"type":"step","at":"end"'))]


@pytest.mark.parametrize(
    "settings",
    [
        {"keep": "stats"},
        {"keep": "full"},
        {"keep": "off", "rules": ["wide:*=full", "*:out*=stats"]},
        {"keep": "stats", "rules": ["narrow:in*=stats rows=0:2"]},
        {"keep": "stats", "triggers": ["odd:out: nan -> keep"]},
        {"keep": "stats", "max_records": 100},
    ],
    ids=["stats", "full", "both", "rows", "trigger", "budget"],
)
def test_native_writer_lines_are_those_of_the_capturer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    penned = run_of(tmp_path / "penned", **settings)
    monkeypatch.setattr(native_record_writer.NativeRecordWriter, "begin", lambda *about: None)
    assert penned == run_of(tmp_path / "plain", **settings)
    assert len(penned) > 90


@pytest.mark.parametrize("keep", ["stats", "full"])
def test_native_writer_only_the_first_firing_of_a_hook_reaches_the_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    fired: list[str] = []
    original = Collector.fire

    def fire(self: Collector, tap: Tap, kind: str, value: Any) -> None:
        fired.append(f"{tap.path}:{kind}")
        original(self, tap, kind, value)

    monkeypatch.setattr(Collector, "fire", fire)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep=keep):
        for _ in range(5):
            model(torch.randn(2, 8))
    assert sorted(fired) == ["0:in", "0:out", "1:in", "1:out", ":in", ":out"]
    assert len(open_run(tmp_path / "run").records) == 30


def test_native_writer_writes_all_but_the_first_value_of_a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand: list[str] = []
    original = capturer.Capturer._record

    def record(self: capturer.Capturer, port: SitePort, *rest: Any, **how: Any) -> None:
        by_hand.append(port.site)
        original(self, port, *rest, **how)

    monkeypatch.setattr(capturer.Capturer, "_record", record)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="stats"):
        for _ in range(5):
            model(torch.randn(2, 8))
    records = open_run(tmp_path / "run").records
    assert len(records) == 5 * len(set(by_hand)) == 5 * len(by_hand) == 30


def test_native_writer_threads_share_native_writer_and_nothing_is_lost(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="stats") as dumper:
        with dumper.step(phase="warm"):
            model(torch.zeros(2, 8))
        with dumper.step(phase="storm"):
            # Large enough that the GIL is released while a value is read.
            calls = [threading.Thread(target=lambda: torch.no_grad()(model)(torch.randn(33_000, 8))) for _ in range(4)]
            for each in calls:
                each.start()
            for each in calls:
                each.join()
    records = open_run(tmp_path / "run").records
    assert sorted(each.seq for each in records) == list(range(5 * 18))
    assert len({each.key for each in records}) == 5 * 18


@pytest.mark.parametrize("keep", ["stats", "full"])
def test_native_writer_what_torch_func_makes_has_no_memory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(4, 8)

    def lines(out: Path) -> list[bytes]:
        with Dumper(model, out, keep=keep):
            model(x)
            torch.func.grad(lambda x: model(x).sum())(x)
            torch.func.jvp(model, (x,), (x,))
            torch.func.functionalize(model)(x)
            torch.func.vmap(model, in_dims=1)(torch.randn(4, 3, 8))  # the same shape inside vmap
            model(x)
        return [line for file in out.glob("**/*.jsonl") for line in file.read_bytes().splitlines() if b'"sent"' in line]

    penned = lines(tmp_path / "penned")
    monkeypatch.setattr(native_record_writer.NativeRecordWriter, "begin", lambda *about: None)
    assert penned == lines(tmp_path / "plain")
    assert [b'"sent":6,"dropped":0,"failed":0' in line for line in penned] == [True, False, False, False, False, True]


def test_native_writer_interrupt_in_a_fast_path_is_the_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(self: native_record_writer.NativeRecordWriter, where: tuple[SitePort, Any], address: int) -> None:
        met.append(where[0].site)
        if met[-1] == "1:in[input]":
            raise KeyboardInterrupt

    met: list[str] = []
    monkeypatch.setattr(native_record_writer.NativeRecordWriter, "_record_at", send)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        model(torch.randn(2, 8))
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(2, 8))
    assert met[1:] == ["0:in[input]", "0:out", "1:in[input]"]


def test_native_writer_lines_that_cannot_be_queued_are_all_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_lines(self: SendQueue, lines: RecordLines) -> bool:
        raise ValueError("no queue")

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    monkeypatch.setattr(SendQueue, "put_lines", put_lines)
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="stats"):
        model(torch.randn(2, 8))  # recorded by the capturer, and learned by the native writer
        model(torch.randn(2, 8))
    run = open_run(tmp_path / "run")
    counts = run.ledger()
    assert counts.seen == 12
    assert counts.recorded + counts.failed == 12
    (event,) = [event for event in run.events() if event.kind == "failed"]
    assert (event.fields["where"], event.fields["reason"]) == (f"{counts.failed} buffered records", "no queue")


def test_native_writer_step_that_hangs_shows_what_it_has(tmp_path: Path) -> None:
    class Hang(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hung.wait(timeout=0 if released.is_set() else 60)
            return x

    hung, released = threading.Event(), threading.Event()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Hang(), nn.Linear(8, 8))
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="stats") as dumper:
        released.set()
        model(torch.randn(2, 8))  # from the second step on, the native writer buffers the lines
        released.clear()
        call = threading.Thread(target=torch.no_grad()(model), args=(torch.randn(2, 8),))
        call.start()
        while not any(r.key.site == "2:in[x]" and r.key.step == 1 for r in open_run(tmp_path / "run").records):
            assert call.is_alive()  # the call ends after a minute
        sites = [r.key.site for r in open_run(tmp_path / "run").records if r.key.step == 1]
        hung.set()
        call.join()
        dumper.flush()
    assert sites == [":in[input]", "0:in[input]", "0:out", "1:in[input]", "1:out", "2:in[x]"]


def test_native_writer_what_waits_in_native_writer_never_fills_the_queue_it_waits_for(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(12)])  # 24 values of 300 KiB, of which 3 fit
    limits = {"queue_bytes": "1MiB", "shm_bytes": 0, "block_timeout_s": 600}
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full", **limits) as dumper:
        for _ in range(4):
            model(torch.randn(600, 128))
        dumper.flush()
    records = open_run(tmp_path / "run").records
    assert len(records) == 4 * 26  # nothing was dropped
    assert all(record.entry is not None for record in records)


@pytest.mark.parametrize("is_shorter", [False, True])
def test_native_record_writer_leaves_out_sketches_of_dropped_rows(is_shorter: bool) -> None:
    """A request of a step launched ahead has ended; only the sketch of a whole tensor, without rows, is kept."""
    rows = (RowSpan("a", 7, 1, 0, 0), RowSpan("b", 0, 1, 0, 1))
    late = LateInfo(StepInfo(step=4, grid=(2,), rows=rows))
    firing = Firing(OpenStep(late.outline, 4, late_rows=late), 0)
    given: dict[str, Any] = {}
    freed: list[int] = []
    block = SimpleNamespace(counters_of=lambda row: counters.data_ptr(), close=lambda: None)
    counters, summaries, copied = torch.randn(3, 256), torch.zeros(3, 16, dtype=torch.int64), itertools.count()
    slots = [torch.zeros(256) for _ in range(2)]

    def reserve(nbytes: int) -> PayloadSlot:
        number = next(copied)
        return PayloadSlot(slots[number].data_ptr(), nbytes, number, None)

    def start_lines(layout: Any, begin: Any, filled: Any, read: Any) -> Any:
        text, _ = read(summaries.data_ptr())
        return SimpleNamespace(finish=lambda lines: setattr(lines, "content", text))

    queue: Any = SimpleNamespace(
        reserve=reserve, cancel=lambda slot: freed.append(slot.offset), put_lines=lambda lines: given.update(at=lines)
    )
    counts = SimpleNamespace(
        count_sketches_ahead=lambda step, number: given.update(ahead=number), count=lambda step, dropped: None
    )
    device = SimpleNamespace(worker=lambda: SimpleNamespace(start_lines=start_lines))
    dedup = SimpleNamespace(generation=3, next_number=itertools.count().__next__)
    writer = native_record_writer.NativeRecordWriter(
        queue, cast(Any, SimpleNamespace()), cast(Any, counts), cast(Any, dedup), cast(Any, device)
    )
    port = SimpleNamespace(site="x:out")
    heads = tuple(b',"site":"%b:out","step":' % name for name in (b"a", b"b", b"c"))
    drained = heads, (b"",) * 3, struct.pack("3q", 0, 128, 256), 5, 3, ((port, True), None, (port, False))
    writer.native = SimpleNamespace(drain_rows=lambda: drained)
    writer._block = cast(Any, block)
    writer._flush_rows(firing)
    late.complete(StepInfo(step=4, grid=(2,), rows=rows[: 2 - is_shorter], token_ids=(1,) * (2 - is_shorter)))
    lines = given["at"].finish()
    has_sketch = [b'"sketch"' in line for line in lines.text.split(b"\n")]
    assert has_sketch == [not is_shorter, False, True]
    assert ([line for line, *_ in lines.payloads], freed) == (([2], [0]) if is_shorter else ([0, 2], []))
    assert given["ahead"] == 1
