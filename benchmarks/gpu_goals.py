"""Every performance goal of the engine and of taps on one GPU, measured in one run on one machine.

    python benchmarks/gpu_goals.py [--only llama-8b --only eager-taps] [--json FILE]

Prints one row per goal as it is measured: the figure, the goal, whether it is met, and if there is one, the share of
the physical limit. For decoding, the limit is reading weights and KV cache once per step at the copy rate of this GPU
(read and write counted); for prompts, the rate of an 8,192 x 8,192 bf16 product. Models have random weights in bf16.
Each part runs in its own process, so a failing part costs only its own rows. The exit code is 1 if a part failed, not
if a goal is missed. The peers are transformers' ``generate``, eager and compiled with a static cache.

The part ``http`` needs the packages of ``tapscope serve``; its server runs on the same GPU.
"""

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cuda_capture
import cuda_graph_taps
import gpu_walkthrough
import kernels_triton
import torch
from engine_cuda import _SHAPES, decode_step_seconds, decoding_seconds, kv_bytes_per_token, make
from engine_cuda import Load as Requests
from transformers import AutoModelForCausalLM

from tapscope.engine import LLM, SamplingParams

_PART_SECONDS = 400
_NEW = 96
_COMPILED_TOKENS_PER_S = {"qwen3-0.6b": {1: 3.0, 32: 3.0, 256: 3.0}, "llama-8b": {1: 1.4, 32: 2.0, 256: 3.0}}
"""Goals: speedup over compiled transformers."""


class Row(NamedTuple):
    """One row of the table."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    is_upper_bound: bool = False
    """Whether the goal is an upper bound rather than a lower bound."""
    share: float | None = None
    """Share of the physical limit."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.is_upper_bound else self.value >= self.goal

    def line(self) -> str:
        """Format the row in fixed columns: name, figure, goal, verdict, share of the limit, note."""
        digits = 0 if self.value >= 100 else 2
        figure = f"{self.value:,.{digits}f} {self.unit}"
        bound = "" if self.goal is None else f"{'<=' if self.is_upper_bound else '>='} {self.goal:,g}"
        verdict = {None: "", True: "met", False: "MISSED"}[self.met]
        share = "" if self.share is None else f"{self.share:.2f}"
        return f"{self.name:66}{figure:>16}  {bound:>9}  {verdict:6}  {share:>5}  {self.note}".rstrip()


class Shape(NamedTuple):
    """A model and the weight bytes that a step must read."""

    name: str
    folder: Path
    weight_bytes: int

    @classmethod
    def of(cls, name: str, folder: Path, max_positions: int = 4096) -> "Shape":
        """Save the config and count the weight bytes; an untied input embedding is not read."""
        config = _SHAPES[name]()
        config.max_position_embeddings = max_positions
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        config.dtype, config.architectures = torch.bfloat16, [type(model).__name__]
        config.save_pretrained(folder)
        tables = 0 if config.tie_word_embeddings else int(model.get_input_embeddings().weight.nbytes)
        return cls(name, folder, sum(int(p.nbytes) for p in model.parameters()) - tables)

    def share(self, batch: int, context: float, seconds: float, copy: float) -> float:
        """Return the time to read weights and cache at the copy rate, relative to a step's duration."""
        read = self.weight_bytes + batch * context * kv_bytes_per_token(self.name)
        return read / copy / seconds


def start(folder: Path, max_num_seqs: int, **settings: Any) -> LLM:
    """Create an engine with dummy weights and a large KV cache."""
    defaults = {"load_format": "dummy", "prefix_cache": False, "kv_cache_memory_bytes": 100 << 30}
    return LLM(folder, dtype="bfloat16", device="cuda", max_num_seqs=max_num_seqs, **(defaults | settings))


def step_seconds(llm: LLM, batch: int, context: int, rounds: int = 2) -> float:
    """Return the median duration of steps in which all requests decode; the minimum over rounds after a warm-up
    round."""
    ids = Requests(Path(), batch, context, _NEW, "cuda", 1).ids().tolist()
    params = SamplingParams(max_new_tokens=1 + _NEW, ignore_eos=True)
    return min([decode_step_seconds(llm, ids, params)[0] for _ in range(rounds + 1)][1:])


