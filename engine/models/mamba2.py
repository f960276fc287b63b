"""Mamba-2 with Hugging Face's module names: the mixer, also used by hybrid models, and pure Mamba-2 models."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice, parameter
from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.linear import PackedLinear, RowParallelLinear
from tapscope.engine.layers.norm import add_norm
from tapscope.engine.layers.probe import SHARD, WHOLE
from tapscope.engine.layers.recurrent_layer import RecurrentLayer
from tapscope.engine.layers.short_conv import ConvWeight
from tapscope.engine.layers.state_space import scan_row, scan_rows
from tapscope.engine.models.decoder import CausalLM, Decoder, DecoderLayer, Rotation
from tapscope.engine.models.residual_stream import OnSum


class GroupedGatedNorm(CheckpointModule):
    """Gated RMS norm over each group of features; groups may span ranks.

    Counterpart of transformers' MambaRMSNormGated.
    """

    def __init__(
        self, config: ModelConfig, features: Shard, num_groups: int, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert config.mamba is not None
        self.features, self.tp, self.eps = features, tp, config.rms_norm_eps
        self.num_groups, self.size = num_groups, features.total // num_groups
        self.norms_before_gate = config.mamba.norms_before_gate
        self.weight = parameter(features.count, dtype=dtype)
        self.tap_dims = dict.fromkeys(("in[hidden_states]", "in[gate]", "out"), SHARD)

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Map states and gates, [tokens, this rank's features] each, to the same shape in float32."""
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
        """Yield this rank's features of the weight."""
        yield WeightSlice(f"{path}.weight", (self.features.total,), self.weight, 0, self.features.start)


