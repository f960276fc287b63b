"""Prefill of a cold prompt on a CPU: the engine, transformers and vLLM, same weights, each in its own process.

    python benchmarks/prefill_cpu.py [--vllm-python PATH] [--lengths 129 1025 4097] [--dtypes float32 bfloat16]
                                     [--threads 1 0] [--rounds 5]

A small random Llama (27 M parameters) generates one token after a prompt of new random tokens, so that no prefix cache
helps. The processes persist and run interleaved within each round, in a different order each time; 0 threads means one
per core. Medians of CPU time (of the process, all threads) and of wall time; a ratio above 1 means that the engine is
faster. "of the peak" is the time of the forward's arithmetic at the rate of torch's own product of 1,024 by 512 by
3,072, measured in the engine's process, over the CPU time. Only matrix products and causal attention count.

``--vllm-python`` is the interpreter of an environment with vLLM for CPUs.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCAB = 512, 1536, 8, 8, 4, 4096
MAX_POSITIONS = 8192

Prompt = Callable[[list[int]], list[int]]
"""Maps a prompt to the one generated token."""


def operations(length: int) -> float:
    """Return the operations of a prompt's forward: linear layers, causal attention and the last row's logits."""
    head_dim = HIDDEN // HEADS
    weights = HIDDEN * (2 * HIDDEN + 2 * KV_HEADS * head_dim) + 3 * HIDDEN * INTERMEDIATE
    return 2.0 * LAYERS * (length * weights + length * (length + 1) * HIDDEN) + 2 * HIDDEN * VOCAB


def save(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=VOCAB, max_position_embeddings=MAX_POSITIONS, tie_word_embeddings=True,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def ours(folder: str, dtype: str) -> Prompt:
    from tapscope.engine import LLM

    llm = LLM(folder, dtype=dtype, device="cpu")
    return lambda prompt: list(llm.generate([prompt], max_new_tokens=1, ignore_eos=True)[0].token_ids)


def of_transformers(folder: str, dtype: str) -> Prompt:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def run(prompt: list[int]) -> list[int]:
        with torch.no_grad():
            out = model.generate(torch.tensor([prompt]), max_new_tokens=1, do_sample=False, pad_token_id=0)
        return list(out[0, len(prompt) :].tolist())

    return run


def of_vllm(folder: str, dtype: str) -> Prompt:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        folder, dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, max_model_len=MAX_POSITIONS,
        enable_prefix_caching=False,
    )  # fmt: skip
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)

    def run(prompt: list[int]) -> list[int]:
        outputs = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return list(outputs[0].outputs[0].token_ids)

    return run


_WAYS: dict[str, Callable[[str, str], Prompt]] = {"ours": ours, "transformers": of_transformers, "vllm": of_vllm}


def peak(dtype: str) -> float:
    """Return the operations per CPU second of torch's product of the model's widest shape."""
    import torch

    x, weight = (torch.randn(rows, HIDDEN, dtype=getattr(torch, dtype)) for rows in (1024, 2 * INTERMEDIATE))
    paces = []
    for _ in range(7):
        start = time.process_time()
        torch.nn.functional.linear(x, weight)
        paces.append(2.0 * 1024 * HIDDEN * 2 * INTERMEDIATE / (time.process_time() - start))
    return max(paces)


def serve(way: str, folder: str, dtype: str, threads: int) -> None:
    """Serve requests in a worker process: a line of JSON in, a line of JSON out on the original stdout."""
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirects library output to stderr
    if way != "vllm":  # vLLM sets its threads by OMP_NUM_THREADS
        torch.set_num_threads(threads)
    run = _WAYS[way](folder, dtype)
    for line in sys.stdin:
        prompt = json.loads(line)
        if prompt is None:
            answer: Any = peak(dtype)
        else:
            cpu, wall = time.process_time(), time.perf_counter()
            tokens = run(prompt)
            answer = time.process_time() - cpu, time.perf_counter() - wall, tokens
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # skips cleanup: there is no state to keep


class WorkerProcess:
    """A process that runs :func:`serve`."""

    def __init__(self, python: str, way: str, folder: Path, dtype: str, threads: int) -> None:
        command = [python, __file__, "--serve", way, str(folder), dtype, str(threads)]
        settings = {
            "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }  # fmt: skip
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=os.environ | settings, text=True, **pipes)

    def measure(self, prompt: list[int] | None) -> Any:
        """Return CPU seconds, wall seconds and tokens for a prompt; the peak rate without one."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps(prompt), file=stdin, flush=True)
        line = stdout.readline()
        if not line:
            raise SystemExit(f"a process ended: {self._process.args}; run it by hand to see why")
        return json.loads(line)

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def compare(asked: dict[str, WorkerProcess], length: int, rounds: int, label: str) -> None:
    dice = random.Random(length)
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in asked}
    names, same = list(asked), dict.fromkeys(asked, 0)
    for turn in range(rounds + 1):
        prompt = [dice.randrange(2, VOCAB) for _ in range(length)]
        tokens: dict[str, Any] = {}
        for way in names[turn % len(names) :] + names[: turn % len(names)]:
            cpu, wall, tokens[way] = asked[way].measure(prompt)
            if turn:  # the first round is warm-up
                taken[way].append((cpu, wall))
        for way in names:
            same[way] += tokens[way] == tokens["ours"]
    middle = {way: [statistics.median(column) for column in zip(*times, strict=True)] for way, times in taken.items()}
    limit = operations(length) / asked["ours"].measure(None)
    cpu, wall = middle["ours"]
    spent = f"{cpu * 1e3:6.0f} ms cpu {wall * 1e3:6.0f} wall, {limit / cpu:.2f} of the peak"
    said = [f"{label} {length:>5} tokens: ours {spent}"]
    for way in names[1:]:
        other = f"{way} {middle[way][0] * 1e3:.0f} cpu {middle[way][1] * 1e3:.0f} wall"
        ratios = f"{middle[way][0] / cpu:.2f} cpu {middle[way][1] / wall:.2f} wall"
        said.append(f"{other}, / ours {ratios}, {same[way]}/{rounds + 1} equal")
    print("; ".join(said), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter of an environment with vLLM CPU")
    parser.add_argument("--lengths", type=int, nargs="+", default=[129, 1025, 4097])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 0], help="threads; 0: one per core")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    pythons = {"ours": sys.executable, "transformers": sys.executable}
    if args.vllm_python:
        pythons["vllm"] = args.vllm_python
    with tempfile.TemporaryDirectory(prefix="prefill-cpu-") as folder:
        save(Path(folder))
        for dtype in args.dtypes:
            for threads in dict.fromkeys(count or len(os.sched_getaffinity(0)) for count in args.threads):
                with ExitStack() as stack:
                    asked = {
                        way: stack.enter_context(WorkerProcess(python, way, Path(folder), dtype, threads))
                        for way, python in pythons.items()
                    }
                    for length in args.lengths:
                        compare(asked, length, args.rounds, f"{dtype} {threads} thr")


if __name__ == "__main__":
    main()
