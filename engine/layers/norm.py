"""Normalization layers, replicated on every rank unless sharded explicitly."""

from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice, parameter
from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.layers.fused import fused_for
from tapscope.engine.layers.probe import WHOLE, is_watched, notify
from tapscope.engine.layers.quantized import InputQuantizer

HEADS = "t num_heads[tp] d"
"""Dims of queries and keys that are normalized per head."""


class RMSNorm(CheckpointModule):
    """x / rms(x) * weight over the last axis, arXiv:1910.07467; float32 accumulation as in LlamaRMSNorm."""

    is_gemma: ClassVar[bool] = False
    has_kernel: ClassVar[bool] = True
    """Whether fused kernels support this norm."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, dims: str = WHOLE) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype)
        self.eps = eps
        self.tap_dims = {"in[hidden_states]": dims, "out": dims}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize [..., size] over the last axis, in the dtype of ``hidden_states``."""
        if (fused := fused_for(hidden_states)) is not None and hidden_states.dtype == self.weight.dtype:
            return fused.rms_norm(hidden_states, self.weight, self.eps)
        normalised = _normalised(hidden_states, self.eps, hidden_states.dtype)
        return normalised.mul_(self.weight) if normalised.dtype == self.weight.dtype else self.weight * normalised

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield the whole weight vector."""
        yield WeightSlice(f"{path}.weight", tuple(self.weight.shape), self.weight)


class UnscaledRMSNorm(nn.Module):
    """x / rms(x) over the last axis, without a weight; transformers' Gemma3nRMSNorm without a scale."""

    def __init__(self, eps: float, dims: str = WHOLE) -> None:
        super().__init__()
        self.eps, self.tap_dims = eps, {"in[hidden_states]": dims, "out": dims}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize [..., size] over the last axis, in the dtype of ``hidden_states``."""
        return _normalised(hidden_states, self.eps, hidden_states.dtype)


class GemmaRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), all in float32 as in transformers' Gemma2RMSNorm."""

    is_gemma = True

    def __init__(self, size: int, eps: float, dtype: torch.dtype, dims: str = WHOLE) -> None:
        super().__init__(size, eps, dtype, dims)
        self.tap_dims = {"in[x]": dims, "out": dims}

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., size] over the last axis, in the dtype of ``x``."""
        if (fused := fused_for(x)) is not None and x.dtype == self.weight.dtype:
            return fused.rms_norm(x, self.weight, self.eps, is_gemma=True)
        return (_normalised(x, self.eps, torch.float32) * (1.0 + self.weight.float())).to(x.dtype)


class LayerNorm(RMSNorm):
    """torch's LayerNorm with weight and bias, arXiv:1607.06450."""

    has_kernel = False

    def __init__(self, size: int, eps: float, dtype: torch.dtype, dims: str = WHOLE) -> None:
        super().__init__(size, eps, dtype, dims)
        self.bias = parameter(size, dtype=dtype)
        self.tap_dims = {"in[input]": dims, "out": dims}

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [..., size] over the last axis, in the dtype of ``input``."""
        return functional.layer_norm(input, self.weight.shape, self.weight, self.bias, self.eps)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield the whole weight and bias vectors."""
        yield from super().weight_slices(path)
        yield WeightSlice(f"{path}.bias", tuple(self.bias.shape), self.bias)


class CohereLayerNorm(RMSNorm):
    """LayerNorm without a bias, all in float32 as in transformers' CohereLayerNorm."""

    has_kernel = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize [..., size] over the last axis, in the dtype of ``hidden_states``."""
        wide = hidden_states.float()
        normalised = functional.layer_norm(wide, self.weight.shape, self.weight.float(), eps=self.eps)
        return normalised.to(hidden_states.dtype)


class Olmo2RMSNorm(RMSNorm):
    """x / rms(x) * weight, all in float32 as in transformers' Olmo2RMSNorm."""

    has_kernel = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize [..., size] over the last axis, in the dtype of ``hidden_states``."""
        return (self.weight * _normalised(hidden_states, self.eps, torch.float32)).to(hidden_states.dtype)


class ShardedRMSNorm(Olmo2RMSNorm):
    """Olmo2RMSNorm over features that are split over ranks; an all-reduce sums the squares."""

    def __init__(self, features: Shard, eps: float, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(features.count, eps, dtype, features.dims("h"))
        self.features, self.tp = features, tp

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize [tokens, this rank's features] over the features of all ranks, in the input's dtype."""
        wide = hidden_states.float()
        squares = wide.square().sum(-1, keepdim=True)
        if not self.features.is_whole:
            squares = self.tp.all_reduce(squares) / self.features.copies
        return (self.weight * (wide * torch.rsqrt(squares / self.features.total + self.eps))).to(hidden_states.dtype)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield this rank's part of the weight vector."""
        yield WeightSlice(f"{path}.weight", (self.features.total,), self.weight, 0, self.features.start)


def add_norm(
    norm: RMSNorm,
    states: Tensor,
    residual: Tensor | None,
    post_norm: RMSNorm | None = None,
    *,
    on_sum: Callable[[Tensor], None] | None = None,
    quantizer: InputQuantizer | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (norm(residual + states), residual + states), in one kernel if possible; ``residual`` None means zero.

    With ``post_norm``, ``states`` is first normalized by ``post_norm``. ``on_sum`` is called with the sum before
    ``norm`` runs or its taps are notified. ``quantizer`` is the input quantizer of the layer that receives the first
    result; the fused kernel then quantizes too.
    """
    if residual is None:
        if on_sum is not None:
            on_sum(states)
        return norm(states), states
    norms = [norm] if post_norm is None else [norm, post_norm]
    fused = fused_for(states, *norms) if all(each.has_kernel for each in norms) else None
    if post_norm is not None and is_watched(post_norm):  # the fused kernel does not store its output
        fused = None
    is_one_dtype = states.dtype == residual.dtype == norm.weight.dtype  # Mamba-2 has a float32 residual
    if fused is not None and is_one_dtype and all(each.eps == norm.eps for each in norms):
        post_weight = None if post_norm is None else post_norm.weight
        quantized = None if quantizer is None else quantizer.offer(states)
        normalised, hidden_states = fused.add_rms_norm(
            states, residual, norm.weight, norm.eps, is_gemma=norm.is_gemma, post_weight=post_weight,
            quantized=quantized,
        )  # fmt: skip
        if quantizer is not None:
            quantizer.keep(normalised, quantized)
        if on_sum is not None:
            on_sum(hidden_states)
        notify(norm, normalised, hidden_states)
        return normalised, hidden_states
    hidden_states = residual + (states if post_norm is None else post_norm(states))
    if on_sum is not None:
        on_sum(hidden_states)
    return norm(hidden_states), hidden_states


def _normalised(states: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return states / rms(states), computed in float32 and rounded to ``dtype``."""
    if states.is_cuda:  # one kernel, which accumulates in float32
        return functional.rms_norm(states.to(dtype), states.shape[-1:], eps=eps)
    wide = states.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))).to(dtype)
