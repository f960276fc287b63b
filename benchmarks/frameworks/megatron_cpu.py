"""Megatron-core on two ranks against transformers, forward and backward: TP with sequence parallelism, PP, EP, CP.

The ranks are those of examples/megatron_team.py: Megatron's model and data-parallel wrapper, whose gradients are
reduced by Megatron's `finalize_model_grads`. Context parallelism uses the ring attention of examples/megatron_ring.py.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.frameworks.pair import CLEAN, Pair, Suite

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROMPTS = {"0": list(range(3, 19)), "1": list(range(40, 48))}
TIED = {"0": list(range(3, 35)), "1": list(range(40, 64))}
"""Prompts in which bfloat16 routes a token of the last layer to a different expert: a near tie of the router."""
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
}


def make_checkpoint(path: Path, *, is_moe: bool) -> None:
    """Save a tiny Llama or Qwen3-MoE with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    torch.manual_seed(0)
    model = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)) if is_moe else LlamaForCausalLM(LlamaConfig(**SIZES))
    )
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, 1.0, 0.1)
    model.save_pretrained(path)


def rank_of(axis: str) -> int:
    from megatron.core import parallel_state

    names = {"tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "ep": "expert_model_parallel"}
    found: int = getattr(parallel_state, f"get_{names[axis]}_rank")()
    return found


@torch.no_grad()
def gate_up_swapped(model: Any) -> None:
    weight = model.decoder.layers[2].mlp.linear_fc1.weight
    weight.copy_(weight.roll(weight.shape[0] // 2, 0))


@torch.no_grad()
def stale_norm_on_rank_1(model: Any) -> None:
    if rank_of("tp") == 1:
        model.decoder.layers[3].input_layernorm.weight.mul_(1.2)


def attention_gradient_scaled(model: Any) -> None:
    def scaled(module: Any, grads_in: Any, grads_out: Any) -> Any:
        return tuple(g * 0.9 if g is not None else None for g in grads_in)

    model.decoder.layers[1].self_attention.linear_proj.register_full_backward_hook(scaled)


@torch.no_grad()
def layers_of_stage_1_swapped(model: Any) -> None:
    if rank_of("pp") == 1:
        one, two = (model.decoder.layers[i].state_dict() for i in (0, 1))
        one = {name: value.clone() for name, value in one.items() if isinstance(value, torch.Tensor)}
        for name, value in two.items():
            if isinstance(value, torch.Tensor):
                model.decoder.layers[0].get_parameter(name).copy_(value)
                model.decoder.layers[1].get_parameter(name).copy_(one[name])


def requests_swapped_between_stages(model: Any) -> None:
    if rank_of("pp") == 1:
        given = model.set_input_tensor
        model.set_input_tensor = lambda tensor: given(tensor.flip(1))


def gradient_halved_between_stages(model: Any) -> None:
    if rank_of("pp") == 0:
        model.decoder.layers[1].register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5, *grads[1:]))


@torch.no_grad()
def expert_scaled(model: Any) -> None:
    if rank_of("ep") == 1:
        model.decoder.layers[1].mlp.experts.local_experts[1].linear_fc2.weight.mul_(1.2)


@torch.no_grad()
def experts_swapped(model: Any) -> None:
    if rank_of("ep") == 0:
        one, two = (expert.linear_fc1.weight for expert in model.decoder.layers[2].mlp.experts.local_experts)
        kept = one.clone()
        one.copy_(two)
        two.copy_(kept)


def shared_weights_of_choices(model: Any) -> None:
    """Give every selected expert the same weight."""

    def equal(module: Any, args: Any, output: Any) -> Any:
        return output[1].to(output[0].dtype) / 2, output[1]

    model.decoder.layers[3].mlp.router.register_forward_hook(equal)


def next_expert_chosen(model: Any) -> None:
    """Route every token to the expert after the selected one, with the weight of the selected one."""

    def turned(module: Any, args: Any, output: Any) -> Any:
        return tuple(each.roll(1, -1) for each in output)

    model.decoder.layers[2].mlp.router.register_forward_hook(turned)


def attends_one_token_ahead(model: Any) -> None:
    model.decoder.layers[1].self_attention.core_attention.skew = 1


def softmax_scale(model: Any) -> None:
    model.decoder.layers[2].self_attention.core_attention.scale *= 1.2


def keys_without_gradient(model: Any) -> None:
    def detached(module: Any, args: Any) -> Any:
        return args[0], args[1].detach(), *args[2:]

    model.decoder.layers[1].self_attention.core_attention.register_forward_pre_hook(detached)


LAYOUTS: dict[str, tuple[dict[str, int], dict[Callable[[Any], None], str]]] = {
    "TP 2 + SP": (
        {"tp": 2},
        {
            gate_up_swapped: "model.layers.2.mlp.gate_proj",
            stale_norm_on_rank_1: "model.layers.3.input_layernorm",
            attention_gradient_scaled: "model.layers.1.self_attn",
        },
    ),
    "PP 2": (
        {"pp": 2},
        {
            layers_of_stage_1_swapped: "model.layers.2",
            requests_swapped_between_stages: "model.layers.2:in",
            gradient_halved_between_stages: "model.layers.1:out.grad",
        },
    ),
    "EP 2": (
        {"ep": 2},
        {
            expert_scaled: "model.layers.1.mlp",
            experts_swapped: "model.layers.2.mlp",
            shared_weights_of_choices: "model.layers.3.mlp (out",
            next_expert_chosen: "model.layers.2.mlp (out",
        },
    ),
    "CP 2": (
        {"cp": 2},
        {
            attends_one_token_ahead: "model.layers.1.self_attn",
            softmax_scale: "model.layers.2.self_attn",
            keys_without_gradient: "model.layers.1.self_attn.k_proj",
        },
    ),
}
"""Name -> axis sizes, and bug -> path prefix of the module that must be named."""


def captured(name: str, folder: Path, dtypes: Sequence[str]) -> Iterator[Pair]:
    """Yield the pairs of one layout; its ranks are started once."""
    sys.path.append(str(EXAMPLES))
    from megatron_team import Job, Team, run_transformers

    axes, bugs = LAYOUTS[name]
    first: Path | None = None
    kind = "moe" if "ep" in axes else "llama"
    prompts = TIED if kind == "moe" else PROMPTS
    checkpoint, baseline = folder / kind, folder / f"{kind}-transformers"
    if not baseline.exists():
        make_checkpoint(checkpoint, is_moe=kind == "moe")
        run_transformers(Job(checkpoint=str(checkpoint), out=str(baseline), prompts=prompts, backward=True))
    with Team(**axes) as team:
        for dtype in dtypes:
            for bug, culprit in {None: "", **bugs}.items():
                title = bug.__name__.replace("_", " ") if bug else CLEAN
                out = folder / f"megatron-{name}-{dtype}-{title}".replace(" ", "-")
                job = Job(
                    checkpoint=str(checkpoint),
                    out=str(out),
                    prompts=prompts,
                    dtype=dtype,
                    backward=True,
                    sequence_parallel="tp" in axes,
                    patch=f"{__file__}:{bug.__name__}" if bug else None,
                )
                team.capture(job)
                pair = Pair(
                    suite=f"Megatron-core {name}",
                    dtype=dtype,
                    bug=title,
                    culprit=culprit,
                    baseline=baseline,
                    target=out,
                )
                yield pair
                if first is not None:
                    module = culprit.partition(" ")[0].replace("model.", "decoder.")
                    yield replace(pair, suite=f"{pair.suite} against itself", culprit=module, baseline=first)
                elif kind == "moe":  # the prompts are padded, and padding is routed to experts as well
                    first = out


SUITES = [
    Suite(name=f"Megatron {name}", packages=("megatron.core",), pairs=partial(captured, name)) for name in LAYOUTS
]
