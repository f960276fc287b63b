"""The decoder shared by all families. Modules have Hugging Face's names, so that sites are named as in transformers.

Tokens of all requests are packed: hidden states are [tokens, hidden] where transformers has [batch, sequence, hidden].
The module tree differs from transformers' as follows: `qkv_proj` and `gate_up_proj` are fused GEMMs whose outputs pass
through probes with the original names; `self_attn.attn` is the attention core; `o_proj.partial` and `down_proj.partial`
are the partial sums before the all-reduce; the output of `sampler` is the sampled tokens.

A model family is a subclass of :class:`CausalLM` with transformers' class name, listed in the registry. If its layers
differ, its `layer_class` sets other classes (`attention_class`, `mlp_class`) or overrides methods.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from tapscope.engine.distributed.sharding import HeadShards, Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.cache_layout import CacheEntry, CacheLayout
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.embedding import VocabEmbedding, VocabHead, embedding_of
from tapscope.engine.layers.linear import quantizer_of
from tapscope.engine.layers.norm import RMSNorm, add_norm
from tapscope.engine.layers.probe import ANGLE_INPUTS, TOKENS, WHOLE, Probe
from tapscope.engine.layers.rope import RotaryEmbedding
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.mlp import GatedMLP
from tapscope.engine.models.residual_stream import OnSum, ResidualStream

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary embedding, [tokens, head_dim] each."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Output of :class:`Decoder`."""

    last_hidden_state: Tensor
    """Hidden states after the final norm, [tokens, hidden]."""


