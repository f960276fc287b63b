"""Models of the floor sweep: random architectures of six families, with weights that look trained.

A freshly initialized model hides both faults and rounding (activations near 0, flat attention). Weights therefore get
properties of trained ones: unequal rows, a few dominant directions, outlier channels in the norms, significant biases,
and attention logits with some spread.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCAB = 256
FAMILIES = ("llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "gemma2")


def make_model(seed: int, family: str | None = None) -> tuple[str, nn.Module]:
    """Return (description, model) for a seed, which determines family, depth 2-16, hidden size 64-1024, heads and
    activation."""
    rng = random.Random(seed)
    family = family or FAMILIES[seed % len(FAMILIES)]
    depth = rng.choice((2, 3, 4, 6, 8, 12, 16))
    hidden = rng.choice((64, 128, 256, 512) if depth > 4 else (64, 128, 256, 512, 1024))
    heads = rng.choice([n for n in (2, 4, 8, 16) if hidden // n >= 16])
    torch.manual_seed(seed)
    model = _FAMILY[family](rng, depth, hidden, heads).eval()
    train_like(model, rng, depth)
    return f"{family} {depth}x{hidden}/{heads} seed {seed}", model


def _decoder(kind: str, **fixed: Any) -> Callable[[random.Random, int, int, int], nn.Module]:
    def build(rng: random.Random, depth: int, hidden: int, heads: int) -> nn.Module:
        import transformers

        settings: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": hidden,
            "intermediate_size": rng.choice((2, 3, 4)) * hidden,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "num_key_value_heads": rng.choice([n for n in (1, 2, 4, heads) if heads % n == 0]),
            "head_dim": hidden // heads,
            "max_position_embeddings": 512,
            "rms_norm_eps": rng.choice((1e-5, 1e-6)),
            "tie_word_embeddings": rng.random() < 0.3,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
        settings |= {"hidden_act": rng.choice(("silu", "gelu", "gelu_pytorch_tanh"))} if kind == "Llama" else {}
        config = getattr(transformers, f"{kind}Config")(**(settings | fixed))
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
        return model

    return build


def _gpt2(rng: random.Random, depth: int, hidden: int, heads: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    act = rng.choice(("gelu_new", "gelu"))
    sizes = {"n_embd": hidden, "n_layer": depth, "n_head": heads, "n_positions": 256}
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, activation_function=act, **sizes, **ids))


def _gpt_neox(rng: random.Random, depth: int, hidden: int, heads: int) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": hidden, "num_hidden_layers": depth, "num_attention_heads": heads}
    more = {"intermediate_size": 4 * hidden, "use_parallel_residual": rng.random() < 0.5}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, **sizes, **more))


_FAMILY = {
    "llama": _decoder("Llama"),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3"),
    "gemma2": _decoder("Gemma2", sliding_window=16),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}


def train_like(model: nn.Module, rng: random.Random, depth: int) -> None:
    """Replace every parameter by one with the properties of trained weights."""
    sharp = rng.choice((0.7, 1.0, 1.5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.copy_(_matrix(name, parameter, rng, depth, sharp))
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            else:
                _norm_weight(name, parameter, model)


def _matrix(name: str, weight: torch.Tensor, rng: random.Random, depth: int, sharp: float) -> torch.Tensor:
    if "embed" in name or "wte" in name or "wpe" in name:
        return torch.randn_like(weight) * 0.5 + 0.3 * torch.randn(weight.shape[1])
    fan_in = weight.shape[0] if any(part in name for part in ("c_attn", "c_fc", "c_proj")) else weight.shape[1]
    found = torch.randn_like(weight) / math.sqrt(fan_in) * torch.empty(weight.shape[0], 1).log_normal_(0.0, 0.3)
    rank, strength = rng.randint(1, 4), rng.choice((0.0, 0.5, 1.0))
    u, v = torch.randn(weight.shape[0], rank), torch.randn(rank, weight.shape[1])
    found += strength * u @ v / math.sqrt(rank * fan_in * weight.shape[0] / rank)
    if any(part in name for part in ("o_proj", "down_proj", "c_proj", "dense_4h_to_h", "attention.dense")):
        return found / math.sqrt(2.0 * depth)
    return found * sharp if any(part in name for part in ("q_proj", "k_proj", "c_attn", "query_key")) else found


def _norm_weight(name: str, weight: torch.Tensor, model: nn.Module) -> None:
    weight.log_normal_(0.0, 0.3)
    weight[torch.rand_like(weight) < 0.02] *= 5.0
    if type(model).__name__.startswith("Gemma"):
        weight -= 1.0  # Gemma norms multiply by 1 + weight
