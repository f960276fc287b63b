"""Qwen3-Next under Hugging Face's names: gated delta nets in most layers, gated attention in the others, experts."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice, parameter
from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.linear_config import LinearAttentionConfig
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.gated_delta import causal_conv, chunked, l2_normalised, recurrent, windows_after
from tapscope.engine.layers.linear import ColumnParallelLinear, FusedLinear, RowParallelLinear
from tapscope.engine.layers.norm import GemmaRMSNorm, add_norm
from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.layers.rope import rotate, rotate_both
from tapscope.engine.layers.state_taps import StateTaps
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import OnSum, Rotation
from tapscope.engine.models.moe import MoeCausalLM, Qwen2MoeDecoderLayer


class Qwen3NextAttention(SelfAttention):
    """Attention whose output is multiplied by the sigmoid of a gate that ``q_proj`` computes too, per head."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype, GemmaRMSNorm)
        width, kv_width = self.heads.queries.scaled(2 * config.head_dim), self.heads.keys.scaled(config.head_dim)
        parts = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, config.qkv_bias, dtype)

    def forward(
        self, hidden_states: Tensor, position_embeddings: Rotation, past_key_values: StepCache
    ) -> tuple[Tensor, None]:
        """[tokens, hidden] -> ([tokens, hidden], None); transformers returns attention weights second."""
        query, key, value = self.qkv_proj(hidden_states)
        query, key, value = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        query, gate = query.view(len(query), -1, 2 * self.head_dim).chunk(2, dim=-1)
        query, key = self.q_norm(query), self.k_norm(self._heads(key))
        cos, sin = position_embeddings
        query, key = rotate_both(query, key, lambda states: rotate(states, cos, sin))
        core = self.attn(query, self._used(key), self._used(self._heads(value)), past_key_values)
        return self.o_proj(core * torch.sigmoid(gate.flatten(1))), None


class GatedRMSNorm(CheckpointModule):
    """x / rms(x) * weight * silu(gate), gated in float32; transformers' Qwen3NextRMSNormGated. Heads are folded into
    rows, as in transformers.
    """

    tap_ports: tuple[str, ...] = ("in", "out")

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.eps = parameter(size, dtype=dtype), eps

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """[rows, size] twice -> [rows, size], in the input's dtype."""
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide.to(hidden_states.dtype) * functional.silu(gate.float())).to(hidden_states.dtype)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """The whole vector."""
        yield WeightSlice(f"{path}.weight", tuple(self.weight.shape), self.weight)


