"""The engine on one GPU against transformers: parity, and tokens per second.

    python benchmarks/engine_cuda.py [--shape qwen3-0.6b] [--batch 1 32] [--new 64]

Random weights in a real model's shape, bf16. Parity: the logits of one prompt, each against transformers in fp32; the
engine's error should match that of transformers in bf16. Speed: decode tokens per second of the engine (from the median
of the steps in which all requests decode), of transformers, and of transformers compiled with a static cache: median of
rounds. Also the share of the rate at which weights and cache could be read once per step at the measured copy rate (an
untied input embedding is not read). *Host work* is the time of a step without its waits for the GPU (``tp=1``).

With ``--quantization`` (``fp8-block``: blocks of 128 x 128 and inputs in groups of 128, as in DeepSeek-V3) the engine
also runs the same weights quantized, and the last row of a batch is the speedup of its steps:

    python benchmarks/engine_cuda.py --shape llama-8b --quantization fp8-block --batch 1 --prompt 1024 --peers
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from tapscope.engine import LLM, SamplingParams
from tapscope.engine.checkpoint.convert import Converter
from tapscope.engine.checkpoint.weight_quantizer import FORMATS
from tapscope.engine.requests.output import Output

_SHAPES: dict[str, Callable[[], Any]] = {
    "qwen3-0.6b": lambda: Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    ),
    "llama-8b": lambda: LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=4096,
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(  # 24 layers of 30B-A3B with narrower and half as many experts
        hidden_size=1024,
        intermediate_size=3072,
        moe_intermediate_size=384,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    ),
    "deepseek-v3": lambda: DeepseekV3Config(  # latent attention and router of DeepSeek-V3, in 16 small layers
        hidden_size=1024,
        intermediate_size=4096,
        moe_intermediate_size=384,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=768,
        n_routed_experts=64,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=1,
        vocab_size=129280,
        max_position_embeddings=4096,
    ),
    "tiny": lambda: LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=512,
    ),
}


def make(shape: str, folder: Path, device: str, quantization: str | None = None) -> int:
    """Save random bf16 weights, with linear layers in one of FORMATS if given; return the bytes that a step reads."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(_SHAPES[shape](), dtype=torch.bfloat16)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    embedding = 0 if model.config.tie_word_embeddings else int(model.get_input_embeddings().weight.nbytes)
    if quantization is None:
        model.save_pretrained(folder)
        return sum(int(p.nbytes) for p in model.parameters()) - embedding
    converter = Converter(quantization)
    saved: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        parts = {"": weight.detach()}
        if converter.covers(name, weight.shape, "BF16"):
            parts, _ = converter.quantizer.quantize(weight.detach())
        saved |= {name + suffix: part.cpu() for suffix, part in parts.items()}
    model.config.quantization_config = converter.quantizer.config(["lm_head"])
    model.config.save_pretrained(folder)
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    return sum(part.nbytes for part in saved.values()) - embedding


