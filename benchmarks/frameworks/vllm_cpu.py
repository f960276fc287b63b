"""Real vLLM on CPU against transformers: clean pairs and seeded bugs, at TP 1 and 2, fp32 and bf16.

    python -m benchmarks.frameworks.vllm_cpu --vllm-python VENV/bin/python [--tp 1 2] [--dtype bfloat16] [--runner 1]

VENV has vLLM for CPUs and tapscope. A capture takes a minute or two, most of it imports. Prints one line per pair: the
exit code of `tapscope diff` and what it names. Exit code 0 when every clean pair agrees and every bug is named.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tapscope import Dumper

PROMPTS = [list(range(3, 21)), list(range(40, 49)), [7, 8, 9, 100, 200]]
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, tp, dtype, prompts = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    llm = LLM(model, skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, tensor_parallel_size=tp,
              max_model_len=256, max_num_seqs=8)
    params = SamplingParams(max_tokens=6, temperature=0, detokenize=False, ignore_eos=True)
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
"""


def scaled(name: str) -> Callable[[torch.nn.Module], None]:
    def bug(model: torch.nn.Module) -> None:
        model.get_submodule(name).weight.data.mul_(1.2)

    return bug


def swapped(model: torch.nn.Module) -> None:
    mlp = model.get_submodule("model.layers.1.mlp")
    gate, up = mlp.gate_proj.weight.data, mlp.up_proj.weight.data
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = up, gate


BUGS: dict[str, tuple[str, Callable[[torch.nn.Module], None] | None]] = {
    "clean": ("", None),
    "down_proj x 1.2": ("layers.2.mlp.down_proj", scaled("model.layers.2.mlp.down_proj")),
    "gate and up swapped": ("layers.1.mlp.gate", swapped),
    "norm x 1.2": ("layers.3.input_layernorm", scaled("model.layers.3.input_layernorm")),
}
"""Name -> (part of the module that must be named, what is done to the checkpoint that vLLM loads)."""


def build(folder: Path, kind: str) -> None:
    """A random checkpoint and one per bug."""
    torch.manual_seed(0)
    model: torch.nn.Module = (
        LlamaForCausalLM(LlamaConfig(**SIZES)) if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**SIZES))
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weight + torch.randn_like(weight) * 0.1 if name.endswith("norm.weight") else weight * 2.5)
    for bug, (_, apply) in BUGS.items():
        if apply is not None:
            apply(model)
        model.save_pretrained(folder / bug)
        if apply is not None:
            model = AutoModelForCausalLM.from_pretrained(folder / "clean")


def reference(checkpoint: Path, out: Path, dtype: str) -> None:
    """transformers, one left-padded batch."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    with torch.no_grad(), Dumper(model, out, keep="full"):
        model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)


def served(python: str, checkpoint: Path, out: Path, tp: int, dtype: str, runner: int) -> str:
    """vLLM with the plugin; returns the end of its log when it failed."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1),
        "TAPSCOPE_ENABLED": "1",
        "TAPSCOPE_KEEP": "full",
        "TAPSCOPE_DIR": str(out.parent),
        "TAPSCOPE_EXP_NAME": out.name,
    }
    if tp > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
    script = out.parent / "generate.py"
    script.write_text(GENERATE)
    command = [python, str(script), str(checkpoint), str(tp), dtype, json.dumps(PROMPTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    return "" if out.is_dir() else "\n".join((done.stdout + done.stderr).splitlines()[-5:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--folder", type=Path, default=Path("vllm-cpu-runs"))
    parser.add_argument("--model", choices=["llama", "qwen3"], default="llama")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--runner", type=int, nargs="+", default=[1])
    parser.add_argument("--bug", nargs="+", choices=list(BUGS), default=list(BUGS))
    args = parser.parse_args()
    folder: Path = args.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build(folder / "checkpoints", args.model)
    reference(folder / "checkpoints" / "clean", folder / "reference", "float32")
    failures = 0
    for number, (tp, dtype, runner, bug) in enumerate(
        (tp, dtype, runner, bug) for tp in args.tp for dtype in args.dtype for runner in args.runner for bug in args.bug
    ):
        out, began = folder / f"served-{number}", time.perf_counter()
        problem = served(args.vllm_python, folder / "checkpoints" / bug, out, tp, dtype, runner)
        command = [sys.executable, "-m", "tapscope", "diff", str(folder / "reference"), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        (what,) = [line for line in done.stdout.splitlines() if line.startswith("what")] or [problem or done.stderr]
        is_right = done.returncode == 0 if bug == "clean" else done.returncode == 1 and BUGS[bug][0] in what
        failures += not is_right
        took = f"{time.perf_counter() - began:.0f} s"
        state = "ok" if is_right else "WRONG"
        print(
            f"{state:5} tp {tp} {dtype:8} runner {runner} {bug:20} exit {done.returncode} {took:>6}  {what}", flush=True
        )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
