"""A Llama with vLLM's module tree in plain torch, for one rank.

Class names, argument names and return values are those of vllm/model_executor (models/llama.py, layers/linear.py,
layernorm.py, activation.py, rotary_embedding): packed tokens ``[t, h]``, fused qkv and gate_up, linear layers that
return (output, bias), norms that add the residual and return both, ``SiluAndMul`` that multiplies. Contains no tests.
"""

from typing import Any

import torch
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor | None]


class VocabParallelEmbedding(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, input_: Tensor) -> Tensor:
        return nn.functional.embedding(input_, self.weight)


class ParallelLMHead(VocabParallelEmbedding):
    def forward(self, input_: Tensor) -> Tensor:
        raise RuntimeError("LMHead's weights should be used in the sampler.")


class ColumnParallelLinear(nn.Module):
    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, input_: Tensor) -> Pair:
        return nn.functional.linear(input_, self.weight), None


class QKVParallelLinear(ColumnParallelLinear):
    pass


class MergedColumnParallelLinear(ColumnParallelLinear):
    pass


class RowParallelLinear(ColumnParallelLinear):
    pass


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.empty(width)), eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        wide = x.float()
        if residual is not None:
            wide = wide + residual.float()
            residual = wide.to(x.dtype)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        out = normed.to(x.dtype) * self.weight
        return out if residual is None else (out, residual)


class SiluAndMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return nn.functional.silu(x[..., :half]) * x[..., half:]


class RotaryEmbedding(nn.Module):
    def __init__(self, dim: int, base: float) -> None:
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        inverse = self.base ** (-torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        angles = positions[:, None].float() * inverse
        cos, sin = angles.cos()[:, None].to(query.dtype), angles.sin()[:, None].to(query.dtype)

        def rotate(packed: Tensor) -> Tensor:
            one, two = packed.view(len(packed), -1, self.dim).chunk(2, -1)
            return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).flatten(1)

        return rotate(query), rotate(key)


class Attention(nn.Module):
    def __init__(self, dim: int, groups: int) -> None:
        super().__init__()
        self.dim, self.groups = dim, groups

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (each.view(len(each), -1, self.dim).transpose(0, 1) for each in (query, key, value))
        k, v = (each.repeat_interleave(self.groups, 0) for each in (k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


class LlamaAttention(nn.Module):
    def __init__(self, config: Any, rotary: nn.Module) -> None:
        super().__init__()
        heads, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.sizes = [heads * dim, kv * dim, kv * dim]
        self.qkv_proj = QKVParallelLinear(config.hidden_size, sum(self.sizes))
        self.o_proj = RowParallelLinear(heads * dim, config.hidden_size)
        self.rotary_emb = rotary
        self.attn = Attention(dim, heads // kv)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(hidden_states)[0].split(self.sizes, -1)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))[0]


class LlamaMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size)
        self.act_fn = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: Any, rotary: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(config, rotary), LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class LlamaModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        rotary = RotaryEmbedding(config.head_dim, config.rope_parameters["rope_theta"])
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, rotary) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return self.norm(hidden_states, residual)[0]


class LogitsProcessor(nn.Module):
    def forward(self, lm_head: nn.Module, hidden_states: Tensor) -> Tensor:
        return nn.functional.linear(hidden_states, lm_head.weight)


class VllmLlama(nn.Module):
    """vLLM's LlamaForCausalLM."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = LlamaModel(config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.logits_processor = LogitsProcessor()

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.logits_processor(self.lm_head, hidden_states)

    def load(self, weights: dict[str, Tensor]) -> "VllmLlama":
        """Load the state dict of a transformers Llama."""
        fused = dict(weights)
        for i in range(len(self.model.layers)):
            for whole, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
                holder = f"model.layers.{i}.{whole.partition('.')[0]}"
                pieces = [fused.pop(f"{holder}.{part}_proj.weight") for part in parts]
                fused[f"model.layers.{i}.{whole}_proj.weight"] = torch.cat(pieces)
        self.load_state_dict(fused)
        return self.eval()
