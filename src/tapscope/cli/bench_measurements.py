"""The measurements of `tapscope bench`, configured by its flags."""

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapscope.cli import capture_flags, diagnostics
from tapscope.core import extras
from tapscope.core.errors import UsageError

if TYPE_CHECKING:
    from tapscope.engine import LLM
    from tapscope.engine.bench.latency_stats import RequestTiming
    from tapscope.engine.bench.machine_limits import MachineLimits
    from tapscope.engine.bench.model_cost import ModelCost
    from tapscope.engine.bench.workload import BenchmarkRequest
    from tapscope.engine.text.tokenizer import Tokenizer

_OUTPUT_LEN = 64


def _items(
    args: argparse.Namespace, tokenizer: "Tokenizer | None", count: int | None, *, seed: int
) -> "list[BenchmarkRequest]":
    """Return ``count`` requests of the selected dataset; None: all requests of its file."""
    from tapscope.engine.bench import workload

    items = _unadapted_items(args, tokenizer, count, seed=seed)
    return workload.with_adapters(items, _adapter_names(args), seed) if args.lora else items


def _unadapted_items(
    args: argparse.Namespace, tokenizer: "Tokenizer | None", count: int | None, *, seed: int
) -> "list[BenchmarkRequest]":
    from tapscope.engine.bench import request_files, workload

    as_text = getattr(args, "chat", False) or args.dataset == "multi-turn"
    writer = workload.PromptGenerator(seed, tokenizer, as_text=as_text)
    num_output, path = args.output_len or _OUTPUT_LEN, args.dataset_path
    if args.dataset == "trace":
        block, slowdown = args.trace_block_size, args.trace_slowdown
        return request_files.trace_items(path, count, writer, block_size=block, slowdown=slowdown)
    if args.dataset == "openai":
        return request_files.openai_items(path, count, tokenizer=tokenizer, num_output=num_output)
    assert count is not None, "only files have a number of requests"
    if args.dataset == "sharegpt":
        items, skipped = workload.sharegpt_items(
            path, count, tokenizer=tokenizer, seed=seed, num_output=args.output_len, max_tokens=args.max_tokens
        )
        if skipped:
            diagnostics.note(
                f"skipped {skipped} conversations (under 4 tokens, or over --max-tokens {args.max_tokens})"
            )
        return items
    lengths = {"num_prompt": args.input_len, "num_output": num_output, "spread": args.spread}
    if args.dataset == "shared-prefix":
        return workload.shared_prefix_items(
            writer, count, groups=args.num_groups, num_prefix=args.prefix_len, **lengths
        )
    if args.dataset == "multi-turn":
        turns = {"num_turns": args.num_turns, "num_prefix": args.prefix_len}
        return workload.multi_turn_items(writer, count, **turns, **lengths)
    return workload.random_items(writer, count, **lengths)


def _adapter_names(args: argparse.Namespace) -> list[str]:
    return [name.partition("=")[0] for name in args.lora]


def _workload(args: argparse.Namespace, items: "Sequence[BenchmarkRequest]") -> dict[str, Any]:
    """Return the workload parameters for the JSON result."""
    names = {
        "sharegpt": ["dataset_path", "output_len"],
        "openai": ["dataset_path", "output_len"],
        "trace": ["dataset_path", "trace_block_size", "trace_slowdown"],
        "shared-prefix": ["input_len", "spread", "num_groups", "prefix_len", "output_len"],
        "multi-turn": ["input_len", "spread", "num_turns", "turn_delay", "prefix_len", "output_len"],
        "random": ["input_len", "spread", "output_len"],
    }[args.dataset]
    values = {name: getattr(args, name) for name in names}
    if "output_len" in values:
        values["output_len"] = args.output_len or _OUTPUT_LEN
    values = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    lora = {"lora": _adapter_names(args)} if args.lora else {}
    return {"dataset": args.dataset, "num_prompts": len(items)} | values | lora


