"""Kimi-Linear with Hugging Face's module names: Kimi Delta Attention in most layers, latent attention in the others."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice, parameter
from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.delta_layer import DeltaLayer
from tapscope.engine.layers.linear import ColumnParallelLinear, FusedLinear, ReplicatedLinear, RowParallelLinear
from tapscope.engine.layers.norm import HEADS
from tapscope.engine.layers.probe import SHARD, WHOLE, Probe
from tapscope.engine.layers.routers import DeepseekV3Router
from tapscope.engine.layers.short_conv import ConvWeight
from tapscope.engine.models.deepseek import DeepseekAttention, LatentCausalLM
from tapscope.engine.models.hybrid import HybridDecoderLayer
from tapscope.engine.models.mamba2 import UnrotatedDecoder
from tapscope.engine.models.qwen3_next import DeltaCausalLM, GatedRMSNorm


class KimiConvWeight(ConvWeight):
    """Joint convolution weight of queries, keys and values, which published checkpoints store as three tensors."""

    def layouts(self, path: str) -> Iterator[list[WeightSlice]]:
        """Yield the layout with three tensors, then the one with a single tensor, as in transformers."""
        parent, sizes = path.rpartition(".")[0], [part.count for part in self.parts]
        yield [
            WeightSlice(f"{parent}.{name}_conv1d.weight", (part.total, 1, self.kernel), into, 0, part.start)
            for name, part, into in zip("qkv", self.parts, torch.split(self.weight, sizes), strict=True)
        ]
        yield list(self.weight_slices(path))


class KimiForgetGate(CheckpointModule):
    """Log-decay of each key feature: -exp(A_log) * softplus(f_b_proj(f_a_proj(x)) + dt_bias), in float32."""

    def __init__(self, hidden_size: int, heads: Shard, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.features = heads, heads.scaled(dim)
        self.f_a_proj = ReplicatedLinear(hidden_size, dim, False, dtype)
        self.f_b_proj = ColumnParallelLinear(dim, self.features, False, dtype)
        self.dt_bias = parameter(self.features.count, dtype=dtype)
        self.A_log = parameter(1, 1, heads.count, 1, dtype=dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": HEADS}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, heads, key]."""
        step = self.f_b_proj(self.f_a_proj(hidden_states)).float() + self.dt_bias.float()
        rate = functional.softplus(step).view(len(step), self.heads.count, -1)
        return -torch.exp(self.A_log[0].float()) * rate

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield this rank's heads of ``dt_bias`` and ``A_log``; submodules yield their own weights."""
        yield WeightSlice(f"{path}.dt_bias", (self.features.total,), self.dt_bias, 0, self.features.start)
        yield WeightSlice(f"{path}.A_log", (1, 1, self.heads.total, 1), self.A_log, 2, self.heads.start)


class KimiGatedRMSNorm(GatedRMSNorm):
    """x / rms(x) * weight * sigmoid(gate) per head, all in float32.

    Counterpart of transformers' KimiLinearRMSNormGated.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__(size, eps, dtype)
        self.tap_dims = dict.fromkeys(("in[hidden_states]", "in[gate]", "out"), HEADS)

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Map states and gates, [tokens, heads, size] each, to [tokens, heads, size] in the input's dtype."""
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * wide * torch.sigmoid(gate.float())).to(hidden_states.dtype)


class KimiDeltaAttention(DeltaLayer):
    """Kimi Delta Attention, arXiv:2510.26692, over this rank's heads.

    Counterpart of transformers' KimiLinearDeltaAttention.
    """

    conv_class = KimiConvWeight

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        heads, dim, hidden = Shard.of(self.linear.num_key_heads, tp), self.linear.key_dim, config.hidden_size
        features = heads.scaled(dim)
        self.qkv_proj = FusedLinear(hidden, dict.fromkeys(("q_proj", "k_proj", "v_proj"), features), False, dtype)
        self.q_proj, self.k_proj, self.v_proj = Probe(SHARD), Probe(SHARD), Probe(SHARD)
        self.forget_gate = KimiForgetGate(hidden, heads, dim, dtype)
        self.b_proj = ColumnParallelLinear(hidden, heads, False, dtype)
        self.g_a_proj = ReplicatedLinear(hidden, dim, False, dtype)
        self.g_b_proj = ColumnParallelLinear(dim, features, False, dtype)
        self.o_norm = KimiGatedRMSNorm(dim, config.rms_norm_eps, dtype)
        self.o_proj = RowParallelLinear(features, hidden, False, tp, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor, cache_params: StepCache) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and updates the recurrent states of the requests."""
        query, key, value = self.qkv_proj(hidden_states)
        mixed = torch.cat((self.q_proj(query), self.k_proj(key), self.v_proj(value)), dim=-1)
        decay, beta = self.forget_gate(hidden_states), torch.sigmoid(self.b_proj(hidden_states)).float()
        core = self.attend(mixed, decay, beta, cache_params).to(hidden_states.dtype)
        gate = self.g_b_proj(self.g_a_proj(hidden_states)).view(core.shape)
        output: Tensor = self.o_proj(self.o_norm(core, gate).flatten(1))
        return output


class KimiLinearAttention(DeepseekAttention):
    """Latent attention without rotary embedding; counterpart of transformers' KimiLinearAttention."""

    def rotate(self, states: Tensor, position_embeddings: Any) -> Tensor:
        """Return ``states`` unchanged."""
        return states


class KimiLinearDecoderLayer(HybridDecoderLayer):
    """Counterpart of transformers' KimiLinearDecoderLayer: both kinds of attention are called ``self_attn``."""

    router = DeepseekV3Router
    recurrent_name = "self_attn"
    recurrent_class = KimiDeltaAttention
    attention_class = KimiLinearAttention


_PUBLISHED = {
    "block_sparse_moe.": "mlp.",
    "self_attn.f_a_proj.": "self_attn.forget_gate.f_a_proj.",
    "self_attn.f_b_proj.": "self_attn.forget_gate.f_b_proj.",
    "self_attn.dt_bias": "self_attn.forget_gate.dt_bias",
    "self_attn.A_log": "self_attn.forget_gate.A_log",
}
"""Prefix within a layer of published checkpoints -> prefix in transformers."""


class KimiLinearForCausalLM(DeltaCausalLM, LatentCausalLM):
    """Kimi-Linear, arXiv:2510.26692; transformers' `modeling_kimi_linear.py`."""

    decoder_class = UnrotatedDecoder
    layer_class = KimiLinearDecoderLayer

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, tp, dtype)
        self.checkpoint_prefixes = {  # type: ignore[misc]  # one for each layer
            f"model.layers.{layer}.{old}": f"model.layers.{layer}.{new}"
            for layer in range(config.num_layers)
            for old, new in _PUBLISHED.items()
        }
