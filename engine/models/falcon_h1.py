"""Falcon-H1 under Hugging Face's names: Mamba-2 and attention in parallel in every layer, muP multipliers."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice, parameter
from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.gated_delta import causal_conv
from tapscope.engine.layers.linear import PackedLinear, RowParallelLinear
from tapscope.engine.layers.norm import add_norm
from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.layers.state_space import scan_row, scan_rows
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import CausalLM, Decoder, DecoderLayer, OnSum, Rotation
from tapscope.engine.models.mlp import GatedMLP
from tapscope.engine.models.qwen3_next import ConvWeight


class GroupedGatedNorm(CheckpointModule):
    """RMS norm of each group's features and a gate; FalconH1RMSNormGated. Groups may be split over ranks."""

    def __init__(
        self, config: ModelConfig, features: Shard, num_groups: int, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert config.mamba is not None
        self.features, self.tp, self.eps = features, tp, config.rms_norm_eps
        self.num_groups, self.size = num_groups, features.total // num_groups
        self.norms_before_gate = config.mamba.norms_before_gate
        self.weight = parameter(features.count, dtype=dtype)

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """[tokens, this rank's features] twice -> the same, in float32."""
        wide, gate = hidden_states.float(), functional.silu(gate.float())
        if not self.norms_before_gate:
            wide = wide * gate
        group = torch.arange(self.features.start, self.features.end, device=wide.device) // self.size
        squares = wide.new_zeros(len(wide), self.num_groups).index_add_(1, group, wide.square())
        if self.tp.size > 1:
            squares = self.tp.all_reduce(squares)
        wide = self.weight * (wide * torch.rsqrt(squares / self.size + self.eps)[:, group])
        return wide * gate if self.norms_before_gate else wide

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """This rank's features."""
        yield WeightSlice(f"{path}.weight", (self.features.total,), self.weight, 0, self.features.start)


class Mamba2Mixer(CheckpointModule):
    """transformers' FalconH1Mixer, with this rank's heads; B and C of all groups are computed on every rank."""

    is_recurrent = False
    """Whether rows of prompts are computed one after the other, so that bits do not depend on chunks."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.mamba is not None, "a Mamba-2 layer needs ModelConfig.mamba"
        self.layer, self.mamba = layer, config.mamba
        mamba, self.heads = config.mamba, Shard.of(config.mamba.num_heads, tp)
        features, width = self.heads.scaled(mamba.head_dim), mamba.num_groups * mamba.state_dim
        shared = Shard(width, 0, width, is_whole=True)
        parts = {"gate": features, "x": features, "B": shared, "C": shared, "dt": self.heads}
        self.in_proj = PackedLinear(config.hidden_size, parts, mamba.in_bias, dtype)
        self.conv1d = ConvWeight((features, shared, shared), mamba.kernel, dtype, bias=mamba.conv_bias)
        self.dt_bias, self.A_log = parameter(self.heads.count, dtype=dtype), parameter(self.heads.count, dtype=dtype)
        self.D = parameter(self.heads.count, dtype=dtype)
        self.norm = GroupedGatedNorm(config, features, mamba.num_groups, tp, dtype) if mamba.has_norm else None
        self.out_proj = RowParallelLinear(features, config.hidden_size, mamba.out_bias, tp, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor, cache_params: StepCache) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the requests' states."""
        projected = self.in_proj.split(self.in_proj(hidden_states * self.mamba.in_multiplier))
        factors = self.mamba.part_multipliers
        gate, x, b, c, step = (part * factor for part, factor in zip(projected, factors, strict=True))
        step = functional.softplus(step + self.dt_bias).clamp(*self.mamba.step_limit).float()
        output = self._scan(torch.cat((x, b, c), dim=-1), step, cache_params).flatten(1)
        gated = output * functional.silu(gate) if self.norm is None else self.norm(output, gate)
        result: Tensor = self.out_proj(gated.to(hidden_states.dtype))
        return result

    def _scan(self, mixed: Tensor, step: Tensor, cache: StepCache) -> Tensor:
        """Convolution and scan of all requests: channels [tokens, channels] -> [tokens, heads, features], float32."""
        states, single, outputs = cache.states, 0 if self.is_recurrent else cache.num_single, []
        assert states is not None, "the cache has no recurrent states"
        kernel = self.conv1d.weight[:, 0], self.conv1d.bias
        if single:
            own = slice(0, single)
            window, state = states.read(self.layer, own)
            rows, window = causal_conv(mixed[:single].unsqueeze(1), window, *kernel)
            parts, skipped = self._parts(rows[:, 0], step[:single])
            output, state = scan_row(*parts, state)
            states.write(self.layer, own, window, state)
            outputs.append(output + skipped)
        for segment in cache.segments[single:]:
            own, of_rows = slice(segment.index, segment.index + 1), slice(segment.slot, segment.slot + segment.count)
            window, state = states.read(self.layer, own)
            rows, window = causal_conv(mixed[of_rows].unsqueeze(0), window, *kernel)
            parts, skipped = self._parts(rows[0], step[of_rows])
            if self.is_recurrent:
                for row in range(segment.count):
                    c, b, x, decay = (part[row : row + 1] for part in parts)
                    output, state = scan_row(c, b, x, decay, state)
                    outputs.append(output + skipped[row : row + 1])
            else:
                output, after = scan_rows(*parts, state[0])
                state = after.unsqueeze(0)
                outputs.append(output + skipped)
            states.write(self.layer, own, window, state)
        return torch.cat(outputs)

    def _parts(self, rows: Tensor, step: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Convolved channels [n, channels] and steps [n, heads] -> c, b, x and decay of the scan, and D times x."""
        mamba = self.mamba
        wide = functional.silu(rows).float()
        x, b, c = torch.split(wide, [part.count for part in self.conv1d.parts], dim=-1)
        x = x.view(len(x), -1, mamba.head_dim)
        group = torch.arange(self.heads.start, self.heads.end, device=x.device) // (mamba.num_heads // mamba.num_groups)
        b, c = (part.view(len(part), mamba.num_groups, -1)[:, group] for part in (b, c))
        decay = -torch.exp(self.A_log.float()) * step
        return (c, b, x * step.unsqueeze(-1), decay), self.D.unsqueeze(-1) * x

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """This rank's heads of the vectors; the submodules yield their own."""
        for name in ("dt_bias", "A_log", "D"):
            yield WeightSlice(f"{path}.{name}", (self.heads.total,), getattr(self, name), 0, self.heads.start)


class FalconH1Attention(SelfAttention):
    """transformers' FalconH1Attention: keys are multiplied before they are rotated."""

    has_fused_rope = False

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.key_multiplier = config.key_multiplier

    def forward(
        self, hidden_states: Tensor, position_embeddings: Rotation, past_key_values: StepCache
    ) -> tuple[Tensor, None]:
        """[tokens, hidden] -> ([tokens, hidden], None); transformers returns attention weights second."""
        query, key, value = self.qkv_proj(hidden_states)
        query, key = self._heads(self.q_proj(query)), self._heads(self.k_proj(key)) * self.key_multiplier
        value = self._heads(self.v_proj(value))
        query, key = (self.rotate(states, *position_embeddings) for states in (query, key))
        core = self.attn(query, self._used(key), self._used(value), past_key_values)
        return self.o_proj(core), None


class FalconH1MLP(GatedMLP):
    """transformers' FalconH1MLP: gate and output are multiplied."""

    def __init__(self, config: ModelConfig, size: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, size, tp, dtype)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate, up = self.gate_up_proj(x)
        active = self.up_proj(up) * self.act_fn(self.gate_proj(gate) * self.gate_multiplier)
        output: Tensor = self.down_proj(active) * self.down_multiplier
        return output


class FalconH1DecoderLayer(DecoderLayer):
    """transformers' FalconH1DecoderLayer: ``mamba`` and ``self_attn`` of one norm's output, then ``feed_forward``."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.mamba = Mamba2Mixer(config, layer, tp, dtype)
        self.feed_forward, self.pre_ff_layernorm = self.mlp, self.post_attention_layernorm
        del self.mlp, self.post_attention_layernorm
        assert config.mamba is not None
        self.ssm_out_multiplier = config.mamba.out_multiplier
        self.in_multiplier, self.out_multiplier = config.attention_in_multiplier, config.attention_out_multiplier

    def make_attention(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """``self_attn`` of layer ``layer``."""
        return FalconH1Attention(config, layer, tp, dtype)

    def make_mlp(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """``feed_forward`` of layer ``layer``."""
        return FalconH1MLP(config, config.intermediate_size, tp, dtype)

    def summands(
        self,
        states: Tensor,
        residual: Tensor | None,
        past_key_values: StepCache,
        position_embeddings: Rotation,
        on_input: OnSum | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(output, residual) from (input, residual); see DecoderLayer."""
        normalised, residual = add_norm(self.input_layernorm, states, residual, on_sum=on_input)
        mixed = self.mamba(hidden_states=normalised, cache_params=past_key_values) * self.ssm_out_multiplier
        attended, _ = self.self_attn(
            hidden_states=normalised * self.in_multiplier,
            position_embeddings=position_embeddings,
            past_key_values=past_key_values,
        )
        normalised, residual = add_norm(self.pre_ff_layernorm, mixed + attended * self.out_multiplier, residual)
        return self.feed_forward(normalised), residual


class FalconH1Decoder(Decoder):
    """transformers' FalconH1Model."""

    final_norm_name = "final_layernorm"


class FalconH1ForCausalLM(CausalLM):
    """Falcon-H1, arXiv:2507.22448; transformers' `modeling_falcon_h1.py`."""

    decoder_class = FalconH1Decoder
    layer_class = FalconH1DecoderLayer

    def state_units(self) -> Shard:
        """Heads of Mamba-2."""
        assert self.config.mamba is not None
        return Shard.of(self.config.mamba.num_heads, self.tp)

    def state_shapes(self, units: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Windows and states of ``units`` heads."""
        mamba = self.config.mamba
        assert mamba is not None
        channels = units * mamba.head_dim + 2 * mamba.num_groups * mamba.state_dim
        return (channels, mamba.kernel - 1), (units, mamba.state_dim, mamba.head_dim)
