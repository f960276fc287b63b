"""Files of Megatron's expert-parallel ranks, saved by torch with the names, numbers and copies of megatron.training.

tests/comparator/test_megatron_moe.py uses a checkpoint written by Megatron itself.
"""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_runs import diff

from tapscope.cli import main
from tapscope.comparator import Verdict

EXPERTS, LAYERS, HIDDEN = 4, 2, 8
CULPRIT = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2:param[weight]"
Weights = dict[str, torch.Tensor]
Naming = Callable[[str, int], str]


def local(part: str, number: int) -> str:
    return f"local_experts.{number}.{part}.weight"


def grouped(part: str, number: int) -> str:
    """Return the parameter name in Transformer Engine's grouped form."""
    return f"{part}.weight{number}"


def weights(experts: range, layers: range, name: Naming) -> Weights:
    """Return the weights of one rank; layers and experts are numbered from 0 on every rank."""
    found: Weights = {}

    def add(own: str, seed: int, *shape: int) -> None:
        found[own] = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    if 0 in layers:
        add("embedding.word_embeddings.weight", 1, 16, HIDDEN)
    for layer in layers:
        start = f"decoder.layers.{layer - layers.start}"
        add(f"{start}.self_attention.linear_proj.weight", 100 + layer, HIDDEN, HIDDEN)
        add(f"{start}.mlp.router.weight", 200 + layer, EXPERTS, HIDDEN)
        for expert in experts:
            for number, part in enumerate(("linear_fc1", "linear_fc2")):
                own = f"{start}.mlp.experts.{name(part, expert - experts.start)}"
                add(own, 1000 + 100 * layer + 10 * expert + number, HIDDEN * (2 - number), HIDDEN)
    return found


def shard(own: str, value: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Return the tensor-parallel shard of a parameter: rows of the gate and up projections, or columns."""
    if "linear_fc1" in own:
        return torch.cat([half.chunk(tp)[rank] for half in value.chunk(2)])
    axis = 0 if "word_embeddings" in own else 1 if "router" not in own else None
    return value if axis is None else value.chunk(tp, axis)[rank].clone()


def save(
    path: Path,
    *,
    tp: int = 1,
    ep: int = 1,
    pp: int = 1,
    name: Naming = local,
    wrong: bool = False,
    expert_shards: int | None = None,
) -> Path:
    """Write one file per rank, named like get_checkpoint_name of megatron.training."""
    args = argparse.Namespace(
        num_layers=LAYERS,
        num_experts=EXPERTS,
        swiglu=True,
        untie_embeddings_and_output_weights=True,
        tensor_model_parallel_size=tp,
        expert_tensor_parallel_size=expert_shards,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
    )
    for stage in range(pp):
        for rank in range(ep):
            here, layers = EXPERTS // ep, range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp)
            model = weights(range(rank * here, (rank + 1) * here), layers, name)
            if wrong and rank == ep - 1 and stage == pp - 1:
                last = f"decoder.layers.{LAYERS // pp - 1}.mlp.experts.{name('linear_fc2', here - 1)}"
                model[last] = model[last] * 1.1
            for one in range(tp):
                file = f"mp_rank_{one:02d}" + (f"_{stage:03d}" if pp > 1 else "") + (f"_{rank:03d}" if ep > 1 else "")
                (path / file).mkdir(parents=True)
                is_whole = {own: ".experts." in own and expert_shards == 1 for own in model}
                held = {own: value if is_whole[own] else shard(own, value, tp, one) for own, value in model.items()}
                content = {"args": args, "checkpoint_version": 3.0, "iteration": 10, "model": held}
                torch.save(content, path / file / "model_optim_rng.pt")
    return path


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return save(tmp_path / "whole")


@pytest.mark.parametrize("name", [local, grouped])
@pytest.mark.parametrize(("ep", "pp"), [(2, 1), (4, 1), (2, 2), (1, 2)])
def test_expert_ranks_hold_one_model(tmp_path: Path, whole: Path, ep: int, pp: int, name: Naming) -> None:
    report = diff(whole, save(tmp_path / "ranks", ep=ep, pp=pp, name=name))
    assert (report.exit_code, {f.verdict for f in report.findings}) == (0, {Verdict.SAME}), str(report)
    assert report.coverage.num_sites_matched == len(report.findings) == 1 + LAYERS * (2 + 2 * EXPERTS)


@pytest.mark.parametrize("name", [local, grouped])
@pytest.mark.parametrize(("ep", "pp", "expert_shards"), [(1, 1, None), (1, 1, 1), (2, 1, None), (2, 2, 2)])
def test_expert_ranks_hold_shards_of_experts(
    tmp_path: Path, whole: Path, ep: int, pp: int, name: Naming, expert_shards: int | None
) -> None:
    sizes: dict[str, Any] = {"tp": 2, "ep": ep, "pp": pp, "name": name, "expert_shards": expert_shards}
    report = diff(whole, save(tmp_path / "ranks", **sizes))
    assert (report.exit_code, {f.verdict for f in report.findings}) == (0, {Verdict.SAME}), str(report)
    assert report.coverage.num_sites_matched == len(report.findings) >= 1 + LAYERS * (2 + 2 * EXPERTS)
    report = diff(whole, save(tmp_path / "wrong", wrong=True, **sizes))
    assert [f.site for f in report.findings if f.verdict.is_bad] == [CULPRIT]


def test_expert_ranks_of_other_tensor_parallel_groups_are_refused_in_one_sentence(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(whole), str(save(tmp_path / "ranks", tp=2, ep=2, expert_shards=1))]) == 3
    said = capsys.readouterr().err
    assert "expert-tensor-parallel-size 1 with tensor-model-parallel-size 2" in said
    assert "save as torch_dist" in said


@pytest.mark.parametrize("name", [local, grouped])
@pytest.mark.parametrize(("ep", "pp"), [(2, 1), (2, 2)])
def test_expert_of_a_rank_that_differs_is_named(tmp_path: Path, whole: Path, ep: int, pp: int, name: Naming) -> None:
    report = diff(whole, save(tmp_path / "ranks", ep=ep, pp=pp, name=name, wrong=True))
    assert [f.site for f in report.findings if f.verdict.is_bad] == [CULPRIT]


def test_expert_ranks_of_which_one_holds_another_router_are_named(tmp_path: Path, whole: Path) -> None:
    path = save(tmp_path / "ranks", ep=2) / "mp_rank_00_001" / "model_optim_rng.pt"
    content: dict[str, Any] = torch.load(path, weights_only=False)
    content["model"]["decoder.layers.0.mlp.router.weight"] += 1.0
    torch.save(content, path)
    report = diff(whole, tmp_path / "ranks")
    assert [f.site for f in report.findings if f.verdict.is_bad] == ["decoder.layers.0.mlp.router:param[weight]"]


def test_expert_rank_that_is_missing_is_named(tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(save(tmp_path / "ranks", ep=2, pp=2) / "mp_rank_00_001_000")
    assert main(["diff", str(whole), str(tmp_path / "ranks")]) != 0
    assert "mp_rank_00_001_000 is missing, and with it its shards" in capsys.readouterr().out


def test_experts_of_a_rank_in_one_tensor_are_refused_in_one_sentence(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "ranks", ep=2, name=lambda part, number: f"weight{1 + (part == 'linear_fc2')}")
    assert main(["diff", str(whole), str(tmp_path / "ranks")]) == 3
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "holds the experts of one rank in one tensor (legacy grouped GEMM), which is not read" in err
