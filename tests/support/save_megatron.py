"""Saves a rank's model as Megatron-LM does, called from a patch of examples/megatron_team.py; contains no tests."""

import argparse
import multiprocessing
import queue
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch


def save_to(path: Path, model: Any) -> None:
    """Write ``iter_0000010/mp_rank_TT/model_optim_rng.pt`` of this rank, in the layout of megatron.training.

    With expert parallelism, the directory is ``mp_rank_TT_EEE``.
    """
    from megatron.core import parallel_state

    args, rank = args_of(model), parallel_state.get_tensor_model_parallel_rank()
    of_experts = (
        f"_{parallel_state.get_expert_model_parallel_rank():03d}" if args.expert_model_parallel_size > 1 else ""
    )
    folder = path / "iter_0000010" / f"mp_rank_{rank:02d}{of_experts}"
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict_for_save_checkpoint()
    rng = [{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state()}]
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
    content = {"args": args, "checkpoint_version": 3.0, "iteration": 10, "model": state}
    torch.save(content | {"optimizer": optimizer, "rng_state": rng}, folder / "model_optim_rng.pt")
    (folder.parent.parent / "latest_checkpointed_iteration.txt").write_text("10")


def save_distributed(path: Path, model: Any) -> None:
    """Write ``iter_0000010`` as ``--ckpt-format torch_dist`` does, by megatron.core.dist_checkpointing."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    folder = path / "iter_0000010"
    folder.mkdir(parents=True, exist_ok=True)
    (path / "latest_checkpointed_iteration.txt").write_text("10")
    # Its writer starts processes, passes results through another one, and queries the device of an all-reduce and its
    # stream.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    sharded = model.sharded_state_dict()
    moments = {
        name: replace(one, key=f"optimizer.state.exp_avg.{one.key}")
        for name, one in sharded.items()
        if isinstance(one, ShardedTensor)
    }
    state = {"args": args_of(model), "checkpoint_version": 3.0, "iteration": 10, "model": sharded, "optimizer": moments}
    with (
        patch.object(filesystem_async, "_results_queue", queue.SimpleQueue()),
        patch("torch.cuda.synchronize"),
        patch("torch.cuda.current_device", return_value=torch.device("cpu")),
    ):
        dist_checkpointing.save(state, str(folder))


def args_of(model: Any) -> argparse.Namespace:
    """Return the arguments that Megatron-LM saves with a model, limited to those that describe the model."""
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnBackend

    config = model.config
    return argparse.Namespace(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        swiglu=config.gated_linear_unit,
        untie_embeddings_and_output_weights=not model.share_embeddings_and_output_weights,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        attention_backend=AttnBackend.flash,
        params_dtype=torch.float32,
    )
