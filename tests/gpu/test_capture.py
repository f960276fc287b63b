"""Capture on a CUDA device; the tests are skipped without one and counted in the summary."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_helpers import never_waiting
from msgspec import structs
from torch import nn

from tapscope.core import dtypes
from tapscope.dumper import Dumper
from tapscope.dumper.device import device_stats
from tapscope.dumper.device.d2h_worker import D2HWorker
from tapscope.dumper.device.device import CudaDevice
from tapscope.kernels.native.sketch import sketch_of
from tapscope.run_format.run import Run
from tapscope.run_format.sketch import SketchIndex, row_keys, sketch_index
from tapscope.sources import open_run

pytestmark = pytest.mark.gpu


def busy(cycles: int = 200_000_000) -> None:
    """Keep the current stream busy for about 0.1 s: later work is still pending when the forward continues."""
    torch.cuda._sleep(cycles)


def bits(tensor: torch.Tensor) -> Any:
    """Return the bytes of ``tensor``, made contiguous, on the host."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def complete(path: Path) -> Run:
    run = open_run(path)
    assert run.ledger().complete, run.ledger().sentences()
    return run


def stored(run: Run) -> dict[str, Any]:
    """Return the stored bytes by ``STEP SITE``."""
    return {
        f"{r.key.step} {r.key.site}": np.frombuffer(run.array(r).tobytes(), np.uint8) for r in run.records if r.entry
    }