def hf(folder: Path, dtype: torch.dtype, device: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def logits_of(folder: Path, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = hf(folder, dtype, str(ids.device))(ids).logits[0].float().cpu()
    return found


def parity(folder: Path, vocab: int, device: str, tp: int) -> None:
    ids = torch.randint(0, vocab, (1, 256), generator=torch.Generator().manual_seed(1)).to(device)
    exact = logits_of(folder, ids, torch.float32)
    theirs = logits_of(folder, ids, torch.bfloat16)
    seen: list[torch.Tensor] = []
    with LLM(folder, dtype="bfloat16", device=device, tp=tp, logits="all", max_num_seqs=1) as llm:
        llm.model.register_forward_hook(lambda _m, _a, out: seen.append(out.logits.float().cpu()))
        llm.generate([ids[0].tolist()], max_new_tokens=1)
    ours = torch.cat(seen)[: len(exact)]
    scale = exact.norm()
    errors = [float((logits - exact).norm() / scale) for logits in (ours, theirs)]
    same = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    print(
        f"parity, 256 tokens, relative L2 to fp32: engine bf16 {errors[0]:.2e}, transformers bf16 {errors[1]:.2e}, "
        f"ratio {errors[0] / errors[1]:.2f}; same argmax {same:.1%}",
        flush=True,
    )


def copy_rate(device: str) -> float:
    """Return the copy rate in bytes per second, read and written."""
    source = torch.ones(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        _sync(device)
        began = time.perf_counter()
        target.copy_(source)
        _sync(device)
        best = min(best, time.perf_counter() - began)
    return 2 * source.numel() / best


def _sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], object], device: str) -> float:
    _sync(device)
    began = time.perf_counter()
    run()
    _sync(device)
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a measurement: the requests to decode."""

    folder: Path
    batch: int
    prompt: int
    """Tokens in the cache when the measurement starts."""
    new: int
    device: str
    tp: int

    def ids(self) -> torch.Tensor:
        """Return random prompts, [batch, prompt] int64."""
        return torch.randint(0, 256, (self.batch, self.prompt), generator=torch.Generator().manual_seed(2))

    @property
    def num_pages(self) -> int:
        """Return the number of pages of 16 positions that hold every request to its end."""
        return self.batch * (-(-(self.prompt + self.new + 1) // 16) + 1)


def decoding_seconds(run: Callable[[int], object], load: Load, rounds: int) -> list[float]:
    """Return the seconds for ``load.new`` additional tokens in each round, after a warm-up round."""
    taken = []
    for _ in range(rounds + 1):
        short = timed(lambda: run(1), load.device)
        taken.append(timed(lambda: run(1 + load.new), load.device) - short)
    return taken[1:]


def ours(load: Load, rounds: int, settings: dict[str, Any], sampling: dict[str, Any]) -> list[float]:
    ids = load.ids().tolist()
    more = {"max_num_seqs": load.batch, "num_pages": load.num_pages, "prefix_cache": False} | settings
    params = SamplingParams(max_new_tokens=1 + load.new, ignore_eos=True, **sampling)
    with LLM(load.folder, dtype="bfloat16", device=load.device, tp=load.tp, **more) as llm:
        steps = [decode_step_seconds(llm, ids, params) for _ in range(rounds + 1)][1:]
    if load.device == "cuda" and load.tp == 1:
        print(f"batch {load.batch:3}, host work of a step: {1e3 * statistics.median(host for _, host in steps):.2f} ms")
    return [load.new * wall for wall, _ in steps]


def decode_step_seconds(llm: LLM, ids: list[list[int]], params: SamplingParams) -> tuple[float, float]:
    """Return medians over the steps in which every request gets a token: duration, and duration without event waits."""
    step, synchronize = llm.engine.step, torch.cuda.Event.synchronize
    walls, hosts, waited = [], [], 0.0

    def timed_synchronize(event: torch.cuda.Event) -> None:
        nonlocal waited
        began = time.perf_counter()
        synchronize(event)
        waited += time.perf_counter() - began

    def timed_step() -> list[Output]:
        nonlocal waited
        began, waited = time.perf_counter(), 0.0
        outputs = step()
        if len(outputs) == len(ids):
            walls.append(time.perf_counter() - began)
            hosts.append(walls[-1] - waited)
        return outputs

    with (
        patch.object(llm.engine, "step", timed_step),
        patch.object(torch.cuda.Event, "synchronize", timed_synchronize),
    ):
        llm.generate(ids, params)
    return statistics.median(walls), statistics.median(hosts)


def theirs(load: Load, rounds: int, how: str) -> list[float]:
    """Measure transformers' generate: ``eager``, or ``compiled`` with a static cache."""
    model, inputs = hf(load.folder, torch.bfloat16, load.device), load.ids().to(load.device)
    more: dict[str, Any] = {"cache_implementation": "static"} if how == "compiled" else {}
    mask = torch.ones_like(inputs)

    def run(count: int) -> object:
        with torch.inference_mode():
            return model.generate(
                inputs, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=0, **more
            )

    try:
        return decoding_seconds(run, load, rounds)
    except torch.cuda.OutOfMemoryError:
        return [float("nan")]


def setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", choices=("eager", "compiled"), nargs="*", default=["eager", "compiled"])
    parser.add_argument("--set", type=setting, nargs="*", default=[], metavar="NAME=VALUE", help="engine settings")
    parser.add_argument(
        "--sampling",
        type=setting,
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="sampling parameters of the engine, such as temperature=1.0 top_p=0.9; greedy without",
    )
    parser.add_argument("--quantization", choices=FORMATS, help="also run the engine with quantized weights")
    parser.add_argument("--no-parity", action="store_true")
    parser.add_argument("--tp", type=int, default=1, help="ranks of the engine; transformers uses one GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device, rate = args.device, copy_rate(args.device)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    where = f"{name}, torch {torch.__version__}; plain copy {rate / 1e9:.0f} GB/s read and written"
    print(f"{args.shape} bf16, tp {args.tp} on {where}")
    with tempfile.TemporaryDirectory() as place:
        folder, quantized = Path(place) / args.shape, Path(place) / "quantized"
        nbytes = make(args.shape, folder, device)
        quantized_nbytes = make(args.shape, quantized, device, args.quantization) if args.quantization else 0
        if not args.no_parity:
            parity(folder, _SHAPES[args.shape]().vocab_size, device, args.tp)
        for batch in args.batch:
            load = Load(folder, batch, args.prompt, args.new, device, args.tp)
            cached = batch * (args.prompt + args.new / 2) * kv_bytes_per_token(args.shape)
            more = args.rounds, dict(args.set), dict(args.sampling)
            runs = {"engine": (nbytes, partial(ours, load, *more))}
            for how in args.peers:
                runs[f"transformers {how}"] = nbytes, partial(theirs, load, args.rounds, how)
            if args.quantization:
                run_quantized = partial(ours, replace(load, folder=quantized), *more)
                runs[f"engine {args.quantization}"] = quantized_nbytes, run_quantized
            first = 0.0
            for name, (weights, run) in runs.items():
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()
                pace, limit = batch * args.new / statistics.median(run()), batch * rate * args.tp / (weights + cached)
                first = first or pace
                told = f"{pace:8.0f} tok/s, {1e3 * batch / pace:7.2f} ms a step, {pace / limit:4.0%} of reading"
                print(f"batch {batch:3}, {args.prompt} tokens before: {name:22} {told}, engine / it {first / pace:.2f}")
                sys.stdout.flush()
            if args.quantization:
                print(f"batch {batch:3}: {args.quantization} / bf16 {pace / first:.2f}", flush=True)


def kv_bytes_per_token(shape: str) -> int:
    """Return the KV cache bytes per token in bf16."""
    config = _SHAPES[shape]()
    if shape == "deepseek-v3":
        return int(2 * config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim))
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(4 * config.num_hidden_layers * config.num_key_value_heads * dim)


if __name__ == "__main__":
    main()
