"""Qwen3-Next with Hugging Face's module names: mostly gated delta nets, else gated attention, and experts."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice, parameter
from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.linear_config import LinearAttentionConfig
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.delta_layer import DeltaLayer
from tapscope.engine.layers.linear import ColumnParallelLinear, FusedLinear, RowParallelLinear
from tapscope.engine.layers.norm import GemmaRMSNorm
from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.layers.routers import Qwen3MoeRouter
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import Rotation
from tapscope.engine.models.hybrid import HybridDecoderLayer
from tapscope.engine.models.moe import MoeCausalLM, Qwen2MoeSparseMoeBlock


class Qwen3NextAttention(SelfAttention):
    """Attention whose output is multiplied by sigmoid(gate); ``q_proj`` computes query and gate, head by head."""

    norm_class = GemmaRMSNorm

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        width, kv_width = self.heads.queries.scaled(2 * config.head_dim), self.heads.keys.scaled(config.head_dim)
        parts = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, config.qkv_bias, dtype)

    def forward(
        self, hidden_states: Tensor, position_embeddings: Rotation, past_key_values: StepCache
    ) -> tuple[Tensor, None]:
        """[tokens, hidden] -> ([tokens, hidden], None); transformers returns attention weights instead of None."""
        query, key, value = self.project(hidden_states)
        query, gate = query.view(len(query), -1, 2 * self.head_dim).chunk(2, dim=-1)
        core = self.core(query, key, value, position_embeddings, past_key_values)
        return self.o_proj(core * torch.sigmoid(gate.flatten(1))), None


class GatedRMSNorm(CheckpointModule):
    """x / rms(x) * weight * silu(gate), gated in float32. As in transformers, heads are folded into rows.

    Counterpart of transformers' Qwen3NextRMSNormGated.
    """

    tap_ports: tuple[str, ...] = ("in", "out")

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.eps = parameter(size, dtype=dtype), eps

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Map states and gates, [rows, size] each, to [rows, size] in the input's dtype."""
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide.to(hidden_states.dtype) * functional.silu(gate.float())).to(hidden_states.dtype)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield the complete weight."""
        yield WeightSlice(f"{path}.weight", tuple(self.weight.shape), self.weight)


class GatedDeltaNet(DeltaLayer, CheckpointModule):
    """Gated delta net over this rank's key heads and their value heads.

    Counterpart of transformers' Qwen3NextGatedDeltaNet.
    """

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        linear, heads = self.linear, Shard.of(self.linear.num_key_heads, tp)
        self.values = heads.scaled(linear.group)
        features = self.values.scaled(linear.value_dim)
        self.make_projections(config, heads, dtype)
        self.dt_bias, self.A_log = parameter(self.values.count, dtype=dtype), parameter(self.values.count, dtype=dtype)
        self.norm = GatedRMSNorm(linear.value_dim, config.rms_norm_eps, dtype)
        if tp.size > 1:  # rows are (token, head) pairs, whose sharding dims cannot express
            self.norm.tap_ports = ()
        self.out_proj = RowParallelLinear(features, config.hidden_size, False, tp, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def make_projections(self, config: ModelConfig, heads: Shard, dtype: torch.dtype) -> None:
        """Create ``in_proj_qkvz`` and ``in_proj_ba`` for this rank's key heads."""
        of_head = 2 * (self.linear.key_dim + self.linear.group * self.linear.value_dim)
        self.in_proj_qkvz = ColumnParallelLinear(config.hidden_size, heads.scaled(of_head), False, dtype)
        self.in_proj_ba = ColumnParallelLinear(config.hidden_size, heads.scaled(2 * self.linear.group), False, dtype)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project [tokens, hidden] to the inputs of the delta rule.

        Returns queries, keys and values [tokens, channels], gates [tokens, value features], and the inputs of beta and
        decay, [tokens, value heads] each.
        """
        linear, count = self.linear, len(hidden_states)
        key_width, value_width = linear.key_dim, linear.group * linear.value_dim
        by_head = self.in_proj_qkvz(hidden_states).view(count, -1, 2 * (key_width + value_width))
        query, key, value, gate = torch.split(by_head, [key_width, key_width, value_width, value_width], dim=-1)
        rate, step = self.in_proj_ba(hidden_states).view(count, -1, 2 * linear.group).chunk(2, dim=-1)
        mixed = torch.cat((query.flatten(1), key.flatten(1), value.flatten(1)), dim=-1)
        return mixed, gate, rate.flatten(1), step.flatten(1)

    def forward(self, hidden_states: Tensor, cache_params: StepCache) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and updates the recurrent states of the requests."""
        linear, count = self.linear, len(hidden_states)
        mixed, gate, rate, step = self.project(hidden_states)
        beta = torch.sigmoid(rate).float()
        decay = -torch.exp(self.A_log.float()) * functional.softplus(step.float() + self.dt_bias)
        output = self.attend(mixed, decay.unsqueeze(-1), beta, cache_params).to(hidden_states.dtype)
        normalised = self.norm(output.reshape(-1, linear.value_dim), gate.reshape(-1, linear.value_dim))
        projected: Tensor = self.out_proj(normalised.view(count, -1))
        return projected

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield this rank's value heads of ``dt_bias`` and ``A_log``; submodules yield their own weights."""
        for name in ("dt_bias", "A_log"):
            yield WeightSlice(f"{path}.{name}", (self.values.total,), getattr(self, name), 0, self.values.start)


class Qwen3NextDecoderLayer(HybridDecoderLayer):
    """Counterpart of transformers' Qwen3NextDecoderLayer: ``linear_attn`` or ``self_attn``, then experts."""

    norm_class = GemmaRMSNorm
    router = Qwen3MoeRouter
    block = Qwen2MoeSparseMoeBlock
    recurrent_name = "linear_attn"
    recurrent_class = GatedDeltaNet
    attention_class = Qwen3NextAttention


class DeltaCausalLM(MoeCausalLM):
    """Causal LM with gated delta rule layers."""

    def state_units(self) -> Shard:
        """Return this rank's shard of the key heads."""
        assert self.config.linear is not None
        return Shard.of(self.config.linear.num_key_heads, self.tp)

    def state_shapes(self, units: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Return the shapes of window and recurrent matrix for ``units`` key heads."""
        linear: LinearAttentionConfig | None = self.config.linear
        assert linear is not None
        channels = units * (2 * linear.key_dim + linear.group * linear.value_dim)
        return (channels, linear.kernel - 1), (units * linear.group, linear.key_dim, linear.value_dim)


class Qwen3NextForCausalLM(DeltaCausalLM):
    """Qwen3-Next; transformers' `modeling_qwen3_next.py`. The MTP layer is used for speculation only."""

    layer_class = Qwen3NextDecoderLayer
    skipped_prefixes: ClassVar[tuple[str, ...]] = ("mtp.",)
