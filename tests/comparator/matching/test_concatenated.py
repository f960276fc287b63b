"""Runs that do not say which token rows their steps hold, and cut the same rows into other steps."""

from pathlib import Path

import pytest
import torch
from compare_runs import diff
from sglang_dumps import SglangDump


def cut(folder: Path, whole: torch.Tensor, cuts: tuple[int, ...], *, dims: str | None = "t h", tp: int = 1) -> str:
    dump = SglangDump(folder, tp=tp)
    for rows in torch.split(whole, cuts):
        dump.number += 1
        shards = dict(enumerate(rows.chunk(tp, -1)))
        dump.dump("x", shards if tp > 1 else rows, dims=dims and dims.replace("h", "h[tp]") if tp > 1 else dims)
    return str(folder)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("swapped", [False, True])
def test_concatenated_steps_without_ids_are_compared_as_one(tmp_path: Path, swapped: bool, tp: int) -> None:
    whole = torch.randn(12, 8)
    paths = [cut(tmp_path / "base", whole, (12,)), cut(tmp_path / "target", whole, (5, 4, 1, 1, 1), tp=tp)]
    paths = paths[::-1] if swapped else paths
    report = diff(*paths)
    assert report.exit_code != 0
    notes = [note for finding in report.findings for note in finding.notes]
    assert tp > 1 or any("both hold 12 rows in all, in different steps: --concat-steps" in note for note in notes), (
        notes
    )
    assert diff(*paths, concat_steps=True).exit_code == 0
    wrong = whole.clone()
    wrong[9] *= 1.5
    report = diff(paths[0], cut(tmp_path / "wrong", wrong, (7, 5)), concat_steps=True)
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.place is not None
    assert report.first_divergence.place.index[0] == 9


def test_concatenated_steps_of_different_total_size_do_not_match(tmp_path: Path) -> None:
    whole = torch.randn(12, 8)
    paths = [cut(tmp_path / "base", whole, (12,)), cut(tmp_path / "target", whole[:11], (5, 6))]
    assert diff(*paths, concat_steps=True).exit_code != 0
