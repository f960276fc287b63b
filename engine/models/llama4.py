"""Llama 4 text with Hugging Face's module names: chunked attention, layers without rope, experts with scaled inputs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tapscope.engine.checkpoint.weight_loader import WeightSlice
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.hf_config.moe_config import MoeConfig
from tapscope.engine.layers.experts import Experts
from tapscope.engine.layers.fused import linear
from tapscope.engine.layers.norm import HEADS, UnscaledRMSNorm
from tapscope.engine.layers.probe import ANGLES, WHOLE
from tapscope.engine.layers.rope import rotate_complex
from tapscope.engine.layers.routers import Router
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import DecoderLayer
from tapscope.engine.models.deepseek import DeepseekV2Decoder
from tapscope.engine.models.mlp import GatedMLP
from tapscope.engine.models.moe import MoeCausalLM


class Llama4L2Norm(UnscaledRMSNorm):
    """Per-head norm; counterpart of transformers' Llama4TextL2Norm, whose argument is named ``x``."""

    def __init__(self, eps: float) -> None:
        super().__init__(eps)
        self.tap_dims = {"in[x]": HEADS, "out": HEADS}

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [tokens, heads, dim] over the last axis, in the input's dtype."""
        return super().forward(x)


class Llama4Attention(SelfAttention):
    """Attention with q/k norms after the rotary embedding, and scaled queries in layers without rope.

    Counterpart of transformers' Llama4TextAttention.
    """

    has_kernel = False

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        if self.qk_norm:
            del self.q_norm, self.k_norm
        self.qk_norm = Llama4L2Norm(config.rms_norm_eps) if config.qk_norm and self.has_rope else None  # type: ignore[assignment]
        self.tap_dims |= {"in[position_embeddings]": ANGLES}

    def norm_and_rotate(self, query: Tensor, key: Tensor, rotation: Any) -> tuple[Tensor, Tensor]:
        """Apply the rotary embedding, then norms, to query and key [tokens, heads, dim], if the layer has them."""
        if self.has_rope:
            query, key = rotate_complex(query, rotation), rotate_complex(key, rotation)
        if self.qk_norm is not None:
            query, key = self.qk_norm(query), self.qk_norm(key)  # type: ignore[operator]
        return query, key


class Llama4MLP(GatedMLP):
    """Counterpart of transformers' Llama4TextMLP."""

    def __init__(self, config: ModelConfig, size: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, size, tp, dtype)
        self.activation_fn = self.act_fn
        del self.act_fn

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate, up = self.gate_up_proj(x)
        output: Tensor = self.down_proj(self.activation_fn(self.gate_proj(gate)) * self.up_proj(up))
        return output


class Llama4Experts(Experts):
    """Experts whose inputs are multiplied by the routing weights; counterpart of transformers' Llama4TextExperts.

    Inputs and outputs are not sites: transformers computes every token in every expert, with zero inputs where the
    expert is not selected, so they would not be comparable.
    """

    scales_inputs = True
    peft_swaps_axes = True
    tap_ports: tuple[str, ...] = ()

    def __init__(
        self, config: MoeConfig, hidden_size: int, activation: str, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__(config, hidden_size, activation, tp, dtype)
        self.partial.tap_ports = ()

    def layouts(self, path: str) -> Iterator[list[WeightSlice]]:
        """Yield the layout with stacked matrices [in, out], then the one with one matrix per expert."""
        yield self.stacked_matrices(path, transposed=True)
        yield self.single_matrices(path)


class Llama4Router(Router):
    """Sigmoid of the ``top_k`` largest logits; counterpart of transformers' Llama4Router."""

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(config, hidden_size, dtype)
        scores = "t e # tp:replicated"
        self.tap_dims = {"in[hidden_states]": WHOLE, "out[0]": scores, "out[1]": scores}

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return weights, zero for unselected experts, and logits, [tokens, experts] each, for [tokens, hidden]."""
        logits = linear(hidden_states, self.weight)
        best, self.chosen = self.top(logits)
        scores = torch.full_like(logits, -torch.inf).scatter_(1, self.chosen, best)
        return torch.sigmoid(scores.float()).to(logits.dtype), logits


class Llama4Moe(nn.Module):
    """Routed experts plus a shared expert; counterpart of transformers' Llama4TextMoe."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.moe is not None, "a sparse block needs ModelConfig.moe"
        self.experts = Llama4Experts(config.moe, config.hidden_size, config.activation, tp, dtype)
        self.router = Llama4Router(config.moe, config.hidden_size, dtype)
        self.shared_expert = Llama4MLP(config, config.moe.shared_size, tp, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out[0]": WHOLE, "out[1]": "t e # tp:replicated"}

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Map [tokens, hidden] to the output [tokens, hidden] and the router's logits [tokens, experts]."""
        scores, logits = self.router(hidden_states)
        chosen = self.router.chosen
        assert chosen is not None, "the router has been called"
        shared: Tensor = self.shared_expert(hidden_states)
        return shared + self.experts(hidden_states, chosen, scores.gather(1, chosen)), logits


class Llama4DecoderLayer(DecoderLayer):
    """Counterpart of transformers' Llama4TextDecoderLayer."""

    attention_class = Llama4Attention
    mlp_name = "feed_forward"

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.tap_dims |= {"in[position_embeddings]": ANGLES}

    def make_mlp(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """Create the ``feed_forward`` module of layer ``layer``."""
        if config.moe is None or layer in config.moe.dense_layers:
            return Llama4MLP(config, config.intermediate_size, tp, dtype)
        return Llama4Moe(config, tp, dtype)

    def mlp_summand(self, output: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Return the hidden states of the MLP's output, which is a tuple in MoE layers."""
        return output[0] if isinstance(output, tuple) else output


class Llama4ForCausalLM(MoeCausalLM):
    """Llama 4 text; transformers' `modeling_llama4.py`."""

    decoder_class = DeepseekV2Decoder
    layer_class = Llama4DecoderLayer


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """The text model of Llama 4, with the sites of Llama4ForCausalLM; transformers' `modeling_llama4.py`."""

    checkpoint_prefixes = {"language_model.": ""}  # noqa: RUF012
    skipped_prefixes = ("vision_model.", "multi_modal_projector.")
