"""Packed sequences over a context-parallel group: ids are each rank's own chunks, cu_seqlens_q of whole sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tapscope import Dumper
from tapscope.comparator import compare


def dumped(
    folder: Path,
    steps: Sequence[Sequence[int]],
    size: int,
    *,
    wrong: int | None = None,
    rows: int = 1,
    positions: bool = False,
    tail: int = 0,
    dims: str = "t 1 h",
    padding: int = 0,
) -> str:
    """Megatron's dump of packed steps with these sequence lengths.

    ``wrong`` is a token of step 0 that is off; ``tail`` the number of padding rows of each rank beyond the sequences;
    ``padding`` that of the tokens 0 of one more sequence.
    """
    folder.mkdir(parents=True)
    index = [0] * size
    for step, lengths in enumerate(steps):
        lengths = [*lengths, padding] if padding else lengths
        total = sum(lengths)
        ids = torch.arange(total) + 100 * step
        ids[total - padding :] = 0
        places = torch.cat([torch.arange(length) for length in lengths])
        values = torch.sin(ids[:, None] * torch.arange(1, 9) * 0.37)
        if wrong is not None and step == 0:
            values[wrong] *= 1.5
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        for rank in range(size):
            kept = torch.cat(_shards(bounds, rank, size))
            named = {
                "input_ids": torch.cat([ids[kept], torch.zeros(tail, dtype=torch.int64)]),
                "cu_seqlens_q": bounds,
                "x": torch.cat([values[kept], torch.full((tail, 8), 7.0 + rank)])[:, None],
            }
            if positions:
                named["position_ids"] = torch.cat([places[kept], torch.arange(tail)])
            named["input_ids"] = named["input_ids"][None] if rows == 2 else named["input_ids"]
            for name, value in named.items():
                index[rank] += 1
                _save(folder, step, rank, size, index[rank], name, value, dims)
    return str(folder)


def _shards(bounds: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    found = []
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        chunks = torch.arange(first, last).chunk(2 * size)
        found += [chunks[rank], chunks[2 * size - 1 - rank]] if size > 1 else [torch.arange(first, last)]
    return found


def _save(folder: Path, step: int, rank: int, size: int, index: int, name: str, value: Any, dims: str) -> None:
    said = {"step": step, "rank": rank, "dump_index": index, "name": name}
    meta = said | {"world_rank": rank, "world_size": size, "megatron_parallel_info": {"cp_rank": rank, "cp_size": size}}
    meta |= {"dims": dims} if name == "x" else {}
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


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("positions", [False, True])
def test_zigzag_shards_match_with_positions_and_padding_behind_the_sequences(
    tmp_path: Path, size: int, tail: int, positions: bool
) -> None:
    dims = "t[cp:zigzag,sp] 1 h # tp:replicated ep:replicated"
    base = dumped(tmp_path / "base", [[8, 16], [24]], 1)
    same = dumped(tmp_path / "cp", [[8, 16], [24]], size, positions=positions, tail=tail, dims=dims)
    report = compare(base, same)
    assert (report.exit_code, report.num_bad) == (0, 0), [finding.notes for finding in report.findings]
    assert (report.coverage.num_rows_aligned, report.coverage.num_rows_unaligned) == (48, (0, 0))
    wrong = dumped(tmp_path / "wrong", [[8, 16], [24]], size, wrong=9, positions=positions, tail=tail, dims=dims)
    divergence = compare(base, wrong).first_divergence
    assert divergence is not None
    assert divergence.site == ":tap[x]"
    assert divergence.place is not None
    assert divergence.place.position == 1


@pytest.mark.parametrize("size", [1, 2])
def test_zigzag_padding_sequence_without_a_partner_is_padding(tmp_path: Path, size: int) -> None:
    base = dumped(tmp_path / "base", [[8, 16]], 1)
    report = compare(base, dumped(tmp_path / "padded", [[8, 16]], size, padding=4))
    assert (report.exit_code, report.coverage.partial) == (0, ())
    assert report.coverage.num_rows_aligned == 24
    assert any("4 times token 0: taken for padding" in note for note in report.coverage.warnings)
    report = compare(base, dumped(tmp_path / "more", [[8, 16, 8]], size))  # a sequence of its own is missing data
    assert report.exit_code == 1
    assert any(" is only in more" in sentence for sentence in report.coverage.partial)


def test_zigzag_padded_batch_without_positions_is_assumed_to_be_megatrons(tmp_path: Path) -> None:
    def dumped_batch(folder: Path, size: int) -> str:
        folder.mkdir()
        ids = torch.arange(32).reshape(2, 16)
        values = torch.sin(ids[..., None] * torch.arange(1, 9) * 0.37).transpose(0, 1)
        for rank in range(size):
            chunks = [
                torch.cat([part[rank], part[-1 - rank]]) if size > 1 else whole
                for whole, part in ((ids.T, ids.T.chunk(2 * size)), (values, values.chunk(2 * size)))
            ]
            dims = "s[cp:zigzag] b h"
            _save(folder, 0, rank, size, 1, "input_ids", chunks[0].T.contiguous(), dims)
            _save(folder, 0, rank, size, 2, "x", chunks[1].contiguous(), dims)
        return str(folder)

    report = compare(dumped_batch(tmp_path / "base", 1), dumped_batch(tmp_path / "cp", 2))
    assert report.exit_code == 0, [finding.notes for finding in report.findings]
    assert report.coverage.num_rows_aligned == 32
    assert any("cp has no positions" in note for note in report.coverage.warnings)


class Embedding(nn.Module):
    """A model that takes Megatron's PackedSeqParams, in a process without Megatron."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 4)

    def forward(self, input_ids: Any, packed_seq_params: Any = None, attention_mask: Any = None) -> Any:
        return self.table(input_ids)


@pytest.mark.parametrize("is_padded", [False, True])
def test_recorded_packed_seq_params_are_the_bounds_of_sequences(tmp_path: Path, is_padded: bool) -> None:
    model, mask = Embedding(), torch.tensor([[1] * 5, [1] * 4 + [0]])
    with Dumper(model, tmp_path / "padded", keep="full"):
        model(torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]), attention_mask=mask)
    ids = [1, 2, 3, 4, 5, 0, 6, 7, 8, 9, 0, 0] if is_padded else [1, 2, 3, 4, 5, 6, 7, 8, 9]
    params = PackedSeqParams(torch.tensor([0, 5, 9]), torch.tensor([0, 6, 12]) if is_padded else None)
    with Dumper(model, tmp_path / "packed", keep="full"):
        model(torch.tensor(ids), packed_seq_params=params)
    report = compare(tmp_path / "padded", tmp_path / "packed")
    assert (report.exit_code, report.coverage.num_rows_aligned) == (0, 9), str(report)


@dataclass
class PackedSeqParams:
    cu_seqlens_q: torch.Tensor
    cu_seqlens_q_padded: torch.Tensor | None = None