class Mamba2Mixer(RecurrentLayer, CheckpointModule):
    """Mamba-2 mixer over this rank's heads; counterpart of transformers' Mamba2Mixer and FalconH1Mixer.

    Every rank computes B and C of all groups.
    """

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.mamba is not None, "a Mamba-2 layer needs ModelConfig.mamba"
        self.layer, self.mamba = layer, config.mamba
        mamba, self.heads = config.mamba, Shard.of(config.mamba.num_heads, tp)
        self._group_of_head = torch.arange(self.heads.start, self.heads.end) // (mamba.num_heads // mamba.num_groups)
        features, width = self.heads.scaled(mamba.head_dim), mamba.num_groups * mamba.state_dim
        shared = Shard(width, 0, width, is_whole=True)
        parts = {"gate": features, "x": features, "B": shared, "C": shared, "dt": self.heads}
        self.in_proj = PackedLinear(config.hidden_size, parts, mamba.in_bias, dtype)
        self.conv1d = ConvWeight((features, shared, shared), mamba.kernel, dtype, bias=mamba.conv_bias)
        self.add_state_taps({"x": features, "B": shared, "C": shared}, tp.size, "num_heads[tp] k d")
        self.dt_bias, self.A_log = parameter(self.heads.count, dtype=dtype), parameter(self.heads.count, dtype=dtype)
        self.D = parameter(self.heads.count, dtype=dtype)
        self.norm = GroupedGatedNorm(config, features, mamba.num_groups, tp, dtype) if mamba.has_norm else None
        self.out_proj = RowParallelLinear(features, config.hidden_size, mamba.out_bias, tp, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor, cache_params: StepCache) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and updates the recurrent states of the requests."""
        gate, x, b, c, step = self._project(hidden_states)
        step = functional.softplus(step + self.dt_bias).clamp(*self.mamba.step_limit).float()
        rows, groups = self.convolve(torch.cat((x, b, c), dim=-1), self.conv1d, cache_params)
        parts, skipped = self._parts(rows, step)
        output = (self.scan(parts, groups, cache_params) + skipped).flatten(1)
        gated = output * functional.silu(gate) if self.norm is None else self.norm(output, gate)
        result: Tensor = self.out_proj(gated.to(hidden_states.dtype))
        return result

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Project [tokens, hidden] to gate, x, B, C and time step, scaled by their multipliers."""
        if not self.mamba.has_multipliers:
            return self.in_proj.split(self.in_proj(hidden_states))
        projected = self.in_proj.split(self.in_proj(hidden_states * self.mamba.in_multiplier))
        return tuple(part * factor for part, factor in zip(projected, self.mamba.part_multipliers, strict=True))

    def scan_row(self, parts: tuple[Tensor, ...], matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Apply one row per request, see :meth:`.RecurrentLayer.scan_row`; ``parts``: c, b, x and decay."""
        c, b, x, decay = parts
        return scan_row(c, b, x, decay, matrix)

    def scan_rows(self, parts: tuple[Tensor, ...], matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Apply several rows of one request, see :meth:`.RecurrentLayer.scan_rows`."""
        c, b, x, decay = parts
        return scan_rows(c, b, x, decay, matrix)

    def _parts(self, rows: Tensor, step: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return scan inputs (c, b, x, decay) and D * x, from convolved [n, channels] and time steps [n, heads]."""
        mamba = self.mamba
        wide = functional.silu(rows).float()
        x, b, c = torch.split(wide, [part.count for part in self.conv1d.parts], dim=-1)
        x = x.view(len(x), -1, mamba.head_dim)
        b, c = (part.view(len(part), mamba.num_groups, -1)[:, self._group_of_head] for part in (b, c))
        decay = -torch.exp(self.A_log.float()) * step
        return (c, b, x * step.unsqueeze(-1), decay), self.D.unsqueeze(-1) * x

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield this rank's heads of the per-head vectors; submodules yield their own weights."""
        for name in ("dt_bias", "A_log", "D"):
            yield WeightSlice(f"{path}.{name}", (self.heads.total,), getattr(self, name), 0, self.heads.start)


class Mamba2CausalLM(CausalLM):
    """Causal LM with Mamba-2 layers."""

    def state_units(self) -> Shard:
        """Return this rank's shard of the Mamba-2 heads."""
        assert self.config.mamba is not None
        return Shard.of(self.config.mamba.num_heads, self.tp)

    def state_shapes(self, units: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Return the shapes of window and recurrent state for ``units`` heads."""
        mamba = self.config.mamba
        assert mamba is not None
        channels = units * mamba.head_dim + 2 * mamba.num_groups * mamba.state_dim
        return (channels, mamba.kernel - 1), (units, mamba.state_dim, mamba.head_dim)


class UnrotatedDecoder(Decoder):
    """Decoder without rotary embedding."""

    def make_rotary(self, config: ModelConfig) -> None:
        """Return None."""


class MixerLayer(DecoderLayer):
    """Layer with a single ``mixer`` behind a norm."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # skips the attention, MLP and norms of DecoderLayer
        self.norm = self.norm_class(config.hidden_size, config.rms_norm_eps, dtype)
        self.mixer = self.make_mixer(config, layer, tp, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def make_mixer(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """Create the ``mixer`` module of layer ``layer``."""
        return Mamba2Mixer(config, layer, tp, dtype)

    def mix(self, hidden_states: Tensor, cache: StepCache, position_embeddings: Rotation) -> Tensor:
        """Return the mixer's output for normalized hidden states [tokens, hidden]."""
        output: Tensor = self.mixer(hidden_states, cache_params=cache)
        return output

    def summands(
        self,
        states: Tensor,
        residual: Tensor | None,
        past_key_values: StepCache,
        position_embeddings: Rotation,
        on_input: OnSum | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (output, residual), see :meth:`.DecoderLayer.summands`."""
        normalised, residual = add_norm(self.norm, states, residual, on_sum=on_input)
        return self.mix(normalised, past_key_values, position_embeddings), residual


class Mamba2Block(MixerLayer):
    """Counterpart of transformers' Mamba2Block; with ``residual_in_fp32``, the residual stream is float32."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.is_wide = config.residual_in_fp32 and dtype != torch.float32

    def summands(
        self,
        states: Tensor,
        residual: Tensor | None,
        past_key_values: StepCache,
        position_embeddings: Rotation,
        on_input: OnSum | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (output, residual), see :meth:`.DecoderLayer.summands`."""
        if not self.is_wide:
            return super().summands(states, residual, past_key_values, position_embeddings, on_input)
        hidden_states = states.float() if residual is None else residual + states
        if on_input is not None:
            on_input(hidden_states)
        normalised = self.norm(hidden_states.to(self.norm.weight.dtype))
        return self.mix(normalised, past_key_values, position_embeddings), hidden_states


class Mamba2Model(UnrotatedDecoder):
    """Counterpart of transformers' Mamba2Model."""

    embedding_name = "embeddings"
    final_norm_name = "norm_f"


class Mamba2ForCausalLM(Mamba2CausalLM):
    """Mamba-2, arXiv:2405.21060; transformers' `modeling_mamba2.py`."""

    decoder_name = "backbone"
    decoder_class = Mamba2Model
    layer_class = Mamba2Block
    tied_weights = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012
    checkpoint_prefixes = {"backbone.embedding.": "backbone.embeddings."}  # noqa: RUF012

    def head(self, hidden_states: Tensor, logits_to_keep: Tensor | None = None) -> Tensor:
        """Compute logits from last hidden states [tokens, hidden], rounded to the model's dtype first."""
        return super().head(hidden_states.to(self.lm_head.weight.dtype), logits_to_keep)