def _serving(args: argparse.Namespace) -> dict[str, Any]:
    with extras.requiring("tapscope bench serving", "bench"):
        from tapscope.engine.bench import latency_stats, load_generator

    key = os.environ.get("TAPSCOPE_API_KEY") or os.environ.get("OPENAI_API_KEY")
    url, headers = args.target.rstrip("/").removesuffix("/v1"), {"Authorization": f"Bearer {key}"} if key else {}
    info = asyncio.run(load_generator.server_info(url, headers))
    model = args.model or asyncio.run(load_generator.model_names(url, headers))[0]
    folder = _local(info.get("model"))
    tokenizer = _tokenizer(args.tokenizer or folder)
    items = _items(args, tokenizer, args.num_prompts, seed=args.seed)
    warmup = _warmup(args, items, tokenizer)
    extra = _extra(args.extra) | ({} if args.stop_at_eos else {"ignore_eos": True})
    wanted = load_generator.LoadSettings(
        url=url, model=model, is_chat=args.chat, rate=args.rate, max_concurrency=args.max_concurrency,
        seed=args.seed, turn_delay_s=args.turn_delay, timeout_s=args.timeout, headers=headers, extra=extra,
        # SGLang and tapscope select an adapter as MODEL:ADAPTER. vLLM, which has no /get_server_info, uses the bare
        # name.
        adapter_models={name: f"{model}:{name}" if info else name for name in args.lora},
    )  # fmt: skip
    if warmup:
        asyncio.run(load_generator.run_load(wanted, warmup, lambda: None))
    machine = _machine(folder) if folder is not None and info.get("device", "cpu") == "cpu" else {}
    if args.profile:
        asyncio.run(load_generator.profile(url, "start", headers))
    profile: dict[str, Any] = {}
    try:
        with diagnostics.progress(sum(1 + len(item.followups) for item in items), "requests") as advance:
            timings, seconds, peak = asyncio.run(load_generator.run_load(wanted, items, lambda: advance(1)))
    finally:
        if args.profile:
            profile = asyncio.run(load_generator.profile(url, "stop", headers))
    statistics = latency_stats.summary(timings, seconds, peak)
    sent = {"model": model, "endpoint": "chat" if args.chat else "completions", "max_concurrency": args.max_concurrency}
    sent["rate"] = None if args.rate == float("inf") else args.rate
    if args.profile:
        sent["profile"] = profile.get("traces", ["in the server's directory for profiles"])
    return _workload(args, items) | sent | statistics | _shares(folder, machine, timings, seconds)


def _warmup(
    args: argparse.Namespace, items: "Sequence[BenchmarkRequest]", tokenizer: "Tokenizer | None"
) -> "list[BenchmarkRequest]":
    """Return unmeasured warm-up requests: random prompts that share no prefix with the measured prompts."""
    from tapscope.engine.bench import workload

    writer = workload.PromptGenerator(args.seed - 1, tokenizer, as_text=args.chat)
    length = min(item.num_prompt for item in items)
    warmup = workload.random_items(writer, args.warmup, num_prompt=length, num_output=2, spread=0.0)
    return workload.with_adapters(warmup, args.lora, args.seed) if args.lora else warmup


def _shares(
    folder: Path | None, machine: dict[str, Any], timings: "list[RequestTiming]", seconds: float
) -> dict[str, Any]:
    """Return throughput relative to the hardware limit; empty if the server runs on another machine."""
    if folder is None or not machine:
        return {}
    from tapscope.engine.bench.model_cost import ModelCost

    done = [timing for timing in timings if timing.error is None]
    lengths = [timing.num_prompt + timing.num_output for timing in done]
    tokens = sum(lengths) - sum(timing.num_cached for timing in done)
    flops = ModelCost.read(folder).flops(tokens, sum(length * length / 2 for length in lengths))
    per_s = flops / seconds
    return {"machine": machine, "tflops_per_s": per_s / 1e12, "flops_share": per_s / machine["flops_per_s"]}


def _machine(folder: Path) -> dict[str, Any]:
    if find_spec("torch") is None:
        diagnostics.note("the limits of this machine are not measured: torch is not installed")
        return {}
    import torch

    from tapscope.engine.bench.machine_limits import MachineLimits
    from tapscope.engine.bench.model_cost import ModelCost

    return asdict(MachineLimits.measure(torch.device("cpu"), getattr(torch, ModelCost.read(folder).dtype)))


