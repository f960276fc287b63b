"""Packed sequences over a context-parallel group: ids are each rank's own chunks, cu_seqlens_q of whole sequences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tapscope.comparator import compare


def dumped(folder: Path, steps: Sequence[Sequence[int]], size: int, *, wrong: int | None = None, rows: int = 1) -> str:
    """Megatron's dump of packed steps with these sequence lengths; ``wrong``: a token of step 0 that is off."""
    folder.mkdir(parents=True)
    index = [0] * size
    for step, lengths in enumerate(steps):
        total = sum(lengths)
        ids = torch.arange(total) + 100 * step
        values = torch.sin(ids[:, None] * torch.arange(1, 9) * 0.37)
        if wrong is not None and step == 0:
            values[wrong] *= 1.5
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        for rank in range(size):
            kept = torch.cat(_shards(bounds, rank, size))
            named = {"input_ids": ids[kept], "cu_seqlens_q": bounds, "x": values[kept][:, None]}
            named["input_ids"] = named["input_ids"][None] if rows == 2 else named["input_ids"]
            for name, value in named.items():
                index[rank] += 1
                _save(folder, step, rank, size, index[rank], name, value)
    return str(folder)


def _shards(bounds: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    found = []
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        chunks = torch.arange(first, last).chunk(2 * size)
        found += [chunks[rank], chunks[2 * size - 1 - rank]] if size > 1 else [torch.arange(first, last)]
    return found


def _save(folder: Path, step: int, rank: int, size: int, index: int, name: str, value: Any) -> None:
    said = {"step": step, "rank": rank, "dump_index": index, "name": name}
    meta = said | {"world_rank": rank, "world_size": size, "megatron_parallel_info": {"cp_rank": rank, "cp_size": size}}
    meta |= {"dims": "t 1 h"} if name == "x" else {}
    torch.save({"value": value, "meta": meta}, folder / ("___".join(f"{k}={v}" for k, v in said.items()) + ".pt"))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("steps", [[[8, 16, 24]], [[16]], [[8, 8], [16, 24, 8]]])
def test_zigzag_shards_match_whole_sequences_token_by_token(
    tmp_path: Path, steps: list[list[int]], size: int, rows: int
) -> None:
    base = dumped(tmp_path / "base", steps, 1, rows=rows)
    report = compare(base, dumped(tmp_path / "cp", steps, size, rows=rows))
    assert report.exit_code == 0, [finding.notes for finding in report.findings]
    assert report.coverage.rows_known
    assert report.coverage.num_rows_aligned == sum(map(sum, steps))
    report = compare(base, dumped(tmp_path / "wrong", steps, size, wrong=5, rows=rows))
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.place is not None
    assert report.first_divergence.place.position == 5
