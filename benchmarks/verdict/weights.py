"""Weights: distributions of a small model's weights, from random initialization to long training."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.verdict.workload import BOS

Fill = Callable[[str, Tensor, Any, torch.Generator], Tensor]
"""(name, parameter, model config, random generator) -> new values of the parameter."""


def fill(model: Any, style: str, seed: int) -> None:
    """Fill all weights of a model in one of :data:`STYLES`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data = STYLES[style](name, parameter.data, model.config, generator)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:  # zero before training balances the load
            buffer.copy_(0.15 * torch.randn(buffer.shape, generator=generator))


def _spread(name: str, weight: Tensor, config: Any, draw: torch.Generator) -> Tensor:
    """Draw weights with a scale per channel, large biases, and a massive activation at the first token."""
    if weight.ndim == 1 and name.endswith("bias"):
        return torch.randn(weight.shape, generator=draw) * (2.0 if "k_proj" in name else 0.3)
    if "lambda_" in name:  # in DiffLlama, their product is an exponent
        return torch.randn(weight.shape, generator=draw) * 0.2
    if weight.ndim == 1:
        return _norm(name, weight, config, draw)
    if _is_embedding(name):
        return _embedding(name, weight, draw)
    transposed = config.model_type == "gpt2"
    table = torch.randn(weight.shape, generator=draw) * _gain(name) / math.sqrt(weight.shape[-2 if transposed else -1])
    rows = torch.randn((*weight.shape[:-1], 1), generator=draw) * (0.2 if transposed else 0.4)
    columns = torch.randn((*weight.shape[:-2], 1, weight.shape[-1]), generator=draw) * (0.4 if transposed else 0.2)
    return table * rows.exp() * columns.exp()


def _norm(name: str, weight: Tensor, config: Any, draw: torch.Generator) -> Tensor:
    """Draw norm weights around a level that grows with depth; two channels stand out."""
    layer = next((int(part) for part in name.split(".") if part.isdigit()), 2)
    level = 1.2 if "q_norm" in name or "k_norm" in name else 0.5 + 0.5 * min(layer / config.num_hidden_layers, 1.0)
    values = level * (1 + 0.25 * torch.randn(weight.shape, generator=draw))
    values[torch.randperm(len(values), generator=draw)[:2]] *= 3.0
    return values - _unit_offset(config)


def _embedding(name: str, weight: Tensor, draw: torch.Generator) -> Tensor:
    table = torch.randn(weight.shape, generator=draw) * 0.5
    table = table * (torch.randn((len(weight), 1), generator=draw) * 0.3).exp()
    if "wpe" in name:
        return 0.2 * table
    table[BOS, torch.randperm(weight.shape[1], generator=draw)[:2]] = 25.0
    return table


def _normal(std: float) -> Fill:
    """Return a fill like that of ``from_config``: one scale for all matrices, norm weights of one, no biases."""

    def draw_one(name: str, weight: Tensor, config: Any, draw: torch.Generator) -> Tensor:
        if weight.ndim > 1:
            return torch.randn(weight.shape, generator=draw) * std
        return torch.zeros_like(weight) if name.endswith("bias") else torch.ones_like(weight) - _unit_offset(config)

    return draw_one


def _heavy(name: str, weight: Tensor, config: Any, draw: torch.Generator) -> Tensor:
    """Draw heavy-tailed weights: Student's t with 4 degrees of freedom, norm weights from 0.05 to 10, huge channels."""
    shape = weight.shape
    if weight.ndim == 1 and name.endswith("bias"):
        return torch.randn(shape, generator=draw) * (torch.randn(shape, generator=draw)).exp() * 0.3
    if weight.ndim == 1:
        return (torch.randn(shape, generator=draw) * 0.9 - 0.5).exp().clamp(0.05, 10.0) - _unit_offset(config)
    tails = torch.randn((4, *shape), generator=draw).square().mean(0).rsqrt()
    table = torch.randn(shape, generator=draw) * tails
    if not _is_embedding(name):
        return table * 0.7 * _gain(name) / math.sqrt(shape[-2 if config.model_type == "gpt2" else -1])
    table *= 0.05 if "wpe" in name else 0.3
    table[:, :2] *= 1.0 if "wpe" in name else 12.0
    return table


STYLES: Mapping[str, Fill] = {
    "spread": _spread,
    "heavy": _heavy,
    "normal": _normal(0.02),
    "wide": _normal(0.2),
    "trained": _normal(0.02),
}
"""``trained`` starts as ``normal``; :class:`.models.Model` trains it."""

_GAINS = {
    "q_proj": 1.3,
    "k_proj": 1.3,
    "o_proj": 0.7,
    "c_attn": 1.2,
    "lm_head": 1.5,
    "mlp.gate.": 2.0,
    "down_proj": 0.9,
    "c_proj": 0.8,
}


def _gain(name: str) -> float:
    return next((gain for part, gain in _GAINS.items() if part in name), 1.0)


def _is_embedding(name: str) -> bool:
    return "embed" in name or "wte" in name or "wpe" in name


def _unit_offset(config: Any) -> float:
    """Return 1 for Gemma, whose norms multiply by 1 + weight, else 0."""
    return 1.0 if config.model_type.startswith("gemma") else 0.0