def _local(path: Any) -> Path | None:
    """Return the checkpoint directory that the server reports, or None if it does not exist on this machine."""
    return Path(path) if isinstance(path, str) and (Path(path) / "config.json").is_file() else None


def _tokenizer(folder: Path | None) -> "Tokenizer | None":
    from tapscope.engine.text.tokenizer import Tokenizer

    tokenizer = None if folder is None else Tokenizer.find(folder)
    if tokenizer is None:
        diagnostics.note("no tokenizer found: prompts are random words; use --tokenizer DIR for exact lengths")
    return tokenizer


def _extra(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise UsageError(f"invalid JSON in --extra: {error}") from None
    if not isinstance(fields, dict):
        raise UsageError("--extra must be a JSON object")
    return fields


def _batch(args: argparse.Namespace) -> dict[str, Any]:
    from tapscope.engine.bench.offline import run_batch

    with _offline(args) as (llm, cost, limits, about):
        items = _items(args, llm.tokenizer, args.num_prompts, seed=args.seed)
        with diagnostics.progress(len(items), "requests") as advance, _profiled(args, llm) as profile:
            measured = run_batch(llm, items, cost, limits, lambda: advance(1))
    return _workload(args, items) | about | measured | profile


def _latency(args: argparse.Namespace) -> dict[str, Any]:
    from tapscope.engine.bench.offline import run_latency

    if args.dataset != "random":
        raise UsageError("bench latency measures batches of equal length; use --dataset random")
    args.spread = 0.0
    with _offline(args) as (llm, cost, limits, about):
        seeds = range(args.seed, args.seed + args.repeat + 1)
        batches = [_items(args, llm.tokenizer, args.batch_size, seed=seed) for seed in seeds]
        with diagnostics.progress(len(batches), "batches") as advance, _profiled(args, llm) as profile:
            measured = run_latency(llm, batches, cost, limits, lambda: advance(1))
    lora = {"lora": _adapter_names(args)} if args.lora else {}
    return about | lora | measured | profile


@contextmanager
def _profiled(args: argparse.Namespace, llm: "LLM") -> Iterator[dict[str, Any]]:
    """Context manager: with ``--profile``, run torch's profiler on every rank; the yielded dict then receives the trace
    paths."""
    members: dict[str, Any] = {}
    if args.profile:
        llm.engine.start_profile()
    yield members
    if args.profile:
        members["profile"] = llm.engine.stop_profile()


@contextmanager
def _offline(args: argparse.Namespace) -> "Iterator[tuple[LLM, ModelCost, MachineLimits, dict[str, Any]]]":
    """Context manager: yield a loaded model, its cost model, the hardware limits, and their description for the
    result."""
    from tapscope.engine import LLM
    from tapscope.engine.bench.machine_limits import MachineLimits
    from tapscope.engine.bench.model_cost import ModelCost

    longest = args.batch_size if args.kind == "latency" else args.max_num_seqs
    names = ("dtype", "kv_cache_dtype", "quantization_param_path", "tp")
    settings = {name: getattr(args, name) for name in names} | capture_flags.speculative_settings(args)
    settings |= {"lora_paths": tuple(args.lora), "profile_dir": str(args.profile_dir) if args.profile else None}
    with LLM(args.target, max_num_seqs=longest, **settings) as llm:
        weight, state = next(llm.model.parameters()), llm.engine.state()
        limits = MachineLimits.measure(weight.device, weight.dtype)
        about = {"model": args.target, "dtype": limits.dtype, "kv_cache_dtype": state["kv_cache_dtype"]}
        about |= {"device": str(weight.device), "tp": args.tp, "machine": asdict(limits)}
        cost = ModelCost.read(Path(args.target), kv_bytes=state["kv_bytes_per_token"] * args.tp)
        yield llm, cost, limits, about


RUNS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "serving": _serving,
    "batch": _batch,
    "latency": _latency,
}
"""Kind of benchmark, the first argument of `tapscope bench` -> measurement function."""
