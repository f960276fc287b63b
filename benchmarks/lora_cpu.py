"""LoRA adapters on a CPU against the same engine without: same weights and prompts, interleaved.

    python benchmarks/lora_cpu.py [--new 16] [--rounds 5] [--hidden 2048] [--layers 2] [--rank 8] [--batch 8]
        [--experts 8]

One process, one torch thread; weights, and adapters of every linear layer, are random. A ratio is the CPU time of the
engine without adapters over that of the engine with adapters: 1 is equally fast, 0.85 is 15 % slower. Median of rounds,
with rotated order. With `--experts`, the MLP has that many experts, two per token.

Cases: `again` a second engine without adapters, which shows the noise; `unused` eight adapters are loaded but no
request uses one; `one` all requests use the same adapter; `eight` each request uses a different one. `decode` generates
from prompts of 8 tokens, `prompt` computes prompts of 64 tokens.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from tapscope.engine import LLM, SamplingParams

_ADAPTERS = 8


def save_adapter(folder: Path, config: PretrainedConfig, rank: int, seed: int) -> Path:
    """Save a random adapter of every linear layer; return its directory."""
    generator = torch.Generator().manual_seed(seed)
    width, size = config.hidden_size, config.intermediate_size
    shapes = dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (width, width))
    keys = config.num_key_value_heads * (width // config.num_attention_heads)
    shapes |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (keys, width))
    blocks = [f"mlp.experts.{number}" for number in range(getattr(config, "num_experts", 0))] or ["mlp"]
    size = getattr(config, "moe_intermediate_size", size)
    for block in blocks:
        shapes |= {f"{block}.gate_proj": (size, width), f"{block}.up_proj": (size, width)}
        shapes[f"{block}.down_proj"] = width, size
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, (outs, ins) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, ins, generator=generator) * 0.02
            tensors[f"{path}.lora_B.weight"] = torch.randn(outs, rank, generator=generator) * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def measure(llm: LLM, prompts: list[list[int]], num_new: int, adapters: list[str]) -> float:
    """Return the CPU seconds of a batch."""
    llm.engine.scheduler.flush()
    begin = time.process_time()
    llm.generate(prompts, SamplingParams(max_new_tokens=num_new, ignore_eos=True), adapter=adapters)
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("new", 16), ("rounds", 5), ("hidden", 2048), ("layers", 2), ("rank", 8), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--experts", type=int, default=0, metavar="COUNT")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {
        "hidden_size": args.hidden, "intermediate_size": 3 * args.hidden, "num_hidden_layers": args.layers,
        "vocab_size": 4096, "num_attention_heads": args.hidden // 64, "num_key_value_heads": args.hidden // 128,
        "max_position_embeddings": 2048, "eos_token_id": None, "head_dim": 64,
    }  # fmt: skip
    config: PretrainedConfig = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
    if args.experts:
        sizes |= {"num_experts": args.experts, "num_experts_per_tok": 2, "moe_intermediate_size": args.hidden}
        config = Qwen3MoeConfig(**sizes, architectures=["Qwen3MoeForCausalLM"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config.save_pretrained(folder / "model")
        names = [f"adapter-{number}" for number in range(_ADAPTERS)]
        paths = {name: save_adapter(folder / name, config, args.rank, seed) for seed, name in enumerate(names)}
        options = {"load_format": "dummy", "dtype": args.dtype, "max_num_batched_tokens": 2048}
        with ExitStack() as stack:
            engine = partial(LLM, folder / "model", **options)
            plain, again = (stack.enter_context(engine()) for _ in range(2))
            other = stack.enter_context(engine(lora_paths=paths))
            none = [""] * args.batch
            cases = {
                "plain": (plain, none),
                "again": (again, none),
                "unused": (other, none),
                "one": (other, names[:1] * args.batch),
                "eight": (other, (names * args.batch)[: args.batch]),
            }
            for kind, length, num_new in (("decode", 8, args.new), ("prompt", 64, 1)):
                prompts = [[(7 * i + 31 * row) % 4096 for i in range(length)] for row in range(args.batch)]
                taken: dict[str, list[float]] = {case: [] for case in cases}
                order = list(cases)
                for turn in range(args.rounds + 1):  # the first round is warm-up
                    for case in order[turn % len(order) :] + order[: turn % len(order)]:
                        llm, adapters = cases[case]
                        took = measure(llm, prompts, num_new, adapters)
                        if turn:
                            taken[case].append(took)
                base = taken.pop("plain")
                for case, times in taken.items():
                    found = [one / took for one, took in zip(base, times, strict=True)]
                    each = ", ".join(f"{ratio:.2f}" for ratio in found)
                    ratio, seconds = statistics.median(found), statistics.median(base)
                    print(f"{kind} {case:8} {ratio:.2f}   ({each})   plain {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main()
