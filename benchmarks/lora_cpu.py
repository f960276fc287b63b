"""LoRA adapters on a CPU against the same engine without: the same weights and prompts, in turn.

    python benchmarks/lora_cpu.py [--new 16] [--rounds 5] [--hidden 2048] [--layers 2] [--rank 8] [--batch 8]

One process, one torch thread; weights and adapters of every linear layer are random. A ratio is the CPU time of the
engine without adapters over that of the engine with adapters: 1 is as fast, 0.85 is 15 % slower. Median of rounds.

Cases: `unused` eight adapters are loaded and no request has one; `one` all requests have the same; `eight` each request
has another. `decode` generates from prompts of 8 tokens, `prompt` computes prompts of 64 tokens.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from tapscope.engine import LLM, SamplingParams

_ADAPTERS = 8


def save_adapter(folder: Path, config: LlamaConfig, rank: int, seed: int) -> Path:
    """A random adapter of every linear layer."""
    generator = torch.Generator().manual_seed(seed)
    width, size = config.hidden_size, config.intermediate_size
    shapes = dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (width, width))
    keys = config.num_key_value_heads * (width // config.num_attention_heads)
    shapes |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (keys, width))
    shapes |= {"mlp.gate_proj": (size, width), "mlp.up_proj": (size, width), "mlp.down_proj": (width, size)}
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
    """CPU time of a batch."""
    llm.engine.scheduler.flush()
    begin = time.process_time()
    llm.generate(prompts, SamplingParams(max_new_tokens=num_new, ignore_eos=True), adapter=adapters)
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("new", 16), ("rounds", 5), ("hidden", 2048), ("layers", 2), ("rank", 8), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=args.layers, vocab_size=4096,
        num_attention_heads=args.hidden // 64, num_key_value_heads=args.hidden // 128,
        architectures=["LlamaForCausalLM"], max_position_embeddings=2048, eos_token_id=None,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config.save_pretrained(folder / "model")
        names = [f"adapter-{number}" for number in range(_ADAPTERS)]
        paths = {name: save_adapter(folder / name, config, args.rank, seed) for seed, name in enumerate(names)}
        options = {"load_format": "dummy", "dtype": args.dtype, "max_num_batched_tokens": 2048}
        with LLM(folder / "model", **options) as plain, LLM(folder / "model", lora_paths=paths, **options) as other:
            none = [""] * args.batch
            cases = {"unused": none, "one": names[:1] * args.batch, "eight": (names * args.batch)[: args.batch]}
            for kind, length, num_new in (("decode", 8, args.new), ("prompt", 64, 1)):
                prompts = [[(7 * i + 31 * row) % 4096 for i in range(length)] for row in range(args.batch)]
                ratios: dict[str, list[float]] = {case: [] for case in cases}
                for turn in range(args.rounds + 1):  # the first warms up
                    base = measure(plain, prompts, num_new, none)
                    for case, adapters in cases.items():
                        took = measure(other, prompts, num_new, adapters)
                        if turn:
                            ratios[case].append(base / took)
                for case, found in ratios.items():
                    each = ", ".join(f"{ratio:.2f}" for ratio in found)
                    print(f"{kind} {case:8} {statistics.median(found):.2f}   ({each})   plain {base:.2f} s", flush=True)


if __name__ == "__main__":
    main()
