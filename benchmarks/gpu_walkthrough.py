"""Three user sessions on one GPU; prints each command and its output.

    python benchmarks/gpu_walkthrough.py [--out DIR] [--only compiled|planted_nan|switched]

1. A transformers model, called eagerly and compiled by ``torch.compile(mode="reduce-overhead")``, whose steps are CUDA
  graphs: two runs, and their ``tapscope diff``. Then the same with a wrong scale in one layer of the compiled model.
2. A NaN that is written to a weight of layer 17 while the engine decodes in CUDA graphs: found by a trigger.
3. Taps switched on over HTTP in a server that decodes in CUDA graphs: the time until the first step with records.
"""

import argparse
import functools
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from engine_cuda import _SHAPES
from transformers import LlamaConfig, LlamaForCausalLM

from tapscope import Dumper, wait_for_ready
from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM, SamplingParams

LAYER = 17


def say(title: str) -> None:
    print(f"\n## {title}\n", flush=True)


def tapscope(*words: str, lines: int = 40) -> None:
    """Run a tapscope command and print its output."""
    print("$ tapscope", " ".join(words), flush=True)
    done = subprocess.run([sys.executable, "-m", "tapscope", *words], capture_output=True, text=True)
    print("\n".join((done.stdout + done.stderr).rstrip().splitlines()[:lines]), flush=True)
    print(f"(exit code {done.returncode})", flush=True)


def compiled(out: Path) -> None:
    say("A compiled model against the eager one")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=16, vocab_size=32000
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    batches = [torch.randint(0, 32000, (4, 64), device="cuda") for _ in range(5)]

    def capture(name: str, call: Any) -> None:
        with torch.inference_mode(), Dumper(model, out / name, keep="full", rules=["*:in[*]=off"]):
            for ids in batches:
                torch.compiler.cudagraph_mark_step_begin()
                call(input_ids=ids, use_cache=False)

    capture("eager", model)
    replays = count_replays()
    capture("compiled", torch.compile(model, mode="reduce-overhead"))
    print(f"{replays()} replays of CUDA graphs in the 5 compiled steps")
    tapscope("diff", str(out / "eager"), str(out / "compiled"))
    torch._dynamo.reset()
    with torch.no_grad():
        model.model.layers[LAYER].mlp.down_proj.weight.mul_(1.1)
    capture("wrong", torch.compile(model, mode="reduce-overhead"))
    tapscope("diff", str(out / "eager"), str(out / "wrong"))
    torch._dynamo.reset()


def count_replays() -> Any:
    """Count CUDA graph replays from now on; the returned function stops counting and returns the count."""
    number = [0]
    replay = torch.cuda.CUDAGraph.replay

    @functools.wraps(replay)
    def counted(graph: Any) -> Any:
        number[0] += 1
        return replay(graph)

    torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign]

    def stop() -> int:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
        return number[0]

    return stop


def checkpoint(out: Path) -> Path:
    """Save the config of Qwen3-0.6B, without weights; return its directory."""
    config = _SHAPES["qwen3-0.6b"]()
    config.dtype = torch.bfloat16
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(out / "model")
    return out / "model"


def planted_nan(out: Path) -> None:
    say(f"A NaN in layer {LAYER}, found by a trigger while the engine decodes in CUDA graphs")
    config = DumperConfig(keep="off", rules=("*:out=stats",), triggers=("model.layers.*:out: nonfinite -> keep",))
    observer = functools.partial(make_observer, out=str(out / "nan"), config=config)
    settings: dict[str, Any] = {"load_format": "dummy", "kv_cache_memory_bytes": 2 << 30, "max_num_seqs": 8}
    with LLM(checkpoint(out), device="cuda", observer=observer, **settings) as llm:
        for request in range(8):
            llm.submit(list(range(request, request + 32)), SamplingParams(max_new_tokens=64, ignore_eos=True))
        replays, step = count_replays(), 0
        while llm.has_work and step < 48:
            if step == 32:
                weight = llm.model.get_parameter(f"model.layers.{LAYER}.mlp.down_proj.weight")
                with torch.no_grad():
                    weight[5, 7] = float("nan")
                print(f"after {step} steps: model.layers.{LAYER}.mlp.down_proj.weight[5, 7] = nan", flush=True)
            llm.step()
            step += 1
        print(f"{replays()} of {step} steps were replays of CUDA graphs", flush=True)
    tapscope("info", str(out / "nan"), lines=24)
    tapscope("ls", str(out / "nan"), "--anomalies", "--limit", "4")


