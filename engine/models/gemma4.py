"""Gemma 4 text with Hugging Face's module names: larger heads in full layers, shared keys, experts next to the MLP."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice, parameter
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.family import FULL
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.hf_config.moe_config import MoeConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.experts import Experts
from tapscope.engine.layers.linear import FusedLinear, ReplicatedLinear
from tapscope.engine.layers.norm import Olmo2RMSNorm, UnscaledRMSNorm
from tapscope.engine.layers.routers import Routed, Router
from tapscope.engine.models.decoder import DecoderLayer, ModelOutput, Rotation
from tapscope.engine.models.gemma3n import (
    Gemma3nAttention,
    LayerInputsDecoder,
    LayerInputsDecoderLayer,
    SharedKeysCausalLM,
    TextPart,
)
from tapscope.engine.models.mlp import GatedMLP
from tapscope.engine.models.multimodal import TextModel


class Gemma4Attention(Gemma3nAttention):
    """Counterpart of transformers' Gemma4TextAttention; with ``keys_as_values``, full layers have no ``v_proj``."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        if self.has_keys and config.keys_as_values and config.layer_types[layer] == FULL:
            parts = {name: part for name, part in self.qkv_proj.parts.items() if name != "v_proj"}
            self.qkv_proj = FusedLinear(config.hidden_size, parts, config.qkv_bias, dtype)
            self.v_proj = None  # type: ignore[assignment]


class RouterLinear(ReplicatedLinear):
    """Projection to expert scores, never quantized: rounding could change the selected experts."""

    may_quantize = may_stay_quantized = may_have_adapters = False


class Gemma4Router(Router):
    """Softmax over all experts of scaled, normalized states, with a factor per expert.

    Counterpart of transformers' Gemma4TextRouter. Returns probabilities where other routers return logits.
    """

    def __init__(self, config: MoeConfig, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__(config, hidden_size, dtype)
        del self.weight
        self.norm = UnscaledRMSNorm(eps)
        self.proj = RouterLinear(hidden_size, config.num_experts, False, dtype)
        self.proj.tap_dims |= {"out": self.tap_dims["out[0]"]}
        self.scale = parameter(hidden_size, dtype=dtype)
        self.per_expert_scale = parameter(config.num_experts, dtype=dtype)

    def route(self, hidden_states: Tensor) -> Routed:
        """Return probabilities, weights and expert ids; the first two are float32."""
        states = self.norm(hidden_states) * self.scale * hidden_states.shape[-1] ** -0.5
        probabilities = self.proj(states).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = self.top(probabilities)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return probabilities, weights * self.per_expert_scale[chosen], chosen

    def layouts(self, path: str) -> Iterator[list[WeightSlice]]:
        """Yield the layout of the scales; the projection yields its own weight."""
        yield list(self.weight_slices(path))

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield the complete scales."""
        for name in ("scale", "per_expert_scale"):
            scale = getattr(self, name)
            yield WeightSlice(f"{path}.{name}", tuple(scale.shape), scale)


class Gemma4DecoderLayer(LayerInputsDecoderLayer, CheckpointModule):
    """Counterpart of transformers' Gemma4TextDecoderLayer."""

    attention_class = Gemma4Attention

    layer_scalar: Tensor

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.pre_feedforward_layernorm = Olmo2RMSNorm(hidden, eps, dtype)
        self.post_feedforward_layernorm = Olmo2RMSNorm(hidden, eps, dtype)
        self.register_buffer("layer_scalar", torch.ones(1, dtype=dtype))
        if config.layer_inputs is not None:
            self.add_layer_inputs(config, dtype)
        self.has_experts = config.moe is not None
        if config.moe is not None:
            self.router = Gemma4Router(config.moe, hidden, eps, dtype)
            self.experts = Experts(config.moe, hidden, config.activation, tp, dtype)
            self.post_feedforward_layernorm_1 = Olmo2RMSNorm(hidden, eps, dtype)
            self.post_feedforward_layernorm_2 = Olmo2RMSNorm(hidden, eps, dtype)
            self.pre_feedforward_layernorm_2 = Olmo2RMSNorm(hidden, eps, dtype)

    def make_mlp(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """Create the ``mlp`` module of layer ``layer``."""
        is_wide = config.wide_shared_mlp and layer in config.shared_kv_layers
        return GatedMLP(config, config.intermediate_size * (2 if is_wide else 1), tp, dtype)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        per_layer_input: Tensor | None,
        position_embeddings: Rotation,
        position_ids: Tensor,
        past_key_values: StepCache,
    ) -> Tensor:
        """Map [tokens, hidden] and per-layer inputs [tokens, per-layer features] (None: none) to [tokens, hidden]."""
        attended = self.mix(self.input_layernorm(hidden_states), past_key_values, position_embeddings)
        states: Tensor = hidden_states + self.post_attention_layernorm(attended)
        output = self.mlp(self.pre_feedforward_layernorm(states))
        if self.has_experts:
            output = self.post_feedforward_layernorm_1(output) + self._routed(states)
        states = states + self.post_feedforward_layernorm(output)
        if per_layer_input is not None:
            states = states + self.of_layer_input(states, per_layer_input)
        return states * self.layer_scalar

    def _routed(self, states: Tensor) -> Tensor:
        _, weights, chosen = self.router(states)
        routed = self.experts(self.pre_feedforward_layernorm_2(states), chosen, weights)
        output: Tensor = self.post_feedforward_layernorm_2(routed)
        return output

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield the output scale; submodules yield their own weights."""
        yield WeightSlice(f"{path}.layer_scalar", (1,), self.layer_scalar)


class Gemma4Decoder(LayerInputsDecoder):
    """Counterpart of transformers' Gemma4TextModel."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, past_key_values: StepCache) -> ModelOutput:
        """Map token ids and positions [tokens] to the last hidden states [tokens, hidden]."""
        states = embedded = self.embedding(input_ids)
        of_layers = None if self.layer_inputs is None else self.inputs_of_layers(input_ids, embedded)
        rotations = self.rotations(embedded, position_ids, past_key_values)
        for number, (layer, rotation) in enumerate(zip(self.layers, rotations, strict=True)):
            self.start_layer(number, states)
            of_layer = None if of_layers is None else of_layers[:, number]
            states = layer(states, of_layer, rotation, position_ids=position_ids, past_key_values=past_key_values)
        self.end_layers(states)
        return ModelOutput(self.final_norm(states))


class Gemma4ForCausalLM(SharedKeysCausalLM):
    """Gemma 4 text, with and without experts; transformers' `modeling_gemma4.py`."""

    decoder_class: ClassVar[type[nn.Module]] = Gemma4Decoder
    layer_class: ClassVar[type[DecoderLayer]] = Gemma4DecoderLayer


class Gemma4TextModel(TextModel):
    """Counterpart of transformers' Gemma4Model."""

    decoder_class = Gemma4Decoder


class Gemma4ForConditionalGeneration(TextPart, Gemma4ForCausalLM):
    """The text part of Gemma 4 with vision and audio; transformers' `modeling_gemma4.py`."""

    decoder_class = Gemma4TextModel
