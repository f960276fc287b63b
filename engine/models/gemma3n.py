"""Gemma 3n text with Hugging Face's module names: parallel residual streams, per-layer embeddings, shared keys."""

import math
from collections.abc import Iterator, Mapping
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tapscope.engine.checkpoint.weight_loader import CheckpointModule, WeightSlice, parameter
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.gemma3n_config import Gemma3nConfig
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.activation import Activation
from tapscope.engine.layers.embedding import ScaledVocabEmbedding
from tapscope.engine.layers.linear import FusedLinear, ReplicatedLinear
from tapscope.engine.layers.norm import HEADS, Olmo2RMSNorm, UnscaledRMSNorm
from tapscope.engine.layers.paged_attention import Attention, attend
from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import DecoderLayer, ModelOutput, Rotation
from tapscope.engine.models.gemma import Gemma3Decoder
from tapscope.engine.models.mlp import GatedMLP
from tapscope.engine.models.moe import MoeCausalLM
from tapscope.engine.models.multimodal import TextModel

STREAMS = "streams t h # tp:replicated"


def _parts(config: ModelConfig) -> Gemma3nConfig:
    assert config.gemma3n is not None, "Gemma 3n needs ModelConfig.gemma3n"
    return config.gemma3n


class SharedAttention(Attention):
    """Attention to the keys and values cached by another layer."""

    def forward(self, query: Tensor, past_key_values: StepCache) -> Tensor:  # type: ignore[override]
        """[tokens, heads, d] -> [tokens, heads * d]."""
        return attend(query, self.layer, past_key_values, self.spec).flatten(1)


class Gemma3nAttention(SelfAttention):
    """Counterpart of transformers' Gemma3nTextAttention.

    Overrides ``forward`` because values are normalized too, and the last layers compute queries only.
    """

    norm_class = Olmo2RMSNorm
    has_kernel = False

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        source = config.shared_kv_layers.get(layer)
        self.has_keys = source is None
        if source is None:
            self.v_norm = UnscaledRMSNorm(config.rms_norm_eps, self.heads.keys.dims("num_heads", "d"))
            return
        parts = {"q_proj": self.heads.queries.scaled(self.head_dim)}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, config.qkv_bias, dtype)
        self.attn = SharedAttention(source, self.attn.spec, self.heads)
        self.attn.tap_dims = {"in[query]": HEADS, "out": self.attn.tap_dims["out"]}
        del self.k_proj, self.v_proj, self.k_norm

    def forward(
        self, hidden_states: Tensor, position_embeddings: Rotation, past_key_values: StepCache
    ) -> tuple[Tensor, None]:
        """[tokens, hidden] -> ([tokens, hidden], None); transformers returns attention weights instead of None."""
        projected = self.qkv_proj(hidden_states)
        query = self.rotate(self.q_norm(self._heads(self.q_proj(projected[0]))), *position_embeddings)
        if not self.has_keys:
            return self.o_proj(self.attn(query, past_key_values)), None
        key = self._heads(self.k_proj(projected[1]))
        value = key if self.v_proj is None else self._heads(self.v_proj(projected[2]))
        key, value = self.rotate(self.k_norm(key), *position_embeddings), self.v_norm(value)
        return self.o_proj(self.attn(query, self._used(key), self._used(value), past_key_values)), None


class Gemma3nMLP(GatedMLP):
    """MLP that zeroes gates below a cutoff derived from their mean and standard deviation.

    Counterpart of transformers' Gemma3nTextMLP.
    """

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        size, sparsity = _parts(config).intermediate_sizes[layer], _parts(config).sparsity[layer]
        super().__init__(config, size, tp, dtype)
        self.tp, self.size = tp, size
        self.cutoff = NormalDist().inv_cdf(sparsity) if sparsity > 0 else None
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate, up = self.gate_up_proj(hidden_states)
        gate = self.gate_proj(gate)
        if self.cutoff is not None:
            gate = torch.relu(gate - self._cutoff(gate).to(gate.dtype))
        output: Tensor = self.down_proj(self.act_fn(gate) * self.up_proj(up))
        return output

    def _cutoff(self, gate: Tensor) -> Tensor:
        """Return mean plus ``cutoff`` times standard deviation over the features of all ranks, [tokens, 1] float32."""
        wide = gate.float()
        mean = self._sum(wide) / self.size
        deviation = torch.sqrt(self._sum((wide - mean).square()) / self.size)
        assert self.cutoff is not None, "the layer is not sparse"
        return mean + deviation * self.cutoff

    def _sum(self, values: Tensor) -> Tensor:
        total = values.sum(-1, keepdim=True)
        return self.tp.all_reduce(total) if self.tp.size > 1 else total


