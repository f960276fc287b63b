"""Routers and experts select and compute the same as transformers' modules, however they are sharded over ranks."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.moe_config import MoeConfig
from tapscope.engine.layers.experts import Experts, excluding_padding
from tapscope.engine.layers.routers import DeepseekV2Router, DeepseekV3Router, Qwen3MoeRouter, Router, TopKRouter


def fill(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)


def rank_of(rank: int, size: int, ep: int) -> TensorParallel:
    tp = TensorParallel(rank, size)
    tp.ep = ep
    return tp


@torch.no_grad()
def share_of(whole: nn.Module, moe: MoeConfig, tp: TensorParallel, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Return one rank's partial sum, with weights sliced from transformers' stacked parameters."""
    experts = Experts(moe, x.shape[1], "silu", tp, x.dtype)
    for piece in list(experts.layouts("layers.0.mlp.experts"))[-1]:
        matrix = getattr(whole, piece.name.rpartition(".")[2])[piece.index]
        assert tuple(whole.get_parameter(piece.name.rpartition(".")[2]).shape) == piece.shape
        piece.into.copy_(matrix.narrow(piece.dim, piece.start, piece.into.shape[piece.dim]))
    return experts(x, ids, w)


@settings(max_examples=60)
@given(
    num_experts=st.integers(1, 9),
    top_k=st.integers(1, 9),
    num_tokens=st.integers(1, 12),
    hidden=st.sampled_from([8, 12, 7]),
    features=st.sampled_from([16, 6, 5]),
    ranks=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (6, 3), (4, 4)]),
    seed=st.integers(0, 99),
)
@torch.no_grad()
def test_experts_partial_sums_equal_transformers(
    num_experts: int, top_k: int, num_tokens: int, hidden: int, features: int, ranks: tuple[int, int], seed: int
) -> None:
    top_k = min(top_k, num_experts)
    config = MixtralConfig(num_local_experts=num_experts, hidden_size=hidden, intermediate_size=features)
    config._experts_implementation = "eager"
    whole = MixtralExperts(config)
    fill(whole, seed)
    x = torch.randn(num_tokens, hidden)
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, top_k)
    moe = MoeConfig(num_experts=num_experts, top_k=top_k, intermediate_size=features)
    size, ep = ranks
    shares = [share_of(whole, moe, rank_of(rank, size, ep), x, ids, weights) for rank in range(size)]
    torch.testing.assert_close(sum(shares), whole(x, ids, weights), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("size", "ep"), [(1, 1), (2, 1), (4, 2)])
@torch.no_grad()
def test_padding_rows_change_no_pair_of_a_token(size: int, ep: int) -> None:
    """On every rank, the pairs of 5 tokens are the first pairs of 8 rows; the 3 padding rows have no output."""
    torch.manual_seed(0)
    moe = MoeConfig(num_experts=6, top_k=2, intermediate_size=6)
    x, ids, weights = torch.randn(8, 8), torch.randint(6, (8, 2)), torch.rand(8, 2)
    for rank in range(size):
        experts = Experts(moe, 8, "silu", rank_of(rank, size, ep), torch.float32)
        fill(experts, rank)
        seen: list[Tensor] = []
        experts.act_fn.register_forward_hook(lambda module, args, output, seen=seen: seen.append(args[0]))
        plain = experts(x[:5], ids[:5], weights[:5])
        with excluding_padding((torch.arange(8) >= 5)[:, None], [experts]):
            padded = experts(x, ids, weights)
        torch.testing.assert_close(padded[:5], plain)
        assert not padded[5:].any()
        torch.testing.assert_close(seen[1][:10], seen[0])
        assert not torch.equal(experts(x, ids, weights)[5:], padded[5:])


def test_expert_shard_splits_experts_and_features() -> None:
    moe = MoeConfig(num_experts=5, top_k=2, intermediate_size=6)
    shares = [Experts(moe, 8, "silu", rank_of(rank, 4, 2), torch.float32).shard for rank in range(4)]
    assert [(shard.experts, shard.features) for shard in shares] == [
        ((0, 3), (0, 3)),
        ((0, 3), (3, 6)),
        ((3, 5), (0, 3)),
        ((3, 5), (3, 6)),
    ]


ROUTERS: dict[str, tuple[Any, type[nn.Module], type[Router], dict[str, Any]]] = {
    "mixtral": (MixtralConfig(num_local_experts=12, num_experts_per_tok=2), MixtralTopKRouter, TopKRouter, {}),
    "qwen3-moe": (Qwen3MoeConfig(num_experts=12, norm_topk_prob=True), Qwen3MoeTopKRouter, Qwen3MoeRouter, {}),
    "qwen3-moe-raw": (
        Qwen3MoeConfig(num_experts=12, num_experts_per_tok=1),
        Qwen3MoeTopKRouter,
        Qwen3MoeRouter,
        {"is_normalized": False},
    ),
    "v2-greedy": (
        DeepseekV2Config(n_routed_experts=12, num_experts_per_tok=3, routed_scaling_factor=1.5),
        DeepseekV2TopkRouter,
        DeepseekV2Router,
        {"scale": 1.5},
    ),
    "v2-groups": (
        DeepseekV2Config(
            n_routed_experts=12, num_experts_per_tok=3, topk_method="group_limited_greedy", n_group=4, topk_group=2
        ),
        DeepseekV2TopkRouter,
        DeepseekV2Router,
        {"num_groups": 4, "top_groups": 2},
    ),
    "v3": (
        DeepseekV3Config(n_routed_experts=12, num_experts_per_tok=4, n_group=3, topk_group=2),
        DeepseekV3TopkRouter,
        DeepseekV3Router,
        {"num_groups": 3, "top_groups": 2, "scale": 2.5},
    ),
    "v3-one-group": (
        DeepseekV3Config(n_routed_experts=12, num_experts_per_tok=4, n_group=1, topk_group=1, norm_topk_prob=False),
        DeepseekV3TopkRouter,
        DeepseekV3Router,
        {"is_normalized": False, "scale": 2.5},
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_routers_equal_transformers(name: str, dtype: torch.dtype) -> None:
    config, reference, ours, given_fields = ROUTERS[name]
    config.hidden_size = 16
    expected_router = reference(config).to(dtype)
    fill(expected_router, 5)
    if hasattr(expected_router, "e_score_correction_bias"):
        expected_router.e_score_correction_bias = expected_router.e_score_correction_bias.float()
    moe = MoeConfig(
        num_experts=12,
        top_k=config.num_experts_per_tok,
        intermediate_size=8,
        **({"is_normalized": True} | given_fields),
    )
    router = ours(moe, 16, dtype)
    router.load_state_dict(expected_router.state_dict())
    x = torch.randn(200, 16, dtype=dtype)
    for actual, expected in zip(router(x), expected_router(x), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    assert torch.equal(router.chosen, expected_router(x)[2])