def switched(out: Path) -> list[float]:
    """Return the seconds until the first record after each switch to more data."""
    say("Taps switched on over HTTP while a server decodes in CUDA graphs")
    address, run = "127.0.0.1:8123", out / "switched"
    words = ["serve", str(checkpoint(out)), "-o", str(run), "--listen", address, "-q", "--set", "load_format=dummy"]
    words += ["--set", "device=cuda", "--set", "kv_cache_memory_bytes=2147483648", "--set", "max_num_seqs=8"]
    print("$ tapscope", " ".join(words), flush=True)
    server = subprocess.Popen([sys.executable, "-m", "tapscope", *words])
    try:
        wait_for_ready(address, server, 120)
        with httpx.Client(base_url=f"http://{address}", timeout=60) as http:
            return measure_switch(http, run)
    finally:
        server.terminate()
        server.wait(60)


def measure_switch(http: httpx.Client, run: Path) -> list[float]:
    params = {"max_new_tokens": 3900, "ignore_eos": True}
    body = {"input_ids": list(range(64)), "sampling_params": params, "stream": True}
    address = f"http://{http.base_url.netloc.decode()}"
    stop, arrivals = threading.Event(), []

    def generate() -> None:
        while not stop.is_set():
            with httpx.stream("POST", f"{address}/generate", json=body, timeout=60) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        arrivals.append(time.perf_counter())
                    if stop.is_set():
                        return

    thread = threading.Thread(target=generate)
    thread.start()
    deadline = time.monotonic() + 60
    while len(arrivals) < 100:  # until decoding is steady
        if not thread.is_alive() or time.monotonic() > deadline:
            stop.set()
            raise SystemExit(f"the server generated {len(arrivals)} tokens in 60 s; expected 100")
        time.sleep(0.01)
    off: dict[str, Any] = {"keep": "off", "rules": []}
    statistics: dict[str, Any] = {"keep": "off", "rules": ["*:out=stats"]}
    layers: dict[str, Any] = {"keep": "off", "rules": ["model.layers.?:out=full"]}
    sketches: dict[str, Any] = {"keep": "off", "rules": ["*:out=sketch"]}
    found = []
    for change in (statistics, off, statistics, off, layers, off, sketches, off):
        records = Journal(run)
        began = time.perf_counter()
        http.post("/dumper/configure", json=change).raise_for_status()
        answered = time.perf_counter() - began
        while change is not off and not records.came():
            if time.perf_counter() - began > 20:
                stop.set()
                raise SystemExit(f"no record in {run} within 20 s of {json.dumps(change)}")
            time.sleep(0.001)
        seen = time.perf_counter() - began
        time.sleep(0.5)
        while arrivals[-1] < began + seen:  # decoding has not resumed yet
            if not thread.is_alive() or time.perf_counter() - began > 40:
                stop.set()
                raise SystemExit(f"no token within 40 s of {json.dumps(change)}")
            time.sleep(0.001)
        times = [*(each for each in arrivals if each > began - 0.1), time.perf_counter()]
        pause = max(later - earlier for earlier, later in itertools.pairwise(times))
        found += [] if change is off else [seen]
        text = f"{json.dumps(change):50} answered after {answered * 1e3:4.0f} ms"
        text += f", first record on disk after {seen * 1e3:4.0f} ms" if change is not off else ""
        print(f"{text}, longest pause between two tokens {pause * 1e3:4.0f} ms", flush=True)
    stop.set()
    thread.join()
    print(f"{len(arrivals)} tokens were generated meanwhile", flush=True)
    return found


class Journal:
    """The record lines added to a run from now on."""

    def __init__(self, run: Path) -> None:
        self._files = {path: path.stat().st_size for path in run.rglob("records.jsonl")}

    def came(self) -> bool:
        """Return whether a record was added."""
        for path, begin in self._files.items():
            with path.open("rb") as file:
                file.seek(begin)
                if b'"type":"record"' in file.read():
                    return True
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[Path], object]] = {part.__name__: part for part in (compiled, planted_nan, switched)}
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=parts, action="append")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder)
        for name in args.only or parts:
            parts[name](out)


if __name__ == "__main__":
    main()
