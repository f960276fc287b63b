"""Build a Megatron-core GPTModel on CPU with the weights of a Hugging Face checkpoint.

Supports Llama, Qwen2 (QKV bias), Qwen3 (QK norm) and Qwen3-MoE. tapscope's Megatron plugin records the dims of the
model's tensors, so that runs with different rank layouts can be compared. megatron_team.py starts the ranks. Requires
megatron-core 0.16.1.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

Weights = dict[str, torch.Tensor]


def settings_of(checkpoint: Path) -> dict[str, Any]:
    """Return ``config.json`` completed with the defaults that the supported families share.

    Raises ValueError for an unsupported model type or RoPE type.
    """
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] not in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        raise ValueError(
            f"{checkpoint}: model_type {config['model_type']!r}: expected llama, qwen2, qwen3 or qwen3_moe"
        )
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)} | (
        config.get("rope_scaling") or {}
    )
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{checkpoint}: rope_type {rope['rope_type']} is not built here, only the default one")
    heads = config["num_attention_heads"]
    return config | {
        "rope_theta": rope["rope_theta"],
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "qkv_bias": config["model_type"] == "qwen2" or bool(config.get("attention_bias")),
        "qk_norm": config["model_type"].startswith("qwen3"),
        "num_experts": config.get("num_experts") or config.get("num_local_experts") or 0,
    }


def read_weights(checkpoint: Path) -> Weights:
    """Return every tensor of the checkpoint by its Hugging Face name, including ``lm_head.weight`` if it is tied."""
    from safetensors.torch import load_file

    weights: Weights = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        weights |= load_file(file)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    return weights


def build(checkpoint: Path, *, dtype: str = "float32", sequence_parallel: bool = False) -> nn.Module:
    """Build this rank's shard of the model and load its weights; ``parallel_state`` must be initialized.

    Raises ValueError if a weight has no parameter in the model.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    settings = settings_of(checkpoint)
    if settings["num_experts"]:
        from megatron.core.transformer.moe import moe_utils

        moe_utils.te_general_gemm = None  # undefined without Transformer Engine
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    # Megatron's rotary embedding takes its device from this function only.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    model: nn.Module = GPTModel(
        _config(settings, getattr(torch, dtype), sequence_parallel),
        _layer_spec(settings, sequence_parallel),
        vocab_size=settings["vocab_size"],
        max_sequence_length=settings["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=settings["rope_theta"],
        parallel_output=False,
        pre_process=first,
        post_process=last,
    )
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    parts = on_this_rank(shards(settings, read_weights(checkpoint), tp, rank), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parts.pop(name))
    if parts:
        raise ValueError(f"{checkpoint}: no place in the model for {', '.join(sorted(parts))}")
    return model


