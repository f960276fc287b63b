"""EAGLE and EAGLE-3 draft heads built from Llama layers, with the tensor names of their published checkpoints.

EAGLE (arXiv:2401.15077) reads the target's last hidden state, EAGLE-3 (arXiv:2503.01840) the states of three layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.embedding import VocabHead
from tapscope.engine.layers.linear import FusedLinear, ReplicatedLinear
from tapscope.engine.layers.norm import RMSNorm, add_norm
from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import CausalLM, DecoderLayer, Rotation
from tapscope.engine.models.draft_head import DraftHead, SharedModule
from tapscope.engine.models.mlp import GatedMLP


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3Layout:
    """Properties of an EAGLE-3 checkpoint that ModelConfig does not cover."""

    has_fc_bias: bool
    token_ids: Tensor | None
    """[draft vocab] int64: target token ids of the draft vocabulary; None if the head predicts all tokens."""
    aux_layers: tuple[int, ...]
    """Target layers whose inputs the head reads; the number of layers selects the last layer's output."""


class EagleDecoderLayer(DecoderLayer):
    """A Llama layer without a norm before attention."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        del self.input_layernorm

    def forward(
        self,
        hidden_states: Tensor,
        position_ids: Tensor,
        past_key_values: StepCache,
        position_embeddings: Rotation,
    ) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        attended, _ = self.self_attn(
            hidden_states=hidden_states, position_embeddings=position_embeddings, past_key_values=past_key_values
        )
        normalised, residual = add_norm(self.post_attention_layernorm, attended, hidden_states)
        output: Tensor = residual + self.mlp(normalised)
        return output


class EagleModel(DraftHead):
    """EAGLE head: one projection and the layers, without a final norm or an output head of its own."""

    skipped_prefixes = ("embed_tokens.", "lm_head.")

    def __init__(self, config: ModelConfig, target: CausalLM, dtype: torch.dtype, *, has_fc_bias: bool) -> None:
        super().__init__(config, target)
        self.fc = ReplicatedLinear(2 * config.hidden_size, config.hidden_size, has_fc_bias, dtype)
        kinds = [EagleDecoderLayer] + [DecoderLayer] * (config.num_layers - 1)
        self.layers = nn.ModuleList(kind(config, i, target.tp, dtype) for i, kind in enumerate(kinds))
        self.lm_head: Any = SharedModule(target.lm_head)

    def compute(self, inputs_embeds: Tensor, hidden_states: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Run the head's layers, see :meth:`.DraftHead.compute`."""
        hidden_states = self.fc(torch.cat((inputs_embeds, hidden_states), dim=-1))
        for layer in self.layers:
            hidden_states = layer(hidden_states, **inputs)
        return hidden_states, hidden_states

    def output_head(self, hidden_states: Tensor) -> Tensor:
        """Compute logits with the target's output head."""
        return self.target_logits(self.lm_head, hidden_states)


class Eagle3Attention(SelfAttention):
    """Attention whose input is the concatenation of embedding and hidden state."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.qkv_proj = FusedLinear(2 * config.hidden_size, self.qkv_proj.parts, config.qkv_bias, dtype)


class Eagle3Layer(nn.Module):
    """The only layer of EAGLE-3; its residual is the hidden state without the embedding."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = Eagle3Attention(config, 0, tp, dtype)
        self.mlp = GatedMLP(config, config.intermediate_size, tp, dtype)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm = (RMSNorm(size, eps, dtype) for _ in range(2))
        self.post_attention_layernorm = RMSNorm(size, eps, dtype)
        self.tap_dims = {"in[input_emb]": WHOLE, "in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(
        self,
        input_emb: Tensor,
        hidden_states: Tensor,
        position_ids: Tensor,
        past_key_values: StepCache,
        position_embeddings: Rotation,
    ) -> Tensor:
        """Map embeddings and hidden states, [tokens, hidden] each, to [tokens, hidden]."""
        both = torch.cat((self.input_layernorm(input_emb), self.hidden_norm(hidden_states)), dim=-1)
        attended, _ = self.self_attn(
            hidden_states=both, position_embeddings=position_embeddings, past_key_values=past_key_values
        )
        normalised, residual = add_norm(self.post_attention_layernorm, attended, hidden_states)
        output: Tensor = residual + self.mlp(normalised)
        return output


class Eagle3Model(DraftHead):
    """EAGLE-3 head: reads the states of three layers and has its own output head.

    The output head often covers the most frequent tokens only.
    """

    skipped_prefixes = ("embed_tokens.", "d2t", "t2d")
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"layers.0.": "midlayer."}
    """Some published heads name the layer `layers.0`."""

    def __init__(self, config: ModelConfig, target: CausalLM, dtype: torch.dtype, layout: Eagle3Layout) -> None:
        super().__init__(config, target)
        size = config.hidden_size
        self.fc = ReplicatedLinear(len(layout.aux_layers) * size, size, layout.has_fc_bias, dtype)
        self.midlayer = Eagle3Layer(config, target.tp, dtype)
        self.norm = RMSNorm(size, config.rms_norm_eps, dtype)
        token_ids = layout.token_ids
        self.draft_vocab_size = config.vocab_size if token_ids is None else len(token_ids)
        self.lm_head = VocabHead(self.draft_vocab_size, size, target.tp, dtype, None)
        self._token_ids = None if token_ids is None else token_ids.to(self.rotary_emb.inv_freq.device)

    def read(self, hidden_states: Tensor) -> Tensor:
        """Project the concatenated states of the target's layers to [tokens, hidden]; own states are unchanged."""
        if hidden_states.shape[1] == self.config.hidden_size:
            return hidden_states
        output: Tensor = self.fc(hidden_states)
        return output

    def compute(self, inputs_embeds: Tensor, hidden_states: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Run the layer and the final norm, see :meth:`.DraftHead.compute`."""
        output = self.midlayer(inputs_embeds, self.read(hidden_states), **inputs)
        return self.norm(output), output

    def output_head(self, hidden_states: Tensor) -> Tensor:
        """Compute logits over the target's vocabulary; tokens outside the draft vocabulary get -inf."""
        logits = self.tp.all_gather(self.lm_head(hidden_states), self.draft_vocab_size)
        if self._token_ids is None:
            return logits
        whole = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, self._token_ids, logits)