def decode_row(llm: LLM, shape: Shape, batch: int, context: int, goal: float | None, copy: float) -> Row:
    """Return the row of decode tokens per second."""
    seconds = step_seconds(llm, batch, context)
    name = f"{shape.name}, decode, batch {batch}, context {context:,}"
    share = shape.share(batch, context + _NEW / 2, seconds, copy)
    return Row(name, batch / seconds, "tok/s", goal, share=share, note=f"{seconds * 1e3:.2f} ms a step")


def ragged_rate(llm: LLM) -> float:
    """Return the output tokens per second of 256 requests with 100 to 1,024 tokens in and out; the second of two
    runs."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(100, 1025, (256, 2), generator=generator).tolist()
    prompts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length, _ in lengths]
    params = [SamplingParams(max_new_tokens=new, ignore_eos=True) for _, new in lengths]
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        llm.generate(prompts, params)
        seconds = time.perf_counter() - began
    return sum(new for _, new in lengths) / seconds


def dense_rows(name: str, goals: dict[int, float], ragged: float, folder: Path) -> Iterator[Row]:
    """Measure decoding at context 1,024, and a ragged load."""
    copy, shape = kernels_triton.copy_rate(), Shape.of(name, folder / name)
    with start(shape.folder, 256) as llm:
        for batch, goal in goals.items():
            yield decode_row(llm, shape, batch, 1024, goal, copy)
        yield Row(f"{name}, 256 ragged requests", ragged_rate(llm), "tok/s", ragged)


def peer_rows(name: str, folder: Path) -> Iterator[Row]:
    """Measure decoding at context 128, relative to transformers in the same process."""
    copy, shape, ours = kernels_triton.copy_rate(), Shape.of(name, folder / name), {}
    with start(shape.folder, 256) as llm:
        for batch in _COMPILED_TOKENS_PER_S[name]:
            row = decode_row(llm, shape, batch, 128, None, copy)
            ours[batch] = row.value
            yield row
    del llm  # its KV cache takes 100 GiB
    free_memory()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(_SHAPES[shape.name](), dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    for how, more in {"compiled": {"cache_implementation": "static"}, "eager": {}}.items():
        for batch, rate in ours.items():
            load = Requests(shape.folder, batch, 128, 64, "cuda", 1)
            ids = load.ids().cuda()

            def run(count: int, ids: torch.Tensor = ids, more: dict[str, Any] = more) -> object:
                mask = torch.ones_like(ids)
                with torch.inference_mode():
                    return model.generate(
                        ids, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=0, **more
                    )

            theirs = batch * load.new / min(decoding_seconds(run, load, 2))
            goal = _COMPILED_TOKENS_PER_S[shape.name][batch] if how == "compiled" else None
            name = f"{shape.name}, batch {batch}, context 128, relative to transformers {how}"
            yield Row(name, rate / theirs, "x", goal, note=f"transformers {theirs:,.0f} tok/s")
    torch._dynamo.reset()


def qwen(folder: Path) -> Iterator[Row]:
    """Measure Qwen3-0.6B."""
    yield from dense_rows("qwen3-0.6b", {1: 700, 32: 16_000, 256: 24_000}, 18_000, folder)


def llama(folder: Path) -> Iterator[Row]:
    """Measure Llama-8B in bf16."""
    yield from dense_rows("llama-8b", {1: 210, 32: 5_300, 256: 15_500}, 8_700, folder)


def qwen_peers(folder: Path) -> Iterator[Row]:
    """Measure Qwen3-0.6B relative to transformers."""
    yield from peer_rows("qwen3-0.6b", folder)


def llama_peers(folder: Path) -> Iterator[Row]:
    """Measure Llama-8B relative to transformers."""
    yield from peer_rows("llama-8b", folder)


def prompts(folder: Path) -> Iterator[Row]:
    """Measure one prompt of 8,192 tokens in one step of Llama-8B."""
    shape, count = Shape.of("llama-8b", folder / "long", 16_384), 8192
    config = _SHAPES["llama-8b"]()
    product = kernels_triton.matmul_rate()
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 256, (1, count), generator=generator).tolist()
    with start(shape.folder, 1, max_num_batched_tokens=count) as llm:
        llm.generate(ids, max_new_tokens=1)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            llm.generate(ids, max_new_tokens=1)
            times.append(time.perf_counter() - began)
    seconds = statistics.median(times)
    head = config.vocab_size * config.hidden_size  # only the last token has logits
    linear = 2 * count * (shape.weight_bytes / 2 - head)
    attention = 2 * count**2 * config.hidden_size * config.num_hidden_layers  # causal: half of the square
    share = (linear + attention) / seconds / product
    note = f"{seconds * 1e3:.0f} ms, {(linear + attention) / seconds / 1e12:.0f} TFLOP/s"
    yield Row("llama-8b, prompt of 8,192 tokens, of the bf16 product", share, "", 0.60, share=share, note=note)


def fp8(folder: Path) -> Iterator[Row]:
    """Measure Llama-8B with block-quantized FP8 weights, relative to bf16."""
    times = {}
    make("llama-8b", folder / "fp8", "cuda", "fp8-block")
    bf16 = Shape.of("llama-8b", folder / "bf16")
    for name, place, load_format in (("bf16", bf16.folder, "dummy"), ("fp8", folder / "fp8", "auto")):
        free_memory()
        with start(place, 1, load_format=load_format) as llm:
            times[name] = step_seconds(llm, 1, 1024, 3)
    note = f"{times['fp8'] * 1e3:.2f} and {times['bf16'] * 1e3:.2f} ms a step"
    yield Row("llama-8b, FP8 in blocks relative to bf16, batch 1", times["bf16"] / times["fp8"], "x", 1.5, note=note)


def moe(folder: Path) -> Iterator[Row]:
    """Measure the Qwen3-MoE of engine_cuda.py; its share counts all experts, of which a small batch reads only a
    few."""
    copy, shape = kernels_triton.copy_rate(), Shape.of("qwen3-moe", folder / "moe")
    with start(shape.folder, 32) as llm:
        for batch, goal in {1: 500, 32: 8_000}.items():
            yield decode_row(llm, shape, batch, 128, goal, copy)


def kernels(folder: Path) -> Iterator[Row]:
    """Measure decode attention at 32 x 4,096 with pages of 16."""
    copy = kernels_triton.copy_rate()
    for case in kernels_triton.decode_cases():
        if case.name.startswith("decode 32 x 4096, 32/8 x 128 bfloat16"):
            microseconds = kernels_triton.graph_us(case.call)
            share = case.amount / (microseconds * 1e-6) / copy
            yield Row("decode attention, 32 x 4,096, of the copy rate", share, "", 0.80, share=share,
                      note=f"{microseconds:.0f} us, copy {copy / 1e12:.2f} TB/s")  # fmt: skip


_GRAPH_GOALS = {"nothing selected": None, "statistics, every output": 1.05, "sketches, every output": 1.10,
                "full, every layer's output": 1.10}  # fmt: skip


def graph_taps(folder: Path) -> Iterator[Row]:
    """Measure taps while Llama-8B decodes in CUDA graphs at batch 32; the plain engine is measured before and after."""
    model = cuda_graph_taps.save_config("llama-8b", folder)

    def measured(mode: str, number: int) -> cuda_graph_taps.Step:
        return cuda_graph_taps.step_of(model, mode, 32, _NEW, folder / f"run{number}")

    before = measured("no observer", 0)
    steps = {mode: measured(mode, number) for number, mode in enumerate(_GRAPH_GOALS, 1)}
    after = measured("no observer", len(steps) + 1)
    plain = (before.seconds + after.seconds) / 2
    around = f"plain {before.seconds * 1e3:.2f} before, {after.seconds * 1e3:.2f} ms after"
    for mode, step in steps.items():
        note = f"{step.seconds * 1e3:.2f} ms; {around}"
        if step.num_values:
            note += f"; {(step.seconds - plain) / step.num_values * 1e6:.2f} us a value of {step.num_values}"
            note += f"; {step.state}"
        yield Row(f"llama-8b in graphs, batch 32: {mode}", step.seconds / plain, "x", _GRAPH_GOALS[mode], True,
                  note=note)  # fmt: skip


_EAGER_GOALS = {"statistics, every output": (1.08, 1.4), "sketches, every output": (1.10, None)}
_TURNS = 3


def eager_taps(folder: Path) -> Iterator[Row]:
    """Measure taps of an eager Llama with 8B's width and half its layers: 2,048 tokens (device-bound), 16 (host-bound).

    Modes are interleaved, because the CPU clock changes within seconds; the figures are medians over the turns.
    """
    args = argparse.Namespace(hidden=4096, layers=16, tokens=2048, rounds=7, host_gib=6, out=folder)
    model, ids = cuda_capture.build(args), torch.arange(2048, device="cuda")[None] % 16000
    with torch.inference_mode():
        for position, count in enumerate((2048, 16)):
            cuda_capture.plain_cost(model, ids[:, :count], args.rounds)
            found = list(cuda_capture.prices(model, ids[:, :count], [*_EAGER_GOALS] * _TURNS, args))
            for mode, goals in _EAGER_GOALS.items():
                turns = [priced for name, priced in found if name == mode]
                yield eager_row(f"eager, {count:,} tokens: {mode}", turns, goals[position], is_host_bound=count == 16)


def eager_row(name: str, turns: list[cuda_capture.Priced], goal: float | None, *, is_host_bound: bool) -> Row:
    """Return the row of a forward's wall time relative to a plain one; back to back if the host is the bottleneck."""
    after_pause = [each.cost.wall / each.wall for each in turns]
    repeated = [each.cost.back_to_back / each.back_to_back for each in turns]
    device = statistics.median(each.cost.device / each.device for each in turns)
    plain = statistics.median(each.back_to_back if is_host_bound else each.wall for each in turns)
    ratios = repeated if is_host_bound else after_pause
    ratio, count = statistics.median(ratios), turns[0].cost.num_records
    note = f"{plain * 1e3:.1f} ms plain; {(ratio - 1) * plain / count * 1e6:.1f} us a value of {count}; turns "
    note += ", ".join(f"{each:.2f}" for each in ratios) + f"; device {device:.2f} x"
    if not is_host_bound:
        note += f"; back to back {statistics.median(repeated):.2f} x"
    return Row(name, ratio, "x", goal, True, note=note)


