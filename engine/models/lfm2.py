"""LFM2 with Hugging Face's module names: gated short convolutions in most layers, attention in the others."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice
from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.linear import FusedLinear, PackedLinear, RowParallelLinear
from tapscope.engine.layers.probe import SHARD, WHOLE, Probe
from tapscope.engine.layers.recurrent_layer import RecurrentLayer
from tapscope.engine.layers.short_conv import ConvWeight
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import CausalLM, Decoder
from tapscope.engine.models.hybrid import HybridDecoderLayer


class Lfm2Attention(SelfAttention):
    """Attention with q/k norm; counterpart of transformers' Lfm2Attention."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.q_layernorm, self.k_layernorm, self.out_proj = self.q_norm, self.k_norm, self.o_proj
        del self.q_norm, self.k_norm, self.o_proj

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """Map SelfAttention's submodule names to LFM2's."""
        new = {"q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj"}.get(name, name)
        return super().__getattr__(new if new in self.__dict__.get("_modules", ()) else name)


class Lfm2ShortConv(RecurrentLayer, CheckpointModule):
    """Gated short convolution, C * conv(B * x) with (B, C, x) projected from the input, over this rank's channels.

    Counterpart of transformers' Lfm2ShortConv.
    """

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.short_conv is not None, "a short convolution needs ModelConfig.short_conv"
        self.layer, channels, bias = layer, Shard.of(config.hidden_size, tp), config.short_conv_bias
        self.in_proj = PackedLinear(config.hidden_size, {"B": channels, "C": channels, "x": channels}, bias, dtype)
        self.conv = ConvWeight((channels,), config.short_conv, dtype, bias=bias)
        self.add_state_taps({"x": channels}, tp.size, None)
        self.out_proj = RowParallelLinear(channels, config.hidden_size, bias, tp, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor, past_key_values: StepCache) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and updates the convolution windows of the requests."""
        before, gate, x = self.in_proj.split(self.in_proj(hidden_states))
        rows, groups = self.convolve(before * x, self.conv, past_key_values)
        self.store(groups, past_key_values)
        output: Tensor = self.out_proj(gate * rows)
        return output

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield nothing: all weights belong to submodules."""
        yield from ()


class Lfm2MLP(nn.Module):
    """w2(silu(w1(x)) * w3(x)); counterpart of transformers' Lfm2MLP."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        shard = Shard.of(config.intermediate_size, tp)
        self.w13 = FusedLinear(config.hidden_size, {"w1": shard, "w3": shard}, False, dtype)
        self.w1, self.w3 = Probe(SHARD), Probe(SHARD)
        self.w2 = RowParallelLinear(shard, config.hidden_size, False, tp, dtype)
        self.tap_dims = {"in[x]": WHOLE, "out": WHOLE}

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate, up = self.w13(x)
        output: Tensor = self.w2(functional.silu(self.w1(gate)) * self.w3(up))
        return output


class Lfm2DecoderLayer(HybridDecoderLayer):
    """Counterpart of transformers' Lfm2DecoderLayer: ``conv`` or ``self_attn``, and ``feed_forward``."""

    recurrent_name = "conv"
    recurrent_class = Lfm2ShortConv
    attention_class = Lfm2Attention
    input_norm_name = "operator_norm"
    mlp_norm_name = "ffn_norm"
    mlp_name = "feed_forward"

    def make_mlp(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """Create the ``feed_forward`` module of layer ``layer``."""
        return Lfm2MLP(config, tp, dtype)


class Lfm2Decoder(Decoder):
    """Counterpart of transformers' Lfm2Model."""

    final_norm_name = "embedding_norm"


class Lfm2ForCausalLM(CausalLM):
    """LFM2, arXiv:2511.23404; transformers' `modeling_lfm2.py`."""

    decoder_class = Lfm2Decoder
    layer_class = Lfm2DecoderLayer

    def state_units(self) -> Shard:
        """Return this rank's shard of the channels."""
        return Shard.of(self.config.hidden_size, self.tp)

    def state_shapes(self, units: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Return the shapes of the window of ``units`` channels and of an empty matrix."""
        assert self.config.short_conv is not None
        return (units, self.config.short_conv - 1), (0, 0, 0)