class Gemma3nAltUp(CheckpointModule):
    """Alternating updates (AltUp): the layer computes one stream; the other streams are predicted and corrected.

    Counterpart of transformers' Gemma3nTextAltUp.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        parts, hidden = _parts(config), config.hidden_size
        self.streams, self.active, self.input_scale = parts.num_streams, parts.active, 1.0 / hidden
        self.correct_output_scale = parameter(hidden, dtype=dtype)
        self.correction_coefs = ReplicatedLinear(self.streams, self.streams, False, dtype)
        self.prediction_coefs = ReplicatedLinear(self.streams, self.streams**2, False, dtype)
        self.modality_router = ReplicatedLinear(hidden, self.streams, False, dtype)
        self.router_norm = Olmo2RMSNorm(hidden, config.rms_norm_eps, dtype)

    def predict(self, streams: Tensor) -> Tensor:
        """Add a token-dependent linear combination of all streams to each of ``streams`` [streams, tokens, hidden]."""
        coefficients: Tensor = self.prediction_coefs(self._modalities(streams[self.active]))
        by_target = coefficients.view(-1, self.streams, self.streams).permute(2, 1, 0).unsqueeze(-1)
        return (streams.unsqueeze(1) * by_target).sum(0) + streams

    def correct(self, predictions: Tensor, activated: Tensor) -> Tensor:
        """Correct ``predictions`` [streams, tokens, hidden] by the layer's output ``activated`` [tokens, hidden]."""
        coefficients: Tensor = self.correction_coefs(self._modalities(activated)) + 1.0
        return (activated - predictions[self.active]) * coefficients.T.unsqueeze(-1) + predictions

    def scale_corrected_output(self, corrected: Tensor) -> Tensor:
        """Multiply [tokens, hidden] by a weight.

        A plain method, because transformers does not call it as a module either.
        """
        return corrected * self.correct_output_scale

    def _modalities(self, states: Tensor) -> Tensor:
        routed = self.modality_router(self.router_norm(states) * self.input_scale)
        return torch.tanh(routed.float()).to(states.dtype)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        """Yield the output scale; submodules yield their own weights."""
        scale = self.correct_output_scale
        yield WeightSlice(f"{path}.correct_output_scale", tuple(scale.shape), scale)


