"""transformers: `tp_plan` and FSDP2 on two ranks against one process, PEFT against merged weights, a Qwen2.5-VL."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.frameworks.pair import CLEAN, Pair, Suite

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
IDS = torch.stack([torch.arange(12) * 7 % 128, torch.arange(12) * 5 % 128 + 1])
Bug = Callable[[Any], None]


def weights(model: nn.Module, path: str) -> torch.Tensor:
    """Return the weight of a module; for a DTensor the local shard."""
    weight: Any = model.get_submodule(path).weight.data
    local: torch.Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    return local


def scaled(path: str, factor: float = 1.2, rank: int | None = None) -> Bug:
    """Return a bug that multiplies the weight of a module by ``factor``, on one rank or on all."""

    def bug(model: Any) -> None:
        if rank is None or dist.get_rank() == rank:
            weights(model, path).mul_(factor)

    return bug


def swapped(one: str, two: str) -> Bug:
    """Return a bug that swaps the weights of two modules."""

    def bug(model: Any) -> None:
        kept = weights(model, one).clone()
        weights(model, one).copy_(weights(model, two))
        weights(model, two).copy_(kept)

    return bug


def gradient_scaled(path: str) -> Bug:
    """Return a bug that scales the input gradient of a module by 0.9."""

    def bug(model: Any) -> None:
        model.get_submodule(path).register_full_backward_hook(lambda module, into, out: (into[0] * 0.9,))

    return bug


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.1, attn_implementation="eager")).eval()


def train_step(model: Any, out: Path, ids: torch.Tensor) -> None:
    """Run forward and backward of the cross-entropy, divided by the number of tokens of all ranks."""
    from tapscope import Dumper

    with Dumper(model, out, keep="full", grads=True, params=True) as dumper, dumper.step(phase="train"):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        total = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        (total / IDS[:, 1:].numel()).backward()


LAYER = "model.layers.1"
PLANNED: dict[str, tuple[str, Bug | None]] = {
    CLEAN: ("", None),
    "stale q_proj on rank 1": (f"{LAYER}.self_attn.q_proj", scaled(f"{LAYER}.self_attn.q_proj", rank=1)),
    "gate and up swapped": (f"{LAYER}.mlp.gate_proj", swapped(f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj")),
    "stale norm on rank 0": (f"{LAYER}.input_layernorm", scaled(f"{LAYER}.input_layernorm", rank=0)),
}
SHARDED: dict[str, tuple[str, Bug | None]] = {
    CLEAN: ("", None),
    "stale shard of down_proj on rank 1": (f"{LAYER}.mlp.down_proj", scaled(f"{LAYER}.mlp.down_proj", rank=1)),
    "keys and values swapped": (
        f"{LAYER}.self_attn.k_proj",
        swapped(f"{LAYER}.self_attn.k_proj", f"{LAYER}.self_attn.v_proj"),
    ),
    "gradient of o_proj scaled": (f"{LAYER}.self_attn.o_proj", gradient_scaled(f"{LAYER}.self_attn.o_proj")),
}


def rank_of_tp_plan(rank: int, folder: str, dtypes: Sequence[str]) -> None:
    """Record the runs of all pairs on one of two ranks."""
    from transformers import LlamaForCausalLM

    join(rank, folder)
    for dtype in dtypes:
        for name, (_, bug) in PLANNED.items():
            model = LlamaForCausalLM.from_pretrained(
                f"{folder}/checkpoint", tp_plan="auto", dtype=getattr(torch, dtype), attn_implementation="eager"
            ).eval()
            if bug is not None:
                bug(model)
            train_step(model, Path(folder, f"tp_plan-{dtype}-{name}".replace(" ", "-")), IDS)
    dist.destroy_process_group()


def rank_of_fsdp(rank: int, folder: str, dtypes: Sequence[str]) -> None:
    """Record the runs of all pairs on one of two ranks; each rank has its own sequence."""
    from torch.distributed.fsdp import fully_shard

    join(rank, folder)
    for dtype in dtypes:
        for name, (_, bug) in SHARDED.items():
            model = llama().to(getattr(torch, dtype))
            for module in [*model.model.layers, model]:
                fully_shard(module).set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of all ranks
                module.set_force_sum_reduction_for_comms(True)  # gloo lacks the alternative reduction
            if bug is not None:
                bug(model)
            train_step(model, Path(folder, f"fsdp2-{dtype}-{name}".replace(" ", "-")), IDS[rank : rank + 1])
    dist.destroy_process_group()


def join(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)


def distributed(
    kind: str, run: Callable[..., None], bugs: dict[str, tuple[str, Bug | None]], folder: Path, dtypes: Sequence[str]
) -> Iterator[Pair]:
    folder = folder / kind
    folder.mkdir(parents=True)
    model = llama()
    model.save_pretrained(folder / "checkpoint")
    train_step(model, folder / "one-process", IDS)
    torch.multiprocessing.spawn(run, (str(folder), dtypes), nprocs=2)  # type: ignore[no-untyped-call]
    for dtype in dtypes:
        for name, (culprit, _) in bugs.items():
            target = folder / f"{kind}-{dtype}-{name}".replace(" ", "-")
            yield Pair(
                suite=f"transformers {kind}",
                dtype=dtype,
                bug=name,
                culprit=culprit,
                baseline=folder / "one-process",
                target=target,
            )


def generate(model: Any, out: Path) -> None:
    """Generate from two left-padded prompts."""
    from tapscope import Dumper

    ids = torch.tensor([[0, 0, 3, 4, 5], [6, 7, 8, 9, 10]])
    mask = (torch.arange(5) >= torch.tensor([[2], [0]])).long()
    with torch.no_grad(), Dumper(model, out, keep="full"):
        model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0
        )


def adapted() -> Any:
    """Return a model with a LoRA adapter on q_proj and down_proj."""
    import peft

    model = llama()
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def merged(*, skip: str = "", factor: float = 1.0, at: str = "", twice: str = "") -> Any:
    """Return the merged model: not merged at ``skip``, scaled by ``factor`` at ``at``, merged twice at ``twice``."""
    model = adapted()
    delta = {
        name: module.get_delta_weight("default")
        for name, module in model.base_model.model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    whole = model.merge_and_unload()
    for name, share in ((skip, -1.0), (at, factor - 1.0), (twice, 1.0)):
        if name:
            whole.get_submodule(name).weight.data += share * delta[name]
    return whole


MERGES: dict[str, tuple[str, dict[str, Any]]] = {
    CLEAN: ("", {}),
    "down_proj not merged": (f"{LAYER}.mlp.down_proj", {"skip": f"{LAYER}.mlp.down_proj"}),
    "alpha of q_proj ignored": (f"{LAYER}.self_attn.q_proj", {"at": f"{LAYER}.self_attn.q_proj", "factor": 0.5}),
    "q_proj merged twice": ("model.layers.2.self_attn.q_proj", {"twice": "model.layers.2.self_attn.q_proj"}),
}


def adapters(folder: Path, dtypes: Sequence[str]) -> Iterator[Pair]:
    generate(adapted(), baseline := folder / "peft")
    for dtype in dtypes:
        for name, (culprit, how) in MERGES.items():
            target = folder / f"merged-{dtype}-{name}".replace(" ", "-")
            generate(merged(**how).to(getattr(torch, dtype)), target)
            yield Pair(
                suite="PEFT against merged",
                dtype=dtype,
                bug=name,
                culprit=culprit and f"base_model.model.{culprit}",
                baseline=baseline,
                target=target,
            )


TEXT = SIZES | {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 32,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
PICTURES: dict[str, tuple[str, Bug | None]] = {
    CLEAN: ("", None),
    "image channels flipped": (":in[pixel_values]", None),
    "vision block scaled": ("model.visual.blocks.1.mlp.down_proj", scaled("model.visual.blocks.1.mlp.down_proj")),
    "merger scaled": ("model.visual.merger.mlp.2", scaled("model.visual.merger.mlp.2")),
}


def see(out: Path, dtype: str, name: str) -> None:
    """Run a tiny Qwen2.5-VL on an image of 8 x 8 patches."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from tapscope import Dumper

    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, image_token_id=55, vision_start_token_id=57)
    model = Qwen2_5_VLForConditionalGeneration(config).eval().to(getattr(torch, dtype))
    if (bug := PICTURES[name][1]) is not None:
        bug(model)
    image = torch.rand(3, 8, 4, 8, 4, generator=torch.Generator().manual_seed(1))
    image = (image.flip(0) if "flipped" in name else image)[:, None].expand(3, 2, 8, 4, 8, 4)
    pixels = image.permute(2, 4, 0, 1, 3, 5).reshape(64, 96)
    ids = torch.tensor([[3, 57, *[55] * 16, 4, 5]])
    with torch.no_grad(), Dumper(model, out, keep="full"):
        model(
            input_ids=ids,
            pixel_values=pixels,
            image_grid_thw=torch.tensor([[1, 8, 8]]),
            mm_token_type_ids=(ids == 55).int(),
        )


def pictures(folder: Path, dtypes: Sequence[str]) -> Iterator[Pair]:
    see(baseline := folder / "qwen-vl", "float32", CLEAN)
    for dtype in dtypes:
        for name, (culprit, _) in PICTURES.items():
            target = folder / f"qwen-vl-{dtype}-{name}".replace(" ", "-")
            see(target, dtype, name)
            yield Pair(suite="Qwen2.5-VL", dtype=dtype, bug=name, culprit=culprit, baseline=baseline, target=target)


SUITES = [
    Suite(
        name="transformers tp_plan",
        packages=("transformers", "accelerate"),
        pairs=partial(distributed, "tp_plan", rank_of_tp_plan, PLANNED),
    ),
    Suite(
        name="transformers FSDP2",
        packages=("transformers",),
        pairs=partial(distributed, "fsdp2", rank_of_fsdp, SHARDED),
    ),
    Suite(name="PEFT", packages=("transformers", "peft"), pairs=adapters),
    Suite(name="Qwen2.5-VL", packages=("transformers",), pairs=pictures),
]
