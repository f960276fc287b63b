"""Bugs for a built Megatron model, each a function that megatron_team.py calls on every rank; contains no tests."""

from typing import Any

import torch


def rope_theta(model: Any) -> None:
    """Use a RoPE base of 5,000 instead of 10,000."""
    rotary = model.rotary_pos_emb
    half = torch.arange(0, 2 * len(rotary.inv_freq), 2, dtype=torch.float32)
    rotary.inv_freq = 1.0 / (5000.0 ** (half / (2 * len(rotary.inv_freq))))


def missing_all_reduce(model: Any) -> None:
    """Skip the all-reduce after the MLP of layer 1: every rank continues with its own partial sum."""
    model.decoder.layers[1].mlp.linear_fc2.explicit_expert_comm = True
    model.decoder.layers[1].mlp.linear_fc2.skip_bias_add = True


def gate_up_swapped(model: Any) -> None:
    """Swap the halves of linear_fc1 in layer 2."""
    weight = model.decoder.layers[2].mlp.linear_fc1.weight
    with torch.no_grad():
        weight.copy_(weight.roll(weight.shape[0] // 2, 0))


def missing_grad_all_reduce(model: Any) -> None:
    """Skip the all-reduce of the input gradient of linear_qkv in layer 1; the forward is correct."""
    qkv = model.decoder.layers[1].self_attention.linear_qkv
    qkv.allreduce_dgrad, qkv.disable_grad_reduce = False, True


def gradient_scaled(model: Any) -> None:
    """Scale the input gradient of layer 1's attention by 0.9; the forward is correct."""

    def scaled(module: Any, grads_in: Any, grads_out: Any) -> Any:
        return tuple(g * 0.9 if g is not None else None for g in grads_in)

    model.decoder.layers[1].self_attention.linear_proj.register_full_backward_hook(scaled)


def norm_eps(model: Any) -> None:
    """Set the epsilon of the last norm to 1e-2."""
    model.decoder.final_layernorm.eps = 1e-2


def bias_dropped(model: Any) -> None:
    """Zero the bias of linear_qkv in layer 0."""
    with torch.no_grad():
        model.decoder.layers[0].self_attention.linear_qkv.bias.zero_()


def key_norm_dropped(model: Any) -> None:
    """Drop the weight of the key norm in layer 1."""
    with torch.no_grad():
        model.decoder.layers[1].self_attention.k_layernorm.weight.fill_(1.0)