class Gemma3nLaurelBlock(nn.Module):
    """Learned augmented residual (LAuReL); counterpart of transformers' Gemma3nTextLaurelBlock."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        rank, hidden = _parts(config).laurel_rank, config.hidden_size
        self.linear_left = ReplicatedLinear(hidden, rank, False, dtype)
        self.linear_right = ReplicatedLinear(rank, hidden, False, dtype)
        self.post_laurel_norm = Olmo2RMSNorm(hidden, config.rms_norm_eps, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        output: Tensor = hidden_states + self.post_laurel_norm(self.linear_right(self.linear_left(hidden_states)))
        return output


class LayerInputsDecoderLayer(DecoderLayer):
    """Decoder layer with an additional per-layer embedding input."""

    norm_class = Olmo2RMSNorm  # like Gemma3nRMSNorm, multiplies by the weight in float32

    def add_layer_inputs(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """Create the modules that process the per-layer input."""
        assert config.layer_inputs is not None, "the model has no layer inputs"
        size, hidden = config.layer_inputs.size, config.hidden_size
        self.act_fn = Activation(config.activation)
        self.act_fn.tap_dims = dict.fromkeys(self.act_fn.tap_dims, WHOLE)
        self.per_layer_input_gate = ReplicatedLinear(hidden, size, False, dtype)
        self.per_layer_projection = ReplicatedLinear(size, hidden, False, dtype)
        self.post_per_layer_input_norm = Olmo2RMSNorm(hidden, config.rms_norm_eps, dtype)
        self.tap_dims |= {"in[per_layer_input]": WHOLE}

    def of_layer_input(self, states: Tensor, per_layer_input: Tensor) -> Tensor:
        """Return the contribution of ``per_layer_input`` [tokens, per-layer features] to the states [tokens,
        hidden].
        """
        gated = self.act_fn(self.per_layer_input_gate(states)) * per_layer_input
        output: Tensor = self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return output


class Gemma3nDecoderLayer(LayerInputsDecoderLayer):
    """Counterpart of transformers' Gemma3nTextDecoderLayer."""

    attention_class = Gemma3nAttention

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        parts, hidden, eps = _parts(config), config.hidden_size, config.rms_norm_eps
        self.active, self.scales_output = parts.active, parts.scales_output
        self.pre_feedforward_layernorm = Olmo2RMSNorm(hidden, eps, dtype)
        self.post_feedforward_layernorm = Olmo2RMSNorm(hidden, eps, dtype)
        self.altup, self.laurel = Gemma3nAltUp(config, dtype), Gemma3nLaurelBlock(config, dtype)
        self.add_layer_inputs(config, dtype)
        self.tap_dims |= {"in[hidden_states]": STREAMS, "out": STREAMS}

    def make_mlp(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """Create the ``mlp`` module of layer ``layer``."""
        return Gemma3nMLP(config, layer, tp, dtype)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: Rotation,
        per_layer_input: Tensor,
        position_ids: Tensor,
        past_key_values: StepCache,
    ) -> Tensor:
        """Map [streams, tokens, hidden] and per-layer inputs [tokens, per-layer features] to [streams, tokens,
        hidden].
        """
        predictions = self.altup.predict(hidden_states)
        active = predictions[self.active]
        normalised = self.input_layernorm(active)
        laurel = self.laurel(normalised)
        attended = self.mix(normalised, past_key_values, position_embeddings)
        states = (active + self.post_attention_layernorm(attended) + laurel) / math.sqrt(2)
        states = states + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(states)))
        corrected = self.altup.correct(predictions, states)
        first = corrected[self.active]
        first = self.altup.scale_corrected_output(first) if self.scales_output else first
        first = self.of_layer_input(first, per_layer_input)
        return torch.cat((corrected[:1], corrected[1:] + first))


