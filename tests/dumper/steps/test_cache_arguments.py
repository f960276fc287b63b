"""A decode step continues at the position after its KV cache, under either name of the cache argument."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tapscope.dumper import Dumper
from tapscope.sources import open_run


class Cache:
    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self) -> int:
        return self.length


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, cache: Any = None) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(self.embed(input_ids))
        return out


@pytest.mark.parametrize("name", ["past_key_values", "cache"])  # before and since transformers 5.24
@pytest.mark.parametrize("compiled", [False, True])
def test_cache_arguments_give_position_and_phase(tmp_path: Path, name: str, compiled: bool) -> None:
    torch.compiler.reset()
    model = Net().eval()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        called = torch.compile(model, backend="eager") if compiled else model
        called(torch.tensor([[3, 1, 4]]), **{name: None})
        called(torch.tensor([[1]]), **{name: Cache(3)})
    run = open_run(tmp_path / "run")
    steps = [of_ranks[0].info for of_ranks in run.steps.values()]
    assert [step.phase for step in steps] == ["prefill", "decode"]
    rows = [(row.position, row.count) for step in steps for row in step.rows]
    assert rows == [(0, 3), (3, 1)]
    torch.compiler.reset()
