"""Ahead-of-time compilation covers all kernels that taps launch, for all sizes of tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tapscope.dumper import Dumper
from tapscope.dumper.device import tap_kernels
from tapscope.sources import open_run

CPU = torch.device("cpu")
BLOCKS = (1, 2, 31, 32, 100, 527, 528, 2111, 2112, 9000)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Return a set that receives the variant of each kernel launched on the CPU; no kernel runs."""
    pytest.importorskip("triton")
    from tapscope.kernels.triton import launch, sketch, tap

    found: set[Any] = set()

    def note(self: Any, device: Any, grid: Any, args: Any, constants: Any, **options: Any) -> None:
        kinds = [arg.dtype if isinstance(arg, torch.Tensor) else arg and arg.bit_length() > 31 for arg in args]
        assert all(arg.data_ptr() % 16 == 0 for arg in args if isinstance(arg, torch.Tensor))
        found.add((self._kernel.__name__, *kinds, *constants.items(), *options.items()))

    monkeypatch.setattr(launch.Launcher, "__call__", note)
    monkeypatch.setattr(launch, "check_device", lambda device: None)
    for module in (sketch, tap):
        monkeypatch.setattr(module, "num_sms", lambda _: 132)
    return found


def tap_tensors(dtype: torch.dtype, *, sketches: bool) -> None:
    """Tap tensors of many sizes, one by one and in batches, as eager steps and graphs do."""
    from tapscope.kernels.triton import sketch, sketch_table, tap

    keys, out = torch.zeros(9001, dtype=torch.int64), torch.zeros(256)
    row, together = torch.zeros(1, 16, dtype=torch.int64), sketch.Sketches(CPU, 1)
    shapes = [(blocks, tap.BLOCK_BYTES // 4) for blocks in BLOCKS] + [(3, 70), (1, 1)]
    tensors = [torch.empty(shape, dtype=dtype) for shape in shapes]
    for tensor in tensors:
        tap.begin(tensor, row[0], tap.Parts(CPU))
        tap.merge(row)
        if sketches:
            part = sketch.Part(*tensor.shape, 0, 0, tensor.shape[1])
            together.add(tensor, keys, part, 0, out.data_ptr())
            tap.begin(tensor, row[0], tap.Parts(CPU), after_sketch=True)
            together.merge(1)
            sketch_table.sketch_many(together, [sketch_table.Request(tensor, keys, part, out.data_ptr())], torch.clone)
    for some in (tensors[:1], tensors[:5], tensors):
        plan = tap.plan_of(some, [row[0]] * len(some))
        tap.summarize_many(plan, plan.table, plan.places)


@pytest.mark.parametrize("sketches", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_compiled_ahead_serve_tensors_of_every_size(
    launched: set[Any], dtype: torch.dtype, sketches: bool
) -> None:
    for is_sketch in {False, sketches}:
        tap_kernels.launch_variants(CPU, dtype, is_sketch=is_sketch)
    ahead = set(launched)
    launched.clear()
    tap_tensors(dtype, sketches=sketches)
    assert launched == ahead
    assert len(ahead) == (14 if sketches else 6)


def test_types_without_kernels_are_left_out(launched: set[Any]) -> None:
    for dtype, is_sketch in ((torch.int64, True), (torch.float8_e8m0fnu, False), (torch.complex64, False)):
        tap_kernels.launch_variants(CPU, dtype, is_sketch=is_sketch)
    assert not launched


def test_kernels_are_compiled_for_levels_that_may_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics can be enabled later; full values need no kernel, and sketches need their own kernels.

    A request over HTTP may enable sketches at any time, in a job of its own or in a host such as the engine.
    """
    asked: list[bool] = []
    monkeypatch.setattr(tap_kernels, "compile_ahead", lambda models, *, sketches, **_: asked.append(sketches))
    with Dumper(nn.Linear(2, 2), tmp_path / "run", keep="full") as dumper:
        assert asked == []
        for config, found in (({"keep": "off"}, False), ({"rules": ["*=sketch"]}, True)):
            dumper.configure(**config)
            assert asked.pop() is found
            assert asked == []
        dumper.configure(rules=[])
        assert asked.pop() is False
        with dumper.all_taps():
            assert True in asked
    asked.clear()
    with Dumper(nn.Linear(2, 2), tmp_path / "controlled", keep="off", control="127.0.0.1:0"):
        assert asked == [True]


def test_all_taps_are_in_place_and_record_nothing(tmp_path: Path) -> None:
    """Independent of the configuration, which applies again afterwards."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with Dumper(model, tmp_path / "run", keep="off", rules=["0:out=full phase=decode"], filter="step > 3") as dumper:
        state = dumper.tap_state
        with dumper.all_taps():
            armed = {tap.path for attached in dumper._models for tap in attached.armed}
            model(torch.ones(1, 2))
        assert armed == {"", "0", "1"}
        assert dumper.tap_state == state
        assert dumper.next_step == 1
    assert list(open_run(tmp_path / "run").records) == []