class LayerInputsDecoder(Gemma3Decoder):
    """Decoder whose layers read per-layer embeddings if ``config.layer_inputs`` is set."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype, layer_class: type[DecoderLayer]
    ) -> None:
        super().__init__(config, tp, dtype, layer_class)
        self.layer_inputs = config.layer_inputs
        if self.layer_inputs is None:
            return
        size, width = self.layer_inputs.size, config.num_layers * self.layer_inputs.size
        self.embed_tokens_per_layer = ScaledVocabEmbedding(self.layer_inputs.vocab_size, width, size**0.5, tp, dtype)
        self.per_layer_model_projection = ReplicatedLinear(config.hidden_size, width, False, dtype)
        self.per_layer_projection_norm = Olmo2RMSNorm(size, config.rms_norm_eps, dtype, "t l h # tp:replicated")

    def inputs_of_layers(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        """Return per-layer inputs [tokens, layers, per-layer features], from the tokens and their embeddings."""
        assert self.layer_inputs is not None, "the model has no layer inputs"
        known = torch.where(input_ids < self.layer_inputs.vocab_size, input_ids, 0)
        shape = len(input_ids), len(self.layers), self.layer_inputs.size
        own = self.embed_tokens_per_layer(known).view(shape)
        projected = self.per_layer_model_projection(embedded) * embedded.shape[-1] ** -0.5
        output: Tensor = (self.per_layer_projection_norm(projected.view(shape)) + own) * 2**-0.5
        return output


class Gemma3nDecoder(LayerInputsDecoder):
    """Counterpart of transformers' Gemma3nTextModel. Only the active stream is recorded as a layer's input."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype, layer_class: type[DecoderLayer]
    ) -> None:
        super().__init__(config, tp, dtype, layer_class)
        hidden, others = config.hidden_size, range(1, _parts(config).num_streams)
        self.active = _parts(config).active
        self.altup_projections = nn.ModuleList(ReplicatedLinear(hidden, hidden, False, dtype) for _ in others)
        self.altup_unembed_projections = nn.ModuleList(ReplicatedLinear(hidden, hidden, False, dtype) for _ in others)

    def make_rotary(self, config: ModelConfig) -> Any:
        """Create ``rotary_emb``, which receives all streams."""
        rotary = super().make_rotary(config)
        rotary.tap_dims |= {"in[x]": STREAMS}
        return rotary

    def forward(self, input_ids: Tensor, position_ids: Tensor, past_key_values: StepCache) -> ModelOutput:
        """Map token ids and positions [tokens] to the last hidden states [tokens, hidden]."""
        embedded = self.embedding(input_ids)
        of_layers = self.inputs_of_layers(input_ids, embedded)
        streams = torch.stack(
            [embedded, *(_match_rms(project(embedded), embedded) for project in self.altup_projections)]
        )
        rotations = self.rotations(streams, position_ids, past_key_values)
        for number, (layer, rotation) in enumerate(zip(self.layers, rotations, strict=True)):
            self.start_layer(number, streams[self.active])
            streams = layer(
                streams, rotation, of_layers[:, number], position_ids=position_ids, past_key_values=past_key_values
            )
        first, others = streams[0], zip(self.altup_unembed_projections, streams[1:], strict=True)
        merged = torch.stack([first, *(_match_rms(project(stream), first) for project, stream in others)]).mean(0)
        self.end_layers(merged)
        return ModelOutput(self.final_norm(merged))


def _match_rms(states: Tensor, reference: Tensor) -> Tensor:
    """Rescale each row of ``states`` [tokens, hidden] to the root mean square of the same row of ``reference``."""
    rms = reference.square().mean(-1, keepdim=True) ** 0.5
    return states * rms / states.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()


class SharedKeysCausalLM(MoeCausalLM):
    """Causal LM whose last layers read keys and values cached by earlier layers.

    Checkpoints may still contain key and value projections and norms of these layers; they are skipped.
    """

    decoder_prefix: ClassVar[str] = "model."

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, tp, dtype)
        names = [f"self_attn.{name}." for name in ("k_proj", "v_proj", "k_norm", "v_norm")]
        layers = [f"{self.decoder_prefix}layers.{layer}." for layer in config.shared_kv_layers]
        unused = tuple(layer + name for layer in layers for name in names)
        self.skipped_prefixes = type(self).skipped_prefixes + unused  # type: ignore[misc]


class TextPart:
    """Mixin with the tensor names of a checkpoint that includes vision and audio towers."""

    decoder_prefix: ClassVar[str] = "model.language_model."
    tied_weights: ClassVar[Mapping[str, str]] = {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    skipped_prefixes: ClassVar[tuple[str, ...]] = (
        "model.vision_tower.",
        "model.audio_tower.",
        "model.embed_vision.",
        "model.embed_audio.",
    )


class Gemma3nForCausalLM(SharedKeysCausalLM):
    """Gemma 3n text; transformers' `modeling_gemma3n.py`."""

    decoder_class: ClassVar[type[nn.Module]] = Gemma3nDecoder
    layer_class: ClassVar[type[DecoderLayer]] = Gemma3nDecoderLayer


class Gemma3nTextModel(TextModel):
    """Counterpart of transformers' Gemma3nModel."""

    decoder_class = Gemma3nDecoder


class Gemma3nForConditionalGeneration(TextPart, Gemma3nForCausalLM):
    """Gemma 3n with vision and audio; transformers' `modeling_gemma3n.py`."""

    decoder_class = Gemma3nTextModel
