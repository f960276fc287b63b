"""gpt-oss with Hugging Face's module names: attention with sinks, alternating windows, experts with biases."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice, parameter
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.hf_config.moe_config import MoeConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.clamped_experts import ClampedExperts
from tapscope.engine.layers.experts import ROUTING_DIMS
from tapscope.engine.layers.fused import linear
from tapscope.engine.layers.norm import Olmo2RMSNorm
from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.layers.rope import RotaryEmbedding
from tapscope.engine.layers.routers import Routed, Router
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import Decoder, DecoderLayer, Rotation
from tapscope.engine.models.moe import MoeCausalLM


class GptOssRotaryEmbedding(RotaryEmbedding):
    """Cosines and sines for half a head, in the format of transformers' GptOssRotaryEmbedding."""

    def forward(self, x: Tensor, position_ids: Tensor, lengths: Tensor | None = None) -> Rotation:
        """Return cos and sin [tokens, head_dim / 2] for positions [tokens]."""
        cos, sin = super().forward(x, position_ids, lengths)
        return cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]


class GptOssAttention(SelfAttention, CheckpointModule):
    """Attention with one sink per head, a logit without a value (arXiv:2309.17453).

    Counterpart of transformers' GptOssAttention.
    """

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.sinks = parameter(self.heads.queries.count, dtype=dtype)
        self.attn.spec = replace(self.attn.spec, sinks=self.sinks)

    def forward(
        self, hidden_states: Tensor, position_embeddings: Rotation, past_key_values: StepCache
    ) -> tuple[Tensor, None]:
        """[tokens, hidden] -> ([tokens, hidden], None); transformers returns attention weights instead of None."""
        cos, sin = position_embeddings
        whole = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        return super().forward(hidden_states, whole, past_key_values)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield the sinks of this rank's heads; submodules yield their own weights."""
        queries = self.heads.queries
        yield WeightSlice(f"{path}.sinks", (queries.total,), self.sinks, 0, queries.start)


class GptOssRouter(Router):
    """Softmax over the ``top_k`` largest logits; counterpart of transformers' GptOssTopKRouter."""

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(config, hidden_size, dtype)
        self.bias = parameter(config.num_experts, dtype=dtype)

    def route(self, hidden_states: Tensor) -> Routed:
        """Return logits, weights and expert ids; the first two are in the model's dtype."""
        logits = linear(hidden_states, self.weight, self.bias)
        best, chosen = self.top(logits)
        return logits, best.softmax(dim=-1), chosen

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield the complete weight and bias."""
        yield from super().weight_slices(path)
        yield WeightSlice(f"{path}.bias", tuple(self.bias.shape), self.bias)


class GptOssMLP(nn.Module):
    """Routed experts; counterpart of transformers' GptOssMLP."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.moe is not None, "a sparse block needs ModelConfig.moe"
        self.router = GptOssRouter(config.moe, config.hidden_size, dtype)
        self.experts = ClampedExperts(config.moe, config.hidden_size, config.activation, tp, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out[0]": WHOLE, "out[1]": ROUTING_DIMS}

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Map [tokens, hidden] to the output [tokens, hidden] and the expert weights [tokens, k]."""
        _, weights, chosen = self.router(hidden_states)
        return self.experts(hidden_states, chosen, weights), weights


class GptOssDecoderLayer(DecoderLayer):
    """Counterpart of transformers' GptOssDecoderLayer."""

    attention_class = GptOssAttention
    norm_class = Olmo2RMSNorm

    def make_mlp(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """Create the ``mlp`` module of layer ``layer``."""
        return GptOssMLP(config, tp, dtype)

    def mlp_summand(self, output: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        """Return the hidden states of the MLP's output tuple."""
        return output[0]


class GptOssDecoder(Decoder):
    """Counterpart of transformers' GptOssModel."""

    rotary_class = GptOssRotaryEmbedding


class GptOssForCausalLM(MoeCausalLM):
    """gpt-oss 20B and 120B, arXiv:2508.10925; transformers' `modeling_gpt_oss.py`."""

    decoder_class = GptOssDecoder
    layer_class = GptOssDecoderLayer
