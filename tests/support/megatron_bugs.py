"""Bugs for a built Megatron model, each a function that megatron_team.py calls on every rank; no test in here."""

from typing import Any

import torch


def rope_theta(model: Any) -> None:
    """Angles that turn too fast: the base is 5,000 where it is 10,000."""
    rotary = model.rotary_pos_emb
    half = torch.arange(0, 2 * len(rotary.inv_freq), 2, dtype=torch.float32)
    rotary.inv_freq = 1.0 / (5000.0 ** (half / (2 * len(rotary.inv_freq))))


def missing_all_reduce(model: Any) -> None:
    """Every rank goes on with its own summand behind the MLP of layer 1."""
    model.decoder.layers[1].mlp.linear_fc2.explicit_expert_comm = True
    model.decoder.layers[1].mlp.linear_fc2.skip_bias_add = True


def gate_up_swapped(model: Any) -> None:
    """The halves of linear_fc1 in layer 2 are swapped."""
    weight = model.decoder.layers[2].mlp.linear_fc1.weight
    with torch.no_grad():
        weight.copy_(weight.roll(weight.shape[0] // 2, 0))


def missing_grad_all_reduce(model: Any) -> None:
    """The gradient that linear_qkv of layer 1 gives back is each rank's own; the forward is right."""
    qkv = model.decoder.layers[1].self_attention.linear_qkv
    qkv.allreduce_dgrad, qkv.disable_grad_reduce = False, True


def gradient_scaled(model: Any) -> None:
    """The backward of layer 1's attention gives back 0.9 of the gradient; the forward is right."""

    def scaled(module: Any, grads_in: Any, grads_out: Any) -> Any:
        return tuple(g * 0.9 if g is not None else None for g in grads_in)

    model.decoder.layers[1].self_attention.linear_proj.register_full_backward_hook(scaled)


def norm_eps(model: Any) -> None:
    """An epsilon of 1e-2 in the last norm."""
    model.decoder.final_layernorm.eps = 1e-2


def bias_dropped(model: Any) -> None:
    """The bias of layer 0's linear_qkv is not there."""
    with torch.no_grad():
        model.decoder.layers[0].self_attention.linear_qkv.bias.zero_()


def key_norm_dropped(model: Any) -> None:
    """Keys of layer 1 are not scaled by the weight of their norm."""
    with torch.no_grad():
        model.decoder.layers[1].self_attention.k_layernorm.weight.fill_(1.0)
