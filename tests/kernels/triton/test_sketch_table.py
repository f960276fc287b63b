"""Sketches of many tensors in one launch against single launches, bit for bit."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from triton_helpers import DEVICES, served

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.kernels.triton import sketch_table
from tapscope.kernels.triton.sketch import COUNTERS, PADDING, Part, Sketches, most_programs
from tapscope.kernels.triton.sketch_table import Request, sketch_many

_NOISE = torch.Generator().manual_seed(7)
PARTS = [
    Part(9, 600, 100, 333, 280),  # columns of a shard, starting inside a block
    Part(1, 2000, 0, 0, 2000),
    Part(3, 512, 256, 512, 256),  # full blocks
    Part(11, 768, 0, 768, 768),  # full blocks, the second shard of two
    Part(2, 5, 0, 0, 0),  # no columns
    Part(1, 1, 0, 0, 1),
    Part(7, 515, 3, 256, 512),
    Part(20, 4, 0, 1022, 4),  # many rows, each covering parts of two blocks
]
"""Used with two dtypes in turn."""


def on(device: str) -> torch.device:
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


def made(part: Part, dtype: torch.dtype, device: str, after: int = 0) -> tuple[torch.Tensor, torch.Tensor, Part]:
    """Return values including non-finite ones, and 32-bit keys of which every third is padding.

    In memory, ``after`` unrelated columns separate two rows.
    """
    values, keys = torch.randn(part.rows, part.width + after, generator=_NOISE), torch.randint(0, 1 << 32, (part.rows,))
    values[0, 0], values[-1, part.width - 1] = float("nan"), float("inf")
    keys[2::3] = PADDING
    return values.to(device, dtype)[:, : part.width], keys.to(device), part


def single(inputs: Sequence[tuple[torch.Tensor, torch.Tensor, Part]], device: str) -> torch.Tensor:
    """Return the counters [tensors, 256] of single launches on dense tensors."""
    sketches, counters = Sketches(on(device), 1), torch.full((len(inputs), COUNTERS), 9.0, device=device)
    for (values, keys, part), row in zip(inputs, counters, strict=True):
        sketches.add(values.contiguous(), keys, part, 0, row.data_ptr())
        sketches.merge(1)
    return counters.cpu()


def requests(inputs: Sequence[tuple[torch.Tensor, torch.Tensor, Part]], counters: torch.Tensor) -> list[Request]:
    return [Request(*each, row.data_ptr()) for each, row in zip(inputs, counters, strict=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("capacity", "room", "launches"), [(8, 8, 4), (4, 8, 6), (8, 1, 8)], ids=["all", "capacity", "room"]
)
def test_triton_sketch_table_has_the_counters_of_single_launches(
    device: str, capacity: int, room: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two dtypes, each with and without full blocks, there is one launch for each of the four kernels.

    If ``capacity`` tensors or the partial counters of ``room`` large tensors do not suffice, there are more launches.
    """
    types = torch.float32, served(device, torch.bfloat16)
    after = 0, 0, 0, 256, 0, 5, 3, 4
    inputs = [made(part, types[i % 2], device, after[i]) for i, part in enumerate(PARTS)]
    sketches = Sketches(on(device), capacity, room * most_programs(on(device)))
    grids: list[int] = []
    launch = sketch_table._launch

    def counted(device: torch.device, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
        grids.append(grid[0])
        launch(device, grid, *args, **options)

    monkeypatch.setattr(sketch_table, "_launch", counted)
    counters = torch.full((len(inputs), COUNTERS), 9.0, device=device)
    tables = sketch_many(sketches, requests(inputs, counters), lambda table: table.to(device))
    assert len(tables) == len(grids) == launches
    assert torch.equal(counters.cpu(), single(inputs, device))
    assert counters.isfinite().all()


@pytest.mark.gpu
def test_triton_sketch_table_is_read_at_every_replay_of_a_graph() -> None:
    """A replay uses its current values and keys."""
    parts = [*PARTS, Part(32, 28672, 0, 0, 28672)] * 20
    inputs = [made(part, torch.bfloat16, "cuda", i % 2 * 64) for i, part in enumerate(parts)]
    counters, sketches = torch.zeros(len(inputs), COUNTERS, device="cuda"), Sketches(on("cuda"), 128)
    given = requests(inputs, counters)
    tables = sketch_many(sketches, given, lambda table: table.to("cuda"))  # compiles the kernels
    assert len(tables) == 4
    uploaded = iter(tables)  # equal to the uploads during capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sketch_many(sketches, given, lambda table: next(uploaded))
    for _ in range(3):
        for values, keys, _ in inputs:
            values.normal_()
            keys.copy_(keys.roll(1))
        graph.replay()
        assert torch.equal(counters.cpu(), single(inputs, "cuda"))


@pytest.mark.parametrize("device", DEVICES)
def test_triton_sketch_table_refuses_other_tensors(device: str) -> None:
    keys = torch.zeros(2, dtype=torch.int64)
    for tensor in (torch.zeros(2, 3, dtype=torch.int64, device=device), torch.zeros(3, 2, device=device).t()):
        request = Request(tensor, keys, Part(2, 3, 0, 0, 3), 0)
        with pytest.raises(UsageError, match="floats in contiguous rows"):
            sketch_many(Sketches(on(device), 1), [request], lambda table: table)