def full(folder: Path) -> Iterator[Row]:
    """Measure capture of everything in full into host memory."""
    args = argparse.Namespace(hidden=8192, layers=4, tokens=2048, rounds=3, host_gib=12, out=folder)
    model, ids = cuda_capture.build(args), torch.arange(2048, device="cuda")[None] % 16000
    rate = cuda_capture.pinned_rate()
    with torch.inference_mode():
        for _, priced in cuda_capture.prices(model, ids, ["full, everything"], args):
            cost = priced.cost
            share = cost.nbytes / cost.copied / rate
            note = f"{cost.nbytes / cost.copied / 1e9:.1f} GB/s of {rate / 1e9:.1f}, {cost.nbytes / 1e9:.1f} GB"
            yield Row("everything in full, of the pinned copy", share, "", 0.85, share=share, note=note)


def http(folder: Path) -> Iterator[Row]:
    """Measure taps switched on over HTTP while a server decodes in CUDA graphs, started without a Triton cache."""
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    names = "statistics, first switch", "statistics, second switch", "ten layers in full", "sketches, first switch"
    for name, seconds in zip(names, gpu_walkthrough.switched(folder), strict=True):
        yield Row(f"taps over HTTP until the first record: {name}", seconds, "s", 1.0, True)


PARTS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "kernels": kernels,
    "qwen3-0.6b": qwen,
    "llama-8b": llama,
    "prompts": prompts,
    "fp8": fp8,
    "qwen3-moe": moe,
    "graph-taps": graph_taps,
    "eager-taps": eager_taps,
    "full": full,
    "http": http,
    "qwen3-0.6b-peers": qwen_peers,
    "llama-8b-peers": llama_peers,
}


