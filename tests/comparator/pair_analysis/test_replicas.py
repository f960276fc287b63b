"""Ranks that should hold one value: which of them is wrong, and that it is a culprit though nobody declared them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.cli import main
from tapscope.comparator import Report

RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 16)).astype(np.float32)
NOISE = RNG.standard_normal((8, 16)).astype(np.float32)
DECLARED = "t h # tp:replicated"


def write(path: Path, tp: int, wrong: Mapping[int, float], dims: str | None, steps: int = 2) -> Path:
    """A gradient that all ranks should hold, which the weights of the next step are made of."""
    with RunFactory(path, mesh={"tp": tp}) as run:
        for step in range(steps):
            run.step()
            made = {rank: X + np.float32(step > 0) * np.float32(wrong.get(rank, 0.0)) for rank in range(tp)}
            torn = {rank: X + np.float32(wrong.get(rank, 0.0)) * NOISE for rank in range(tp)}
            run.put("fc:in[x]", dict.fromkeys(range(tp), X), dims=dims)
            run.put("fc:out", made, dims=DECLARED)
            run.put("fc:param[weight].grad", torn, dims=dims)
    return path


def diff_replicas(tmp_path: Path, wrong: Mapping[int, float], dims: str | None, tp: tuple[int, int]) -> Report:
    paths = write(tmp_path / "b", tp[0], {}, DECLARED if dims else None), write(tmp_path / "t", tp[1], wrong, dims)
    return diff(paths[0], paths[1])


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("dims", "tp"), [(None, (4, 4)), (None, (1, 4)), (DECLARED, (4, 4)), (DECLARED, (1, 4))])
def test_replicas_rank_contradicted_by_the_baseline_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int, dims: str | None, tp: tuple[int, int]
) -> None:
    report = diff_replicas(tmp_path, {rank: 0.5}, dims, tp)
    first = report.first_divergence
    assert first is not None
    assert (first.site, first.step) == ("fc:param[weight].grad", 0)
    assert first.place is not None
    assert first.place.rank == rank
    assert f"rank {rank} not as b has it" in first.finding.notes[0]
    assert main(["diff", str(tmp_path / "b"), str(tmp_path / "t")]) == 1
    assert f"step 0, rank {rank};" in capsys.readouterr().out


def test_replicas_no_rank_is_named_when_all_are_wrong(tmp_path: Path) -> None:
    report = diff_replicas(tmp_path, {rank: 0.5 + rank for rank in range(4)}, None, (4, 4))
    assert report.first_divergence is not None
    assert report.first_divergence.site == "fc:param[weight].grad"
    assert report.first_divergence.place is not None
    assert report.first_divergence.place.rank is None


def test_replicas_summands_are_not_taken_for_wrong_replicas(tmp_path: Path) -> None:
    """A rank's summand is nearer to the sum than the other's, but far from it."""
    for name, parts in (("b", {0: X + NOISE}), ("t", {0: X + np.float32(0.9) * NOISE, 1: np.float32(0.1) * NOISE})):
        with RunFactory(tmp_path / name, mesh={"tp": len(parts)}) as run:
            run.step()
            run.put("fc:out", parts)
    report = diff(tmp_path / "b", tmp_path / "t")
    found = next(f for f in report.findings if f.site == "fc:out")
    assert found.verdict == "shape"
    assert "tp:partial" in found.notes[0]


def test_replicas_that_differ_in_both_runs_need_dims(tmp_path: Path) -> None:
    paths = write(tmp_path / "b", 2, {1: 0.5}, None), write(tmp_path / "t", 2, {1: 0.5}, None)
    report = diff(paths[0], paths[1])
    found = next(f for f in report.findings if f.site == "fc:param[weight].grad")
    assert found.verdict == "shape"
    assert "hold different values" in found.notes[0]


def write_losses(path: Path, mesh: Mapping[str, int], losses: Mapping[int, float], site: str = ":out[loss]") -> Path:
    with RunFactory(path, mesh=mesh) as run:
        for _ in range(2):
            run.step()
            run.put("fc:in[x]", dict.fromkeys(losses, X), dims="t h")
            run.put(site, {rank: np.array(loss, np.float32) for rank, loss in losses.items()})
    return path


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}])
def test_replicas_losses_of_data_parallel_ranks_are_compared_rank_by_rank(
    tmp_path: Path, mesh: Mapping[str, int]
) -> None:
    num_tp = mesh.get("tp", 1)
    losses = {rank: 3.0 + rank // num_tp for rank in range(2 * num_tp)}
    base = write_losses(tmp_path / "b", mesh, losses)
    assert diff(base, write_losses(tmp_path / "same", mesh, losses)).exit_code == 0
    wrong = {rank: loss + (rank // num_tp) for rank, loss in losses.items()}
    first = diff(base, write_losses(tmp_path / "wrong", mesh, wrong)).first_divergence
    assert first is not None
    assert first.site == ":out[loss]"
    assert first.place is not None
    assert first.place.rank == (1 if num_tp == 1 else None)  # two ranks have the wrong loss


@pytest.mark.parametrize(("mesh", "site"), [({"tp": 2}, ":out[loss]"), ({"dp": 2}, "fc:param[scale].grad")])
def test_replicas_other_ranks_that_differ_in_both_runs_need_dims(
    tmp_path: Path, mesh: Mapping[str, int], site: str
) -> None:
    paths = [write_losses(tmp_path / name, mesh, {0: 3.0, 1: 4.0}, site) for name in "bt"]
    found = next(f for f in diff(*paths).findings if f.site == site)
    assert found.verdict == "shape"
    assert "hold different values" in found.notes[0]


@pytest.mark.parametrize(("wrong", "rank"), [((0,), 0), ((1,), 1), ((0, 1), None)])
def test_replicas_shard_rank_is_named_when_the_others_agree(
    tmp_path: Path, wrong: tuple[int, ...], rank: int | None
) -> None:
    for name, is_bad in (("b", False), ("t", True)):
        with RunFactory(tmp_path / name, mesh={"tp": 2}) as run:
            run.step()
            run.put("fc:in[x]", {0: X, 1: X}, dims=DECLARED)
            parts = {i: part * np.float32(1.5 if is_bad and i in wrong else 1.0) for i, part in enumerate((X, NOISE))}
            run.put("fc:out", parts, dims="t h[tp]")
    first = diff(tmp_path / "b", tmp_path / "t").first_divergence
    assert first is not None
    assert first.place is not None
    assert first.place.rank == rank
