"""Jamba and Bamba with Hugging Face's module names: Mamba in most layers, attention in the others, MLPs or experts."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice, parameter
from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.experts import Experts
from tapscope.engine.layers.fused import linear
from tapscope.engine.layers.linear import ColumnParallelLinear, PackedLinear, RowParallelLinear
from tapscope.engine.layers.norm import RMSNorm
from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.layers.recurrent_layer import RecurrentLayer
from tapscope.engine.layers.routers import Qwen3MoeRouter
from tapscope.engine.layers.short_conv import ConvWeight
from tapscope.engine.layers.state_space import selective_row, selective_rows
from tapscope.engine.models.decoder import Decoder
from tapscope.engine.models.hybrid import HybridDecoderLayer
from tapscope.engine.models.mamba2 import Mamba2CausalLM, Mamba2Mixer, UnrotatedDecoder
from tapscope.engine.models.moe import MoeCausalLM


class JambaMambaMixer(RecurrentLayer, CheckpointModule):
    """Mamba, arXiv:2312.00752, with norms of time step, B and C, over this rank's channels.

    Counterpart of transformers' JambaMambaMixer.
    """

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.mamba1 is not None, "a Mamba layer needs ModelConfig.mamba1"
        self.layer, self.mamba, mamba = layer, config.mamba1, config.mamba1
        self.channels = channels = Shard.of(mamba.channels, tp)
        self.in_proj = PackedLinear(config.hidden_size, {"x": channels, "gate": channels}, mamba.bias, dtype)
        self.conv1d = ConvWeight((channels,), mamba.kernel, dtype, bias=mamba.conv_bias)
        self.add_state_taps({"x": channels}, tp.size, "h[tp] k 1")
        self.widths = [mamba.step_rank, mamba.state_dim, mamba.state_dim]
        self.x_proj = RowParallelLinear(channels, sum(self.widths), False, tp, dtype)
        self.dt_proj = ColumnParallelLinear(mamba.step_rank, channels, True, dtype)
        # As in transformers, the module is not called; only its weight is used.
        self.dt_proj.may_stay_quantized = self.dt_proj.may_have_adapters = False
        self.dt_proj.tap_ports = ()
        self.A_log = parameter(channels.count, mamba.state_dim, dtype=dtype)
        self.D = parameter(channels.count, dtype=dtype)
        self.out_proj = RowParallelLinear(channels, config.hidden_size, mamba.bias, tp, dtype)
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = (
            RMSNorm(width, config.rms_norm_eps, dtype) for width in self.widths
        )
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor, cache_params: StepCache) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and updates the recurrent states of the requests."""
        x, gate = self.in_proj.split(self.in_proj(hidden_states))
        rows, groups = self.convolve(x, self.conv1d, cache_params)
        x = functional.silu(rows)
        step, b, c = torch.split(self.x_proj(x), self.widths, dim=-1)
        step, b, c = self.dt_layernorm(step), self.b_layernorm(b), self.c_layernorm(c)
        step = functional.softplus(linear(step, self.dt_proj.weight, self.dt_proj.bias)).float()
        output = self.scan((c.float(), b.float(), x.float() * step, step), groups, cache_params)
        output = (output + self.D * x.float()) * functional.silu(gate)
        projected: Tensor = self.out_proj(output.to(hidden_states.dtype))
        return projected

    def scan_row(self, parts: tuple[Tensor, ...], matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Apply one row per request, see :meth:`.RecurrentLayer.scan_row`; ``parts``: c, b, x times step, and step."""
        c, b, x, step = parts
        output, matrix = selective_row(c, b, x, self._decay(step), matrix.squeeze(-1))
        return output, matrix.unsqueeze(-1)

    def scan_rows(self, parts: tuple[Tensor, ...], matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Apply several rows of one request, see :meth:`.RecurrentLayer.scan_rows`."""
        c, b, x, step = parts
        output, matrix = selective_rows(c, b, x, self._decay(step), matrix.squeeze(-1))
        return output, matrix.unsqueeze(-1)

    def _decay(self, step: Tensor) -> Tensor:
        """Return the log of the decay, [rows, channels, state], for time steps [rows, channels]."""
        return step.unsqueeze(-1) * -torch.exp(self.A_log.float())

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield this rank's channels of ``A_log`` and ``D``; submodules yield their own weights."""
        for name in ("A_log", "D"):
            value = getattr(self, name)
            yield WeightSlice(f"{path}.{name}", (self.channels.total, *value.shape[1:]), value, 0, self.channels.start)


class JambaSparseMoeBlock(nn.Module):
    """Routed experts; counterpart of transformers' class of the same name."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.moe is not None, "a sparse block needs ModelConfig.moe"
        self.router = Qwen3MoeRouter(config.moe, config.hidden_size, dtype)
        self.experts = Experts(config.moe, config.hidden_size, config.activation, tp, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        _, weights, chosen = self.router(hidden_states)
        output: Tensor = self.experts(hidden_states, chosen, weights)
        return output


class BambaDecoderLayer(HybridDecoderLayer):
    """Counterpart of transformers' BambaDecoderLayer: ``mamba`` or ``self_attn``, then ``feed_forward``."""

    recurrent_class: ClassVar[type[nn.Module]] = Mamba2Mixer
    mlp_norm_name = "pre_ff_layernorm"
    mlp_name = "feed_forward"


class BambaModel(Decoder):
    """Counterpart of transformers' BambaModel."""

    final_norm_name = "final_layernorm"


class BambaForCausalLM(Mamba2CausalLM):
    """Bamba: Mamba-2 and attention; transformers' `modeling_bamba.py`."""

    decoder_class = BambaModel
    layer_class = BambaDecoderLayer


class JambaDecoderLayer(BambaDecoderLayer):
    """Counterpart of transformers' JambaMambaDecoderLayer and JambaAttentionDecoderLayer."""

    recurrent_class = JambaMambaMixer

    def make_mlp(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """Create the ``feed_forward`` module of layer ``layer``."""
        if config.moe is None or layer in config.moe.dense_layers:
            return super().make_mlp(config, layer, tp, dtype)
        return JambaSparseMoeBlock(config, tp, dtype)


class JambaModel(UnrotatedDecoder):
    """Counterpart of transformers' JambaModel."""

    final_norm_name = "final_layernorm"


class JambaForCausalLM(MoeCausalLM):
    """Jamba, arXiv:2403.19887; transformers' `modeling_jamba.py`."""

    decoder_class = JambaModel
    layer_class = JambaDecoderLayer

    def state_units(self) -> Shard:
        """Return this rank's shard of the channels."""
        assert self.config.mamba1 is not None
        return Shard.of(self.config.mamba1.channels, self.tp)

    def state_shapes(self, units: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Return the shapes of window and recurrent state for ``units`` channels."""
        mamba = self.config.mamba1
        assert mamba is not None
        return (units, mamba.kernel - 1), (units, mamba.state_dim, 1)