def free_memory() -> None:
    """Release the cached GPU memory of deleted models."""
    gc.collect()
    torch.cuda.empty_cache()


def run_part(name: str, path: Path | None) -> None:
    """Measure one part; append a JSON object per row to the file."""
    num_rows = 0
    with tempfile.TemporaryDirectory() as folder:
        for row in PARTS[name](Path(folder)):
            num_rows += 1
            print(row.line(), flush=True)
            if path:
                with path.open("a") as file:
                    file.write(json.dumps({"part": name, **row._asdict(), "met": row.met}) + "\n")
    if not num_rows:
        raise SystemExit(f"{name}: nothing was measured")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="measure only these parts")
    parser.add_argument("--json", type=Path, help="append the rows to this file, one JSON object per line")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_goals.py: no CUDA device")
        return 1
    names = args.only or list(PARTS)
    if len(names) == 1:
        run_part(names[0], args.json)
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    options = ["--json", str(args.json)] if args.json else []
    failed = []
    for name in names:
        began = time.perf_counter()
        command = [sys.executable, __file__, "--only", name, *options]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            code: int | str = process.wait(_PART_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # including the server that the part may have started
            process.wait()
            code = f"not finished after {_PART_SECONDS} s"
        print(f"# {name}: {time.perf_counter() - began:.0f} s" + (f", FAILED ({code})" if code else ""), flush=True)
        failed += [name] if code else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
