"""Saves a rank's model as Megatron-LM does, from a patch of examples/megatron_team.py; no test in here."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch


def save_to(path: Path, model: Any) -> None:
    """Write ``iter_0000010/mp_rank_TT/model_optim_rng.pt`` of this rank, by the layout of megatron.training."""
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnBackend

    config, rank = model.config, parallel_state.get_tensor_model_parallel_rank()
    args = argparse.Namespace(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        swiglu=config.gated_linear_unit,
        untie_embeddings_and_output_weights=not model.share_embeddings_and_output_weights,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        attention_backend=AttnBackend.flash,
        params_dtype=torch.float32,
    )
    folder = path / "iter_0000010" / f"mp_rank_{rank:02d}"
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict_for_save_checkpoint()
    rng = [{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state()}]
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
    content = {"args": args, "checkpoint_version": 3.0, "iteration": 10, "model": state}
    torch.save(content | {"optimizer": optimizer, "rng_state": rng}, folder / "model_optim_rng.pt")
    (folder.parent.parent / "latest_checkpointed_iteration.txt").write_text("10")