def test_capture_equals_a_synchronous_copy(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, vocab_size=512
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(0, 512, (4, 64), device="cuda")
    copies: dict[str, torch.Tensor] = {}
    handles = [
        module.register_forward_hook(lambda _m, _a, out, name=name: copies.update({f"{name}:out": out.detach().cpu()}))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    ]
    with torch.inference_mode(), Dumper(model, tmp_path / "run", keep="full"):
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    run = complete(tmp_path / "run")
    kept = {r.key.site: r for r in run.records}
    assert len(copies) == 4 * 7 + 2
    for site, expected in copies.items():
        assert kept[site].dtype == "bfloat16"
        np.testing.assert_array_equal(run.array(kept[site]).view(np.uint16), expected.view(torch.uint16).numpy())


class Mixed(nn.Module):
    """Has non-tensor arguments, a non-contiguous output, an output on the host and an in-place output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(64, 96), nn.Linear(96, 64), nn.LayerNorm(64)
        self.mix = Mix()

    def forward(self, x: torch.Tensor, *, scale: float = 0.5, flag: bool = False) -> tuple[torch.Tensor, Any]:
        hidden = self.second(torch.relu_(self.first(x))).add_(x)
        return self.norm(hidden), self.mix(hidden, flag=flag, ids=torch.arange(3))


class Mix(nn.Module):
    def forward(self, x: torch.Tensor, *, flag: bool, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return {"turned": x.t(), "half": x.half(), "none": None, "ids": ids + 1}


def test_capture_of_eager_statistics_needs_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on, the C++ writer launches the kernels, except for non-contiguous tensors."""
    torch.manual_seed(0)
    model, inputs = Mixed().cuda(), [torch.randn(32, 64, device="cuda") for _ in range(3)]
    asked: list[str] = []
    summarize = D2HWorker.summarize

    def counted(self: Any, tensor: torch.Tensor, layout: Any) -> Any:
        asked.append(layout.members)
        return summarize(self, tensor, layout)

    monkeypatch.setattr(D2HWorker, "summarize", counted)
    records = []
    for name in ("fast", "slow"):
        if name == "slow":
            monkeypatch.setattr(device_stats, "teach", lambda *about: False)
        num_asked = []
        with torch.no_grad(), Dumper(model, tmp_path / name, keep="stats", rules=["*:param*=off"]):
            for x in (*inputs, *inputs):
                before = len(asked)
                model(x)
                num_asked.append(len(asked) - before)
        run = complete(tmp_path / name)
        records.append([(r.key, r.dtype, r.shape, r.hash, r.bag, r.stats) for r in run.records])
        if name == "fast":
            assert num_asked[0] > 5
            assert num_asked[1:] == [5] * 5  # two outputs contain a non-contiguous tensor
        else:
            assert len(set(num_asked)) == 1
    assert records[0] == records[1]


@pytest.mark.parametrize("keep", ["stats", "sketch"])
def test_capture_of_eager_values_is_queued_by_a_thread_that_never_used_the_device(tmp_path: Path, keep: str) -> None:
    """The sender thread does so while a forward pauses: here it queues the pending values of the second step."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64)).cuda(), torch.randn(32, 64, device="cuda")
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="off", rules=[f"*:out*={keep}"]) as dumper:

        def queue() -> None:
            assert dumper._recording is not None
            dumper._recording.collector.flush_partial()

        for step in range(2):
            if step:
                model[1].register_forward_pre_hook(lambda *_: run_in_thread(queue))
            model(x)
    run = complete(tmp_path / "run")
    assert len(run.records) == 2 * 3
    for record in run.records:
        assert record.stats is not None
        assert (record.sketch is not None) == (keep == "sketch")


def run_in_thread(call: Any) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_capture_device_statistics_equal_those_of_full_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, device="cuda", dtype=torch.float32)
    x = torch.randn(32, 64, device="cuda")
    for keep in ("full", "stats"):
        with torch.no_grad(), Dumper(model, tmp_path / keep, keep=keep):
            model(x)
    full, stats = (open_run(tmp_path / keep).records for keep in ("full", "stats"))
    for one, other in zip(full, stats, strict=True):
        assert (one.key, one.hash, one.bag) == (other.key, other.hash, other.bag)
        assert one.stats is not None
        assert other.stats is not None
        sums = {"sum": other.stats.sum, "sumsq": other.stats.sumsq}  # accumulated in float32 within blocks of 8 KiB
        assert structs.replace(one.stats, **sums) == other.stats
        assert list(sums.values()) == pytest.approx([one.stats.sum, one.stats.sumsq], rel=1e-5, abs=1e-3)
    assert not any(r.entry for r in stats)


def test_capture_sketches_on_the_device_are_those_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1400, num_hidden_layers=3, num_attention_heads=8, vocab_size=512
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(0, 512, (3, 70), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    copied: list[torch.dtype] = []
    asked: list[torch.dtype] = []
    start, sketch = CudaDevice.start, CudaDevice.sketch

    def counted(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        copied.append(tensor.dtype)
        return start(self, tensor, *args, **kwargs)

    def counted_sketch(self: Any, tensor: torch.Tensor, request: Any) -> Any:
        asked.append(tensor.dtype)
        return sketch(self, tensor, request)

    monkeypatch.setattr(CudaDevice, "start", counted)
    monkeypatch.setattr(CudaDevice, "sketch", counted_sketch)
    runs, num_asked = [], []
    for where in ("device", "host"):
        if where == "host":
            monkeypatch.setattr(CudaDevice, "sketch", lambda self, tensor, request: None)
            monkeypatch.setattr(device_stats, "teach", lambda *about: False)
        copied.clear()
        with torch.inference_mode(), Dumper(model, tmp_path / where, keep="off", rules=["*:out*=sketch"]):
            for given in (None, mask, None, mask):
                asked.clear()
                model(input_ids=ids, attention_mask=given, use_cache=False)
                num_asked.append(len(asked))
            model(input_ids=ids.reshape(2, 105), use_cache=False)  # same rows in another grid
        assert any(dtype.is_floating_point for dtype in copied) == (where == "host")
        runs.append(complete(tmp_path / where))
    # From the second step on, the C++ writer launches the kernels.
    assert num_asked[0] > 30
    assert num_asked[1:4] == [0, 0, 0]
    found, wanted = ({r.key: r for r in run.records} for run in runs)
    assert found.keys() == wanted.keys()
    assert len(found) > 5 * 3 * 10
    for key, record in found.items():
        other = wanted[key]
        assert record.sketch is not None, key
        assert other.sketch is not None, key
        assert (record.hash, record.sketch.by_rows) == (other.hash, other.sketch.by_rows), key
        one, two = runs[0].sketch(record), runs[1].sketch(other)
        assert np.abs(one - two).max() <= 2e-5 * np.abs(two).max(), key


class Rows(nn.Module):
    """Has the signature of transformers' models; overwrites its inner output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.inner(input_ids[..., None] * torch.ones(4096, device="cuda"))
        return states.fill_(float("nan")) * attention_mask[..., None]


def test_capture_sketches_what_the_hook_saw_and_does_not_synchronize(tmp_path: Path) -> None:
    model = Rows()
    ids = torch.arange(1, 129, device="cuda").reshape(2, 64)
    mask = torch.ones_like(ids)
    mask[0, :50] = 0
    with Dumper(model, tmp_path / "run", keep="off", rules=["*:out*=sketch"]), torch.no_grad():
        model(ids, attention_mask=mask)
        with never_waiting():
            busy()
            model(ids, attention_mask=mask)
            assert not torch.cuda.current_stream().query()
    run = complete(tmp_path / "run")
    index = sketch_index((2, 64, 4096), row_keys(run.steps[1][0].info))
    assert isinstance(index, SketchIndex)
    assert len(index.rows) == 128 - 50
    values = ids.cpu().float()[..., None].expand(2, 64, 4096).reshape(128, 4096)
    wanted = sketch_of(values.numpy(), index)
    records = [r for r in run.records if r.key.site == "inner:out"]
    assert len(records) == 2
    for record in records:
        found = run.sketch(record)
        assert np.abs(found - wanted).max() <= 2e-5 * np.abs(wanted).max()


class Overwrites(nn.Module):
    """Overwrites each value in place right after its hook has fired."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for factor in (1, 2, 3):
            self.inner(x * factor).fill_(-1)
        return x + 1


@pytest.mark.parametrize(
    "settings", [{}, {"device_staging_bytes": 0}, {"shm_bytes": 0}, {"shm_bytes": 0, "device_staging_bytes": 0}]
)
@pytest.mark.parametrize("on_side", [False, True])
def test_capture_ignores_later_writes_and_does_not_synchronize(tmp_path: Path, settings: Any, on_side: bool) -> None:
    model = Overwrites()
    stream = torch.cuda.Stream() if on_side else torch.cuda.current_stream()
    x = torch.arange(1 << 16, dtype=torch.float32, device="cuda")
    with Dumper(model, tmp_path / "run", keep="full", **settings), torch.no_grad():
        model(x)  # allocates pinned memory
        with never_waiting(), torch.cuda.stream(stream):
            busy()
            model(x)
            assert not stream.query()
    run = complete(tmp_path / "run")
    seen = {(r.key.step, r.key.occurrence): run.array(r) for r in run.records if r.key.site == "inner:out"}
    for step in (0, 1):
        for occurrence, factor in enumerate((1, 2, 3)):
            np.testing.assert_array_equal(seen[step, occurrence], x.cpu().numpy() * factor)
    if "device_staging_bytes" in settings:
        assert all(m.value for m in run.metrics() if m.name == "num_direct_copies")


class Large(nn.Module):
    """Produces 40 float32 and 40 bfloat16 values of 4 MiB, each overwritten right after its hook has fired."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for factor in range(40):
            self.inner(x + factor).fill_(-1)
            self.inner((x.repeat(2) + factor).bfloat16()).fill_(-2)
        return x + 1


@pytest.mark.parametrize("is_inference", [False, True])
def test_capture_beyond_the_staging_memory_overwrites_clones_that_have_arrived(
    tmp_path: Path, is_inference: bool
) -> None:
    """Room for three clones: other values wait for the copy of an earlier one; hardly any uses the model stream."""
    x = torch.arange(1 << 20, dtype=torch.float32, device="cuda") % 251
    settings: Any = {"device_staging_bytes": 12 << 20, "queue_bytes": 1 << 30, "shm_bytes": 512 << 20}
    model, before = Large(), torch.cuda.memory_allocated()
    with Dumper(model, tmp_path / "run", keep="off", rules=["inner:out=full"], **settings):
        with torch.inference_mode(is_inference), torch.set_grad_enabled(not is_inference):
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                model(x)
        assert torch.cuda.max_memory_allocated() - before < 64 << 20
    run = complete(tmp_path / "run")
    seen = {(r.key.step, r.key.occurrence): r for r in run.records if r.key.site == "inner:out"}
    assert len(seen) == 2 * 80
    for (_, occurrence), record in seen.items():
        value = x + occurrence // 2
        expected = value if occurrence % 2 == 0 else (x.repeat(2) + occurrence // 2).bfloat16().float()
        np.testing.assert_array_equal(run.array(record).astype(np.float32), expected.cpu().numpy())
    assert sum(m.value or 0 for m in run.metrics() if m.name == "num_direct_copies" and m.step > 0) <= 2


class Called(nn.Module):
    """Has the signature of transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(input_ids + attention_mask)
        input_ids.zero_()
        return out


def test_capture_reads_device_token_ids_without_synchronizing(tmp_path: Path) -> None:
    model = Called()
    ids = torch.arange(1, 9, device="cuda").reshape(2, 4)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], device="cuda")
    with Dumper(model, tmp_path / "run", keep="stats"), torch.no_grad():
        model(ids.clone(), attention_mask=mask)
        again = ids.clone()
        with never_waiting():
            busy()
            model(again, attention_mask=mask)
            assert not torch.cuda.current_stream().query()
    run = complete(tmp_path / "run")
    assert [tuple(run.steps[number][0].info.token_ids) for number in (0, 1)] == [(3, 4, 5, 6, 7, 8)] * 2
    assert [m.value for m in run.metrics() if m.name == "num_tokens"] == [6.0, 6.0]


def odd_tensors() -> dict[str, torch.Tensor]:
    plain = torch.randn(6, 10, device="cuda")
    found = {
        "transposed": plain.t(),
        "strided": plain[::2, 1::3],
        "expanded": plain[:1].expand(5, 10),
        "scalar": plain.sum(),
        "empty": plain[:0],
        "one": plain[0, 0],
        "conjugate": torch.randn(4, 4, dtype=torch.complex64, device="cuda").conj(),
    }
    for name in dtypes.NAMES:
        dtype = getattr(torch, name, None)
        if isinstance(dtype, torch.dtype):
            found[name] = torch.randint(0, 255, (64,), dtype=torch.uint8, device="cuda").view(torch.uint8)
            found[name] = found[name] > 100 if name == "bool" else found[name].view(dtype)
    return found


class Returns(nn.Module):
    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.values = values

    def forward(self) -> dict[str, torch.Tensor]:
        return self.values


@pytest.mark.parametrize("device_staging_bytes", [0, 1 << 30])
def test_capture_of_every_dtype_and_stride_is_dense(tmp_path: Path, device_staging_bytes: int) -> None:
    values = odd_tensors()
    model = Returns(values)
    with Dumper(model, tmp_path / "run", keep="full", device_staging_bytes=device_staging_bytes):
        model()
    run = complete(tmp_path / "run")
    found = stored(run)
    assert len(found) == len(values)
    for name, value in values.items():
        np.testing.assert_array_equal(found[f"0 :out[{name}]"], bits(value.resolve_conj()), err_msg=name)


def test_capture_stores_equal_bytes_once_per_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity()).cuda()
    with Dumper(model, tmp_path / "run", keep="full"):
        for _ in range(2):
            model(torch.ones(1 << 16, device="cuda"))
    run = complete(tmp_path / "run")
    assert len(run.records) == 12
    assert len({r.entry for r in run.records}) == 2


def test_capture_includes_gradients_and_recomputation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
    copies: dict[str, torch.Tensor] = {}
    for name in ("0", "2"):
        hook = lambda _m, _i, grads, name=name: copies.update({f"{name}:out.grad": grads[0].cpu()})  # noqa: E731
        model.get_submodule(name).register_full_backward_hook(hook)
    with Dumper(model, tmp_path / "run", keep="full", grads=True) as dumper, dumper.step():
        model(torch.randn(4, 8, device="cuda", requires_grad=True)).square().sum().backward()
    run = complete(tmp_path / "run")
    found = {r.key.site: run.array(r) for r in run.records if r.entry}
    for site, value in copies.items():
        np.testing.assert_array_equal(found[site], value.numpy())


def test_cuda_graph_captured_during_copies_is_intact_and_recorded(tmp_path: Path) -> None:
    model = nn.Linear(64, 64).cuda()
    x = torch.randn(1 << 14, 64, device="cuda")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full", queue_bytes=1 << 30):
        model(x)
        with torch.cuda.stream(side):
            for _ in range(2):
                model(x)
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.default_stream()):
                busy()
                model(x)  # the drain waits for these copies while the graph is captured
            graph.capture_begin()
            y = model(x)
            time.sleep(0.3)  # until the copies are complete
            graph.capture_end()
        x.fill_(2.0)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(y, model(x))
    run = open_run(tmp_path / "run")
    account = run.ledger()
    assert (account.failed, account.lost) == (0, 0)
    assert not [e for e in run.events() if e.kind == "failed"]
    assert {r.key.step for r in run.records} == {0, 1, 2, 3, 4, 5}
    replayed, called = ({r.key.site: r.hash for r in run.records if r.key.step == step} for step in (4, 5))
    assert replayed == called


def test_trigger_writes_the_flight_recorder(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).cuda()
    settings: dict[str, Any] = {"keep": "full", "flight_recorder_steps": 3, "triggers": ("0:out: nan -> keep",)}
    with torch.no_grad(), Dumper(model, tmp_path / "run", **settings):
        for step in range(8):
            model(torch.full((256, 64), float("nan") if step == 5 else 1.0, device="cuda"))
            torch.cuda.synchronize()
            time.sleep(0.1)  # the trigger fires when the value arrives, and the recorder keeps three steps
    run = open_run(tmp_path / "run")
    assert [(e.fields["step"], e.fields["site"]) for e in run.events() if e.kind == "trigger"] == [(5, "0:out")]
    steps = {r.key.step for r in run.records}
    assert steps == {3, 4, 5}


def test_capture_clones_next_to_a_model_that_fills_memory(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    used = torch.cuda.memory_reserved()
    before = torch.cuda.get_per_process_memory_fraction(0)
    value = torch.ones(1 << 26, device="cuda")  # 256 MiB
    torch.cuda.set_per_process_memory_fraction((used + value.nbytes + (64 << 20)) / total)
    try:
        model = nn.Identity()
        with Dumper(model, tmp_path / "run", keep="full", queue_bytes=1 << 30) as dumper:
            with dumper.step():
                model(value)
            more = torch.ones(1 << 23, device="cuda")  # the model can still use the remaining memory
        del more
    finally:
        torch.cuda.set_per_process_memory_fraction(before)
    run = complete(tmp_path / "run")
    assert [m.value for m in run.metrics() if m.name == "num_direct_copies"] == [2]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_capture_uses_one_stream_per_device(tmp_path: Path) -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Identity(), nn.Identity()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, part in enumerate(self.parts):
                x = x.to(f"cuda:{number}", non_blocking=True) + 1
                part(x).mul_(2)
            return x

    model = Spread()
    x = torch.arange(1 << 20, dtype=torch.float32, device="cuda:0")
    with Dumper(model, tmp_path / "run", keep="full", queue_bytes=1 << 30), torch.no_grad():
        for _ in range(4):
            model(x)
        assert torch.cuda.current_device() == 0
    run = complete(tmp_path / "run")
    for r in run.records:
        if r.key.site in ("parts.0:out", "parts.1:out"):
            expected = (x.cpu() + 1) if r.key.site == "parts.0:out" else (x.cpu() + 1) * 2 + 1
            np.testing.assert_array_equal(run.array(r), expected.numpy())
