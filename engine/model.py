"""The Llama family with Hugging Face's module names: the module tree is the map of what can be tapped.

Tokens of all requests are packed, so hidden states are [tokens, hidden] where transformers has [batch, sequence,
hidden]. Differences from transformers' tree: `qkv_proj` and `gate_up_proj` run one GEMM whose views pass through
probes under the original names; `self_attn.attn` is the attention core; `o_proj.partial` and `down_proj.partial` are
the summands before the all-reduce; `sampler` shows the sampled tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tapscope.engine.attention import Attention
from tapscope.engine.cache import StepCache
from tapscope.engine.layers import (
    ANGLE_INPUTS,
    SHARD,
    TOKENS,
    WHOLE,
    FusedLinear,
    Probe,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabEmbedding,
    VocabHead,
)
from tapscope.engine.model_config import ModelConfig
from tapscope.engine.parallel import TensorParallel
from tapscope.errors import UsageError

TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Which tensor is which when the word embeddings are tied."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What :class:`LlamaModel` returns."""

    last_hidden_state: Tensor
    """[tokens, hidden], normalised."""


@dataclass(frozen=True, slots=True)
class CausalLMOutput:
    """What :class:`LlamaForCausalLM` returns."""

    logits: Tensor
    """[logit rows, vocab], whole on every rank."""


class LlamaForCausalLM(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        check_split(config, tp.size)
        self.config, self.tp = config, tp
        self.model = LlamaModel(config, tp, dtype)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = VocabHead(config.vocab_size, config.hidden_size, tp, dtype, tied)
        self.sampler = Probe(TOKENS, rows="logits")
        inputs = dict.fromkeys(("in[input_ids]", "in[position_ids]", "in[logits_to_keep]"), TOKENS)
        self.tap_dims = inputs | {"out[logits]": "t v # tp:replicated"}
        self.tap_rows = {"in[logits_to_keep]": "logits", "out[logits]": "logits"}

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, past_key_values: StepCache, logits_to_keep: Tensor | None = None
    ) -> CausalLMOutput:
        """Ids and positions [tokens] int64 -> logits of the rows ``logits_to_keep`` (int64), or of all of them."""
        outputs = self.model(input_ids, position_ids=position_ids, past_key_values=past_key_values)
        hidden_states = outputs.last_hidden_state
        if logits_to_keep is not None:
            hidden_states = hidden_states[logits_to_keep]
        logits = self.lm_head(hidden_states)
        return CausalLMOutput(self.tp.all_gather(logits, self.config.vocab_size))


class LlamaModel(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, tp, dtype)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i, tp, dtype) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.rotary_emb = RotaryEmbedding(config)
        self.tap_dims = {"in[input_ids]": TOKENS, "in[position_ids]": TOKENS, "out[last_hidden_state]": WHOLE}

    def forward(self, input_ids: Tensor, position_ids: Tensor, past_key_values: StepCache) -> ModelOutput:
        """Ids and positions [tokens] -> last hidden state [tokens, hidden]."""
        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                position_ids=position_ids,
                past_key_values=past_key_values,
                position_embeddings=position_embeddings,
            )
        return ModelOutput(self.norm(hidden_states))


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer, tp, dtype)
        self.mlp = LlamaMLP(config, tp, dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "in[position_ids]": TOKENS, "out": WHOLE} | ANGLE_INPUTS

    def forward(
        self,
        hidden_states: Tensor,
        position_ids: Tensor,
        past_key_values: StepCache,
        position_embeddings: tuple[Tensor, Tensor],
    ) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        residual = hidden_states
        hidden_states, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            past_key_values=past_key_values,
        )
        hidden_states = residual + hidden_states
        residual = hidden_states
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(hidden_states))
        return output


class LlamaAttention(nn.Module):
    """Grouped-query attention, arXiv:2305.13245, with this rank's share of the heads."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, config.attention_bias, tp, dtype)
        self.q_proj, self.k_proj, self.v_proj = Probe(SHARD), Probe(SHARD), Probe(SHARD)
        self.attn = Attention(layer)
        self.o_proj = RowParallelLinear(width, config.hidden_size, config.attention_bias, tp, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out[0]": WHOLE} | ANGLE_INPUTS

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], past_key_values: StepCache
    ) -> tuple[Tensor, None]:
        """[tokens, hidden] -> ([tokens, hidden], None); transformers returns attention weights second."""
        query, key, value = self.qkv_proj(hidden_states)
        cos, sin = position_embeddings
        query = rotate(self._heads(self.q_proj(query)), cos, sin)
        key = rotate(self._heads(self.k_proj(key)), cos, sin)
        value = self._heads(self.v_proj(value))
        return self.o_proj(self.attn(query, key, value, past_key_values)), None

    def _heads(self, tensor: Tensor) -> Tensor:
        return tensor.view(len(tensor), -1, self.head_dim)


class LlamaMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), arXiv:2002.05202, with this rank's share of the intermediate features."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.intermediate_size
        parts = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, config.mlp_bias, tp, dtype)
        self.gate_proj, self.up_proj = Probe(SHARD), Probe(SHARD)
        self.act_fn = SiLU()
        self.down_proj = RowParallelLinear(size, config.hidden_size, config.mlp_bias, tp, dtype)
        self.tap_dims = {"in[x]": WHOLE, "out": WHOLE}

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate, up = self.gate_up_proj(x)
        output: Tensor = self.down_proj(self.act_fn(self.gate_proj(gate)) * self.up_proj(up))
        return output


class SiLU(nn.SiLU):
    """x * sigmoid(x) on this rank's features."""

    tap_dims: dict[str, str] = {"in[input]": SHARD, "out": SHARD}  # noqa: RUF012  (read-only by contract)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [tokens, heads, head_dim] by cos and sin [tokens, head_dim], first half against second."""
    first, second = states.chunk(2, dim=-1)
    return states * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


def check_split(config: ModelConfig, tp: int) -> None:
    """Raise UsageError when ``tp`` ranks cannot share the heads and features evenly; the vocabulary may be uneven."""
    for name, count in (("key/value heads", config.num_kv_heads), ("intermediate features", config.intermediate_size)):
        if count % tp:
            raise UsageError(f"tp={tp} does not divide the model's {count} {name}; use a divisor of {count}")