@dataclass(frozen=True, slots=True)
class CausalLMOutput:
    """Output of :class:`CausalLM`."""

    logits: Tensor
    """[logit rows, vocab], complete on every rank."""


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residual connections."""

    attention_class: ClassVar[type[nn.Module]] = SelfAttention
    mlp_class: ClassVar[type[nn.Module]] = GatedMLP
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm
    """Classes of ``self_attn``, the MLP, and the norms of hidden states."""
    input_norm_name: ClassVar[str] = "input_layernorm"
    mlp_norm_name: ClassVar[str] = "post_attention_layernorm"
    mlp_name: ClassVar[str] = "mlp"
    """Names, in transformers, of the norms before attention and MLP, and of the MLP."""
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    mlp: nn.Module
    """The three modules, if they have the default names."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = self.make_attention(config, layer, tp, dtype)
        self.add_module(self.mlp_name, self.make_mlp(config, layer, tp, dtype))
        for name in (self.input_norm_name, self.mlp_norm_name):
            self.add_module(name, self.norm_class(config.hidden_size, config.rms_norm_eps, dtype))
        self.tap_dims = {"in[hidden_states]": WHOLE, "in[position_ids]": TOKENS, "out": WHOLE} | ANGLE_INPUTS

    def make_attention(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """Create ``self_attn`` of layer ``layer``.

        It is called with hidden_states, position_embeddings and past_key_values.
        """
        return self.attention_class(config, layer, tp, dtype)

    def make_mlp(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """Create the ``mlp`` module of layer ``layer``: [tokens, hidden] -> [tokens, hidden]."""
        return self.mlp_class(config, config.intermediate_size, tp, dtype)

    def forward(
        self,
        hidden_states: Tensor,
        position_ids: Tensor,
        past_key_values: StepCache,
        position_embeddings: Rotation,
    ) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        states, residual = self.summands(hidden_states, None, past_key_values, position_embeddings)
        return residual + states

    def summands(
        self,
        states: Tensor,
        residual: Tensor | None,
        past_key_values: StepCache,
        position_embeddings: Rotation,
        on_input: OnSum | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the layer on ``states`` + ``residual`` without the last residual addition.

        Return (output, residual), whose sum is the layer's output; the norm of the next layer adds them. ``on_input``
        is called with the layer's input, the sum of ``states`` and ``residual``, once it is computed.
        """
        input_norm, mlp_norm = getattr(self, self.input_norm_name), getattr(self, self.mlp_norm_name)
        mlp = getattr(self, self.mlp_name)
        quantizers = [quantizer_of(module) for module in (getattr(self, "self_attn", None), mlp)]
        normalised, residual = add_norm(input_norm, states, residual, on_sum=on_input, quantizer=quantizers[0])
        mixed = self.mix(normalised, past_key_values, position_embeddings)
        normalised, residual = add_norm(mlp_norm, self.attention_summand(mixed), residual, quantizer=quantizers[1])
        return self.mlp_summand(mlp(normalised)), residual

    def mix(self, hidden_states: Tensor, cache: StepCache, position_embeddings: Rotation) -> Tensor:
        """Return the attention's output for normalized hidden states [tokens, hidden]."""
        output: Tensor
        output, _ = self.self_attn(
            hidden_states=hidden_states, position_embeddings=position_embeddings, past_key_values=cache
        )
        return output

    def attention_summand(self, output: Tensor) -> Tensor:
        """Return the attention's contribution to the residual stream, given its output [tokens, hidden]."""
        return output

    def mlp_summand(self, output: Tensor) -> Tensor:
        """Return the MLP's contribution to the residual stream, given its output [tokens, hidden]."""
        return output


class Decoder(nn.Module):
    """Token embedding, decoder layers and final norm."""

    embedding_name: ClassVar[str] = "embed_tokens"
    final_norm_name: ClassVar[str] = "norm"
    """Names, in transformers, of the token embedding and the final norm."""
    rotary_class: ClassVar[type[nn.Module]] = RotaryEmbedding
    """Class of ``rotary_emb``."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype, layer_class: type[DecoderLayer]
    ) -> None:
        super().__init__()
        self.heartbeat = tp.heartbeat
        self.add_module(self.embedding_name, embedding_of(config, tp, dtype))
        self.embedding_multiplier = config.embedding_multiplier
        self.layers = nn.ModuleList(self.make_layers(config, tp, dtype, layer_class))
        self.add_module(self.final_norm_name, layer_class.norm_class(config.hidden_size, config.rms_norm_eps, dtype))
        self.rotary_emb, self.is_dynamic = self.make_rotary(config), not config.is_prefix_shareable
        self._temperature = config.temperature_floor, config.temperature_scale, config.temperature_offset
        self.aux_layers: tuple[int, ...] = ()
        """Layers whose inputs are kept in :attr:`aux_hidden_states`; the number of layers selects the last output."""
        self.aux_hidden_states: list[Tensor] = []
        """Inputs [tokens, hidden] of :attr:`aux_layers` in the last step, read by EAGLE-3."""
        self._aux: dict[int, Tensor] = {}
        self.tap_dims = {"in[input_ids]": TOKENS, "in[position_ids]": TOKENS, "out[last_hidden_state]": WHOLE}

    @property
    def embedding(self) -> VocabEmbedding:
        """The token embedding."""
        return cast(VocabEmbedding, getattr(self, self.embedding_name))

    @property
    def final_norm(self) -> RMSNorm:
        """The norm after the last layer."""
        return cast(RMSNorm, getattr(self, self.final_norm_name))

    def make_layers(
        self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype, layer_class: type[DecoderLayer]
    ) -> Iterator[nn.Module]:
        """Yield the modules of ``layers``."""
        return (layer_class(config, layer, tp, dtype) for layer in range(config.num_layers))

    def make_rotary(self, config: ModelConfig) -> Any:
        """Create ``rotary_emb``, which :meth:`rotations` calls; None for models without rotary embedding."""
        return self.rotary_class(config.rope, config.rope.rotary_dim(config.head_dim))

    def rotations(self, hidden_states: Tensor, position_ids: Tensor, cache: StepCache) -> list[Any]:
        """Return the cosines and sines of each layer; None entries for models without rotary embedding."""
        if self.rotary_emb is None:
            return [None] * len(self.layers)
        options = {"lengths": cache.row_lengths} if self.is_dynamic else {}
        return [self.rotary_emb(hidden_states, position_ids=position_ids, **options)] * len(self.layers)

    def start_layer(self, number: int, states: Tensor | ResidualStream) -> None:
        """Report layer ``number`` to the watchdog; keep its input [tokens, hidden] if it is in :attr:`aux_layers`."""
        self.heartbeat.start_layer(number)
        self._keep_aux(number, states)

    def end_layers(self, states: Tensor | ResidualStream) -> None:
        """Set :attr:`aux_hidden_states`; ``states`` is the output [tokens, hidden] of the last layer."""
        self._keep_aux(len(self.layers), states)
        self.aux_hidden_states = [self._aux[layer] for layer in self.aux_layers]
        self._aux.clear()

    def _keep_aux(self, layer: int, states: Tensor | ResidualStream) -> None:
        if layer in self.aux_layers:
            self._aux[layer] = states.hidden_states if isinstance(states, ResidualStream) else states

    def _scale_queries(self, position_ids: Tensor) -> None:
        """Set the query factors of the attention layers, which grow with the position (arXiv:2501.19399)."""
        floor, scale, offset = self._temperature
        if floor is None:
            return
        factor = torch.log1p(torch.floor((position_ids.float() + offset) / floor)) * scale + 1.0
        for layer in self.layers:
            attention = getattr(layer, "self_attn", None)
            if isinstance(attention, SelfAttention) and attention.scales_queries:
                attention.query_scale = factor

    def forward(self, input_ids: Tensor, position_ids: Tensor, past_key_values: StepCache) -> ModelOutput:
        """Map token ids and positions [tokens] to the last hidden states [tokens, hidden]."""
        hidden_states = self.embedding(input_ids)
        if self.embedding_multiplier != 1.0:
            hidden_states = hidden_states * self.embedding_multiplier
        rotations = self.rotations(hidden_states, position_ids, past_key_values)
        self._scale_queries(position_ids)
        stream = ResidualStream(hidden_states)
        for number, (layer, position_embeddings) in enumerate(zip(self.layers, rotations, strict=True)):
            self.start_layer(number, stream)
            stream.enter(
                layer,
                position_ids=position_ids,
                past_key_values=past_key_values,
                position_embeddings=position_embeddings,
            )
        self.end_layers(stream)
        return ModelOutput(stream.normalised(self.final_norm))


class CausalLM(nn.Module):
    """A decoder with an output head: maps token ids to logits."""

    decoder_name: ClassVar[str] = "model"
    """Name of the decoder in transformers."""
    decoder_class: ClassVar[type[nn.Module]] = Decoder
    """Class of the decoder, called with config, tp, dtype and ``layer_class``."""
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    tied_weights: ClassVar[Mapping[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    """If word embeddings are tied: name of the tied tensor -> name of the tensor whose storage it shares."""
    shared_weights: ClassVar[Mapping[str, str]] = {}
    """Like ``tied_weights``, for layers that share weights."""
    skipped_prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes of checkpoint tensors to ignore because the model has no such tensors."""
    tap_values_final: ClassVar[bool] = True
    """Whether no layer modifies, in place, a value that a hook has received, see :mod:`tapscope.core.observe`."""
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {}
    """Prefix of tensor names in checkpoints -> prefix in this model."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        config.check_split(tp.size)
        self.config, self.tp = config, tp
        self.add_module(self.decoder_name, self.decoder_class(config, tp, dtype, self.layer_class))
        tied = self.decoder.embedding if config.tie_word_embeddings else None
        self.lm_head = VocabHead(config.vocab_size, config.hidden_size, tp, dtype, tied)
        self.decoder_graph: Callable[..., ModelOutput] | None = None
        """Replacement for the decoder call in steps whose decoder runs as a CUDA graph."""
        self.last_hidden_state: Tensor | None = None
        """Hidden states of the last step after the final norm, [tokens, hidden]."""
        self.sampler = Probe(TOKENS, rows="logits")
        inputs = dict.fromkeys(("in[input_ids]", "in[position_ids]", "in[logits_to_keep]"), TOKENS)
        self.tap_dims = inputs | {"out[logits]": "t v # tp:replicated"}
        self.tap_rows = {"in[logits_to_keep]": "logits", "out[logits]": "logits"}

    @property
    def decoder(self) -> Any:
        """The decoder, or the module that contains it: token ids -> :class:`ModelOutput`."""
        return getattr(self, self.decoder_name)

    def routed_experts(self) -> Tensor | None:
        """Return the expert ids of the last step's rows, [layers, tokens, k]; None for a dense model."""
        return None

    def replay_experts(self, ids: Tensor | None) -> None:
        """Use the experts ``ids`` [tokens, layers, k] in the next step. Only for models with experts."""
        assert ids is None, "a dense model has no experts"

    def cache_layout(self, layer: int) -> CacheLayout:
        """Return the number of KV heads and features that this rank caches per position in ``layer``."""
        config = self.config.of_layer(layer)
        first, end = HeadShards.of(config.num_heads, config.num_kv_heads, self.tp).used
        return CacheLayout(kv_heads=end - first, key_dim=config.head_dim, value_dim=config.head_dim)

    def cache_layouts(self, layer: int) -> dict[CacheEntry, CacheLayout]:
        """Return the layouts of all cache entries that this rank stores per position in ``layer``."""
        return {layer: self.cache_layout(layer)}

    def state_units(self) -> Shard:
        """Return this rank's shard of the units by which a recurrent state is split.

        Only for models with recurrent layers.
        """
        raise NotImplementedError(f"{type(self).__name__} has no recurrent state")

    def state_shapes(self, units: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Return the shapes of a request's convolution window and recurrent matrix in one layer with ``units``
        units.
        """
        raise NotImplementedError(f"{type(self).__name__} has no recurrent state")

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, past_key_values: StepCache, logits_to_keep: Tensor | None = None
    ) -> CausalLMOutput:
        """Map token ids and positions, [tokens] int64 each, to the logits of rows ``logits_to_keep``.

        ``logits_to_keep`` is int64; None selects all rows.
        """
        decoder = self.decoder if self.decoder_graph is None else self.decoder_graph
        outputs = decoder(input_ids, position_ids=position_ids, past_key_values=past_key_values)
        hidden_states = outputs.last_hidden_state
        return CausalLMOutput(self.head(hidden_states, logits_to_keep))

    def head(self, hidden_states: Tensor, logits_to_keep: Tensor | None = None) -> Tensor:
        """Map last hidden states [tokens, hidden] to the logits of rows ``logits_to_keep`` (None: all rows)."""
        self.last_hidden_state = hidden_states
        if logits_to_keep is not None:
            hidden_states = hidden_states[logits_to_keep]
        return self.scaled_logits(self.tp.all_gather(self.lm_head(hidden_states), self.config.vocab_size))

    def scaled_logits(self, logits: Tensor) -> Tensor:
        """Apply the model's logits divisor and soft-cap to outputs of ``lm_head``."""
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        cap = self.config.final_softcap
        return logits if cap is None else (logits / cap).tanh() * cap
