"""Identity of a rank: from the first source that has it, when a run opens, and again when groups are made."""

import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import forkserver_pool as warm
import pytest
import torch
from torch import nn
from transformers import Gemma4TextConfig

from tapscope.dumper.job import rank_identity
from tapscope.dumper.job.hyperparameters import hyperparameters
from tapscope.sources import open_run


def test_rank_identity_launchers_environment_counts_until_groups_exist() -> None:
    assert rank_identity.launcher_rank({"RANK": "3", "WORLD_SIZE": "8"}) == (3, 8)
    for odd in ({}, {"RANK": "3"}, {"RANK": "8", "WORLD_SIZE": "8"}, {"RANK": "x", "WORLD_SIZE": "8"}):
        assert rank_identity.launcher_rank(odd) == (0, 1)


def test_rank_identity_parallel_state_like_megatrons_reports_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    state = types.ModuleType("megatron.core.parallel_state")
    places = {"tensor_model_parallel": (4, 1), "pipeline_model_parallel": (2, 0), "data_parallel": (8, 7)}
    for name, (size, rank) in places.items():
        setattr(state, f"get_{name}_world_size", lambda size=size: size)
        setattr(state, f"get_{name}_rank", lambda rank=rank: rank)

    def not_made() -> int:
        raise AssertionError("context parallel group is not initialized")

    state.get_context_parallel_world_size = state.get_context_parallel_rank = not_made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, state.__name__, state)
    info = rank_identity.rank_info([nn.Linear(2, 2, dtype=torch.bfloat16)])
    assert info.mesh == {"tp": 4, "pp": 2, "dp": 8}
    assert info.coords == {"tp": 1, "pp": 0, "dp": 7}
    assert (info.framework, info.model, info.dtype) == ("megatron", "Linear", "bfloat16")


_JOB = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from tapscope import Dumper

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
model = nn.Linear(4, 4)
early = Dumper(model, folder / f"early-{rank}", keep="full").open()
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
sharded = nn.Linear(4, 4, bias=False)
sharded.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)]))
early.attach(sharded, name="sharded")
early.dump("x", 1)
early.step()
early.dump("y", 1)
early.close()
with Dumper(sharded, folder / "run", keep="full") as dumper:
    dumper.dump("x", rank)
dist.destroy_process_group()
"""


def test_rank_identity_reads_coordinates_from_late_device_meshes(tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(_JOB)
    ranks = [warm.start(program, tmp_path, rank, stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    said = [process.communicate(timeout=90)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    run = open_run(tmp_path / "run")
    assert (run.world_size, run.mesh) == (2, {"tp": 2})
    assert [run.coords(rank) for rank in run.ranks] == [{"tp": 0}, {"tp": 1}]
    assert run.ledger().complete
    early = open_run(tmp_path / "early-0")
    assert (early.mesh, early.coords(0)) == ({"tp": 2}, {"tp": 0})
    assert "open the run after init_process_group" in said[1]


_FSDP = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from tapscope import Dumper

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
fully_shard(model)
with Dumper(model, f"{folder}/run", keep="full", params=True) as dumper, dumper.step():
    model(torch.randn(3, 8)).sum().backward()
dist.destroy_process_group()
"""


def test_rank_identity_mesh_that_fully_shard_makes_is_data_parallel(tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(_FSDP)
    ranks = [warm.start(program, tmp_path, rank, stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    said = [process.communicate(timeout=90)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    run = open_run(tmp_path / "run")
    assert (run.mesh, run.ledger().complete) == ({"dp": 2}, True)
    assert {record.dims for record in run.select(["0:param[weight]"])} == {"d0[dp] d1"}
    assert {event.kind for event in run.events()} <= {"open", "config", "close"}
    assert "num_tokens" not in {metric.name for metric in run.metrics()}, "a model without token rows has none"


def test_rank_identity_ranks_of_distributed_data_parallel_are_data_parallel(tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    wrapped = _FSDP.replace("fully_shard(model)", "model = nn.parallel.DistributedDataParallel(model)")
    program.write_text(wrapped)
    ranks = [warm.start(program, tmp_path, rank, stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    said = [process.communicate(timeout=90)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    run = open_run(tmp_path / "run")
    assert (run.mesh, [run.coords(rank) for rank in run.ranks]) == ({"dp": 2}, [{"dp": 0}, {"dp": 1}])


def test_rank_identity_hyperparameters_have_one_spelling_whatever_the_framework() -> None:
    def of(**config: object) -> dict[str, int | float]:
        model = nn.Identity()
        model.config = SimpleNamespace(**config)  # type: ignore[assignment]
        return hyperparameters(model)

    llama = of(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, num_hidden_layers=3)
    megatron = of(hidden_size=64, num_attention_heads=4, num_query_groups=2, layernorm_epsilon=1e-6, num_layers=3)
    assert llama == megatron
    assert llama["head_dim"] == 16
    assert of(n_embd=32, n_head=4)["num_key_value_heads"] == 4
    assert hyperparameters(nn.Identity()) == {}
    gemma = Gemma4TextConfig(head_dim=24, global_head_dim=40, num_attention_heads=4, num_key_value_heads=2)
    read = of(get_text_config=lambda: gemma)
    assert (read["head_dim"], read["num_key_value_heads"]) == (24, 2), "transformers refuses to read these directly"