class ConvWeight(CheckpointModule):
    """Weight of a depthwise convolution over the channels of this rank's queries, keys and values.

    Like transformers', it is not called: the layer computes the convolution.
    """

    def __init__(self, parts: tuple[Shard, ...], kernel: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.parts, self.kernel = parts, kernel
        count = sum(part.count for part in parts)
        self.weight = parameter(count, 1, kernel, dtype=dtype)
        self.bias = parameter(count, dtype=dtype) if bias else None

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """This rank's channels of each part."""
        shape, offset = (sum(part.total for part in self.parts), 1, self.kernel), 0
        for part, into in zip(self.parts, torch.split(self.weight, [part.count for part in self.parts]), strict=True):
            yield WeightSlice(f"{path}.weight", shape, into, 0, offset + part.start)
            offset += part.total
        if self.bias is not None:
            offset = 0
            for part, into in zip(self.parts, torch.split(self.bias, [p.count for p in self.parts]), strict=True):
                yield WeightSlice(f"{path}.bias", shape[:1], into, 0, offset + part.start)
                offset += part.total


class GatedDeltaNet(StateTaps, CheckpointModule):
    """transformers' Qwen3NextGatedDeltaNet, with this rank's key heads and their value heads."""

    is_recurrent = False
    """Whether rows of prompts are computed one after the other, so that bits do not depend on chunks."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.linear is not None, "linear attention needs ModelConfig.linear"
        self.layer, self.linear = layer, config.linear
        linear, heads = config.linear, Shard.of(config.linear.num_key_heads, tp)
        self.values = heads.scaled(linear.group)
        keys, features = heads.scaled(linear.key_dim), self.values.scaled(linear.value_dim)
        self.make_projections(config, heads, dtype)
        self.conv1d = ConvWeight((keys, keys, features), linear.kernel, dtype)
        self.add_state_taps({"q": keys, "k": keys, "v": features}, tp.size, "num_heads[tp] k d")
        self.dt_bias, self.A_log = parameter(self.values.count, dtype=dtype), parameter(self.values.count, dtype=dtype)
        self.norm = GatedRMSNorm(linear.value_dim, config.rms_norm_eps, dtype)
        if tp.size > 1:  # its rows are heads of tokens, whose split no dims express
            self.norm.tap_ports = ()
        self.out_proj = RowParallelLinear(features, config.hidden_size, False, tp, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def make_projections(self, config: ModelConfig, heads: Shard, dtype: torch.dtype) -> None:
        """``in_proj_qkvz`` and ``in_proj_ba``, of this rank's key heads."""
        of_head = 2 * (self.linear.key_dim + self.linear.group * self.linear.value_dim)
        self.in_proj_qkvz = ColumnParallelLinear(config.hidden_size, heads.scaled(of_head), False, dtype)
        self.in_proj_ba = ColumnParallelLinear(config.hidden_size, heads.scaled(2 * self.linear.group), False, dtype)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[tokens, hidden] -> queries, keys and values [tokens, channels], gates [tokens, value features], and the
        inputs of beta and decay [tokens, value heads].
        """
        linear, count = self.linear, len(hidden_states)
        key_width, value_width = linear.key_dim, linear.group * linear.value_dim
        by_head = self.in_proj_qkvz(hidden_states).view(count, -1, 2 * (key_width + value_width))
        query, key, value, gate = torch.split(by_head, [key_width, key_width, value_width, value_width], dim=-1)
        rate, step = self.in_proj_ba(hidden_states).view(count, -1, 2 * linear.group).chunk(2, dim=-1)
        mixed = torch.cat((query.flatten(1), key.flatten(1), value.flatten(1)), dim=-1)
        return mixed, gate, rate.flatten(1), step.flatten(1)

    def forward(self, hidden_states: Tensor, cache_params: StepCache) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the requests' states."""
        linear, count = self.linear, len(hidden_states)
        mixed, gate, rate, step = self.project(hidden_states)
        beta = torch.sigmoid(rate).float()
        decay = -torch.exp(self.A_log.float()) * functional.softplus(step.float() + self.dt_bias)
        output = self._attend(mixed, decay, beta, cache_params).to(hidden_states.dtype)
        normalised = self.norm(output.reshape(-1, linear.value_dim), gate.reshape(-1, linear.value_dim))
        projected: Tensor = self.out_proj(normalised.view(count, -1))
        return projected

    def _attend(self, mixed: Tensor, decay: Tensor, beta: Tensor, cache: StepCache) -> Tensor:
        """Convolution and delta rule of all requests: channels [tokens, channels] -> [tokens, value heads, value]."""
        states, single = cache.states, 0 if self.is_recurrent else cache.num_single
        assert states is not None, "the cache has no recurrent states"
        outputs = []
        if single:
            window, matrix = states.read(self.layer, slice(0, single))
            rows, window = causal_conv(mixed[:single].unsqueeze(1), window, self.conv1d.weight[:, 0])
            output, matrix = recurrent(*self._heads(rows[:, 0]), decay[:single], beta[:single], matrix)
            states.write(self.layer, slice(0, single), window, matrix)
            outputs.append(output)
        for segment in cache.segments[single:]:
            own, of_rows = slice(segment.index, segment.index + 1), slice(segment.slot, segment.slot + segment.count)
            before, matrix = states.read(self.layer, own)
            rows, window = causal_conv(mixed[of_rows].unsqueeze(0), before, self.conv1d.weight[:, 0])
            parts = (*self._heads(rows[0]), decay[of_rows], beta[of_rows])
            num_drafts = len(states.draft_slots.get(segment.index, ()))
            if self.is_recurrent or num_drafts:
                matrices = []
                for row in range(segment.count):
                    query, key, value, rate, share = (part[row : row + 1] for part in parts)
                    output, matrix = recurrent(query, key, value, rate, share, matrix)
                    outputs.append(output)
                    matrices.append(matrix)
                if num_drafts:
                    matrix = matrices[-num_drafts - 1]
                    windows = windows_after(mixed[of_rows], before[0])[-num_drafts - 1 :]
                    window = windows[:1]
                    states.write_drafts(self.layer, segment.index, windows[1:], torch.cat(matrices[-num_drafts:]))
            else:
                output, after = chunked(*parts, matrix[0])
                matrix = after.unsqueeze(0)
                outputs.append(output)
            states.write(self.layer, own, window, matrix)
        self.show_states(cache)
        return torch.cat(outputs)

    def _heads(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved channels [n, channels] -> scaled query, key and value [n, value heads, features], float32."""
        linear, keys = self.linear, self.conv1d.parts[0].count
        parts = torch.split(functional.silu(rows), [keys, keys, rows.shape[-1] - 2 * keys], dim=-1)
        query, key = (
            l2_normalised(part.reshape(len(rows), -1, linear.key_dim).float()).repeat_interleave(linear.group, dim=1)
            for part in parts[:2]
        )
        return query * linear.key_dim**-0.5, key, parts[2].reshape(len(rows), -1, linear.value_dim).float()

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """This rank's value heads of the vectors; the submodules yield their own."""
        for name in ("dt_bias", "A_log"):
            yield WeightSlice(f"{path}.{name}", (self.values.total,), getattr(self, name), 0, self.values.start)


class Qwen3NextDecoderLayer(Qwen2MoeDecoderLayer):
    """transformers' Qwen3NextDecoderLayer: ``linear_attn`` or ``self_attn``, and experts."""

    norm_class = GemmaRMSNorm
    linear_class: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet
    """Class of ``linear_attn``."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.is_linear = layer in config.linear_layers
        if self.is_linear:
            self.linear_attn = self.self_attn
            del self.self_attn

    def make_attention(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """The layer's mixer of tokens."""
        kind = self.linear_class if layer in config.linear_layers else Qwen3NextAttention
        return kind(config, layer, tp, dtype)

    def summands(
        self,
        states: Tensor,
        residual: Tensor | None,
        past_key_values: StepCache,
        position_embeddings: Rotation,
        on_input: OnSum | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(output, residual) from (input, residual); see DecoderLayer."""
        if not self.is_linear:
            return super().summands(states, residual, past_key_values, position_embeddings, on_input)
        normalised, residual = add_norm(self.input_layernorm, states, residual, on_sum=on_input)
        states = self.linear_attn(hidden_states=normalised, cache_params=past_key_values)
        normalised, residual = add_norm(self.post_attention_layernorm, states, residual)
        return self.mlp(normalised), residual


class Qwen3NextForCausalLM(MoeCausalLM):
    """Qwen3-Next; transformers' `modeling_qwen3_next.py`. The MTP layer is computed for speculation only."""

    layer_class = Qwen3NextDecoderLayer
    has_draft_states = True
    skipped_prefixes: ClassVar[tuple[str, ...]] = ("mtp.",)

    def state_units(self) -> Shard:
        """Key heads."""
        assert self.config.linear is not None
        return Shard.of(self.config.linear.num_key_heads, self.tp)

    def state_shapes(self, units: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Windows and matrices of ``units`` key heads."""
        linear: LinearAttentionConfig | None = self.config.linear
        assert linear is not None
        channels = units * (2 * linear.key_dim + linear.group * linear.value_dim)
        return (channels, linear.kernel - 1), (units * linear.group, linear.key_dim, linear.value_dim)
