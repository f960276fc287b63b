"""A mixture of experts in Megatron-core on EP ranks, captured forward and backward: ``python megatron_moe.py EP RUN``.

Each rank of a two-rank job computes one sequence of the batch that a single-rank job computes as a whole. Weights
depend only on their names. A third argument ``bug`` scales a weight of expert 3 in layer 1 by 1.1. The weights are also
saved as a distributed checkpoint, ``RUN-saved``.
"""

import os
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import silu

EXPERTS = 4
CULPRIT = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2"
_PLAIN = (
    "masked_softmax_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "moe_grouped_gemm",
    "add_bias_linear",
)


def build(ep: int) -> Any:
    """Build the model of this rank, with two layers of four experts."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe_utils.te_general_gemm = None  # without Transformer Engine the name is undefined
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 96}
    experts = {"num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
    routing = {"moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none"}
    config = TransformerConfig(
        **shape,
        **experts,
        **routing,
        **dict.fromkeys(_PLAIN, False),
        expert_model_parallel_size=ep,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm")
    sizes = {"vocab_size": 128, "max_sequence_length": 64}
    return GPTModel(config, spec, **sizes, position_embedding_type="rope", parallel_output=False)


def fill(model: Any, first_expert: int, *, is_bugged: bool) -> None:
    """Fill the weights depending on their names, with experts numbered over all ranks."""
    with torch.no_grad():
        for local, weight in model.named_parameters():
            name = re.sub(r"local_experts\.(\d+)", lambda found: f"local_experts.{int(found[1]) + first_expert}", local)
            if weight.ndim > 1:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
            if is_bugged and name == f"{CULPRIT}.weight":
                weight.mul_(1.1)


def work(rank: int, ep: int, out: str, is_bugged: bool, store: str) -> None:
    """Run one rank."""
    from save_megatron import save_distributed, save_to

    from tapscope.dumper import Dumper

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ep)
    model = build(ep)
    fill(model, rank * EXPERTS // ep, is_bugged=is_bugged)
    save_distributed(Path(f"{out}-saved"), model)
    save_to(Path(f"{out}-ranks"), model)
    ids = torch.stack([torch.arange(12) * 7 % 128, torch.arange(12) * 5 % 128 + 1])
    ids = ids[rank : rank + 1] if ep > 1 else ids
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    with Dumper(model, out, keep="full", grads=True, params=True):
        model(ids, torch.arange(12)[None].expand(len(ids), -1), mask).float().pow(2).sum().backward()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", "0")
    size, run = int(sys.argv[1]), sys.argv[2]
    mp.spawn(work, (size, run, len(sys.argv) > 3, f"{Path(run).absolute()}.store"), nprocs=size)  # type: ignore[no-untyped-call]