def _config(settings: dict[str, Any], dtype: torch.dtype, sequence_parallel: bool) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    experts = {
        "num_moe_experts": settings["num_experts"],
        "moe_router_topk": settings.get("num_experts_per_tok"),
        "moe_ffn_hidden_size": settings.get("moe_intermediate_size"),
        "moe_token_dispatcher_type": "allgather",  # the all-to-all dispatcher needs CUDA streams
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }
    fused = ("masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion")
    return TransformerConfig(
        num_layers=settings["num_hidden_layers"],
        hidden_size=settings["hidden_size"],
        ffn_hidden_size=settings["intermediate_size"],
        num_attention_heads=settings["num_attention_heads"],
        num_query_groups=settings["num_key_value_heads"],
        kv_channels=settings["head_dim"],
        layernorm_epsilon=settings["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=settings["qkv_bias"],
        qk_layernorm=settings["qk_norm"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        calculate_per_token_loss=True,  # gradients are summed over the data-parallel ranks, not averaged
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **(experts if settings["num_experts"] else {}),
        **dict.fromkeys(fused, False),
    )


class RMSNorm(nn.Module):
    """RMSNorm whose weight is marked for sequence parallelism, which Megatron's own torch norm does not support."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype)), eps
        self.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize ``x`` [s, b, h] over its last axis."""
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _layer_spec(settings: dict[str, Any], sequence_parallel: bool) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    spec = get_gpt_layer_local_spec(
        num_experts=settings["num_experts"] or None,
        moe_grouped_gemm=False,
        normalization="RMSNorm",
        qk_layernorm=settings["qk_norm"],
    )
    if parallel_state.get_context_parallel_world_size() > 1:
        from megatron_ring import RingAttention

        spec.submodules.self_attention.submodules.core_attention = RingAttention
    if not sequence_parallel:
        return spec
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    layers = [spec] * settings["num_hidden_layers"]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def shards(settings: dict[str, Any], weights: Weights, tp: int, rank: int) -> Weights:
    """Return this rank's tensor-parallel shard of every weight, by Megatron parameter name.

    ``linear_qkv`` orders its rows by query group, [q heads of g | k of g | v of g]; ``linear_fc1`` is [gate; up] on
    every rank. ``linear_proj`` and ``linear_fc2`` are split by columns, the embedding and the head by rows
    (vocabulary).
    """

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(tp, dim=0)[rank]

    weights_of_rank = {
        "embedding.word_embeddings.weight": rows(weights["model.embed_tokens.weight"]),
        "output_layer.weight": rows(weights["lm_head.weight"]),
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    for layer in range(settings["num_hidden_layers"]):
        hf, mine = f"model.layers.{layer}", f"decoder.layers.{layer}"
        for kind in ("weight", "bias") if settings["qkv_bias"] else ("weight",):
            q, k, v = (weights[f"{hf}.self_attn.{name}_proj.{kind}"] for name in "qkv")
            weights_of_rank[f"{mine}.self_attention.linear_qkv.{kind}"] = rows(
                grouped(q, k, v, settings["num_key_value_heads"])
            )
        for name in ("q", "k") if settings["qk_norm"] else ():
            weights_of_rank[f"{mine}.self_attention.{name}_layernorm.weight"] = weights[
                f"{hf}.self_attn.{name}_norm.weight"
            ]
        weights_of_rank[f"{mine}.self_attention.linear_proj.weight"] = weights[f"{hf}.self_attn.o_proj.weight"].chunk(
            tp, dim=1
        )[rank]
        mlps = {f"{hf}.mlp": f"{mine}.mlp"}
        if settings["num_experts"]:
            weights_of_rank[f"{mine}.mlp.router.weight"] = weights[f"{hf}.mlp.gate.weight"]
            numbers = range(settings["num_experts"])
            mlps = {f"{hf}.mlp.experts.{i}": f"{mine}.mlp.experts.local_experts.{i}" for i in numbers}
        for theirs, ours in mlps.items():
            gate, up = (weights[f"{theirs}.{name}_proj.weight"] for name in ("gate", "up"))
            weights_of_rank[f"{ours}.linear_fc1.weight"] = torch.cat([rows(gate), rows(up)])
            weights_of_rank[f"{ours}.linear_fc2.weight"] = weights[f"{theirs}.down_proj.weight"].chunk(tp, dim=1)[rank]
        weights_of_rank[f"{mine}.input_layernorm.weight"] = weights[f"{hf}.input_layernorm.weight"]
        weights_of_rank[f"{mine}.pre_mlp_layernorm.weight"] = weights[f"{hf}.post_attention_layernorm.weight"]
    return weights_of_rank


def on_this_rank(weights: Weights, settings: dict[str, Any]) -> Weights:
    """Select the weights of this rank's pipeline stage and experts, renamed to local layer and expert numbers."""
    from megatron.core import parallel_state as state

    stages, ep = state.get_pipeline_model_parallel_world_size(), state.get_expert_model_parallel_world_size()
    stage, ep_rank = state.get_pipeline_model_parallel_rank(), state.get_expert_model_parallel_rank()
    own: Weights = {}
    for name, tensor in weights.items():
        layer, expert = re.search(r"decoder\.layers\.(\d+)", name), re.search(r"local_experts\.(\d+)", name)
        home, local = (stages - 1 if name.startswith(("output_layer", "decoder.final")) else 0), name
        if layer:
            home, number = divmod(int(layer[1]), settings["num_hidden_layers"] // stages)
            local = local.replace(layer[0], f"decoder.layers.{number}")
        ep_home = ep_rank
        if expert:
            ep_home, number = divmod(int(expert[1]), settings["num_experts"] // ep)
            local = local.replace(expert[0], f"local_experts.{number}")
        if (home, ep_home) == (stage, ep_rank):
            own[local] = tensor
    return own


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """Concatenate along the first axis by query group: [q_0 | k_0 | v_0 | q_1 | k_1 | v_1 | ...]."""
    parts = [each.unflatten(0, (groups, -1)) for each in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)
