"""The measurements of `tapscope bench`: settings from its flags, and results."""

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
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
    args: argparse.Namespace, tokenizer: "Tokenizer | None", count: int, *, seed: int
) -> "list[BenchmarkRequest]":
    from tapscope.engine.bench import workload

    writer = workload.PromptGenerator(seed, tokenizer, as_text=getattr(args, "chat", False))
    num_output = args.output_len or _OUTPUT_LEN
    if args.dataset == "sharegpt":
        items, skipped = workload.sharegpt_items(
            *(args.dataset_path, count),
            tokenizer=tokenizer,
            seed=seed,
            num_output=args.output_len,
            max_tokens=args.max_tokens,
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
    return workload.random_items(writer, count, **lengths)


def _workload(args: argparse.Namespace) -> dict[str, Any]:
    """The workload, for the result."""
    names = ["dataset", "num_prompts"]
    names += ["dataset_path"] if args.dataset == "sharegpt" else ["input_len", "spread"]
    names += ["num_groups", "prefix_len"] if args.dataset == "shared-prefix" else []
    values = {name: getattr(args, name) for name in names} | {"output_len": args.output_len or _OUTPUT_LEN}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _serving(args: argparse.Namespace) -> dict[str, Any]:
    with extras.requiring("tapscope bench serving", "bench"):
        from tapscope.engine.bench import latency_stats, load_generator

    key = os.environ.get("TAPSCOPE_API_KEY") or os.environ.get("OPENAI_API_KEY")
    url, headers = args.target.rstrip("/").removesuffix("/v1"), {"Authorization": f"Bearer {key}"} if key else {}
    info = asyncio.run(load_generator.server_info(url, headers))
    model = args.model or asyncio.run(load_generator.first_model(url, headers))
    folder = _local(info.get("model"))
    items = _items(args, _tokenizer(args.tokenizer or folder), args.num_prompts + args.warmup, seed=args.seed)
    extra = _extra(args.extra) | ({} if args.stop_at_eos else {"ignore_eos": True})
    wanted = load_generator.LoadSettings(
        url=url, model=model, is_chat=args.chat, rate=args.rate, max_concurrency=args.max_concurrency,
        seed=args.seed, timeout_s=args.timeout, headers=headers, extra=extra,
    )  # fmt: skip
    if args.warmup:
        asyncio.run(load_generator.run_load(wanted, items[: args.warmup], lambda: None))
    machine = _machine(folder) if folder is not None and info.get("device", "cpu") == "cpu" else {}
    with diagnostics.progress(args.num_prompts, "requests") as advance:
        timings, seconds, peak = asyncio.run(load_generator.run_load(wanted, items[args.warmup :], lambda: advance(1)))
    found = latency_stats.summary(timings, seconds, peak)
    sent = {"model": model, "endpoint": "chat" if args.chat else "completions", "max_concurrency": args.max_concurrency}
    sent["rate"] = None if args.rate == float("inf") else args.rate
    return _workload(args) | sent | found | _shares(folder, machine, timings, seconds)


def _shares(
    folder: Path | None, machine: dict[str, Any], timings: "list[RequestTiming]", seconds: float
) -> dict[str, Any]:
    """What the server computed per second against the machine's limit, if it runs on this machine."""
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
    """The checkpoint that the server reports, if it runs on this machine."""
    return Path(path) if isinstance(path, str) and (Path(path) / "config.json").is_file() else None


def _tokenizer(folder: Path | None) -> "Tokenizer | None":
    from tapscope.engine.text.tokenizer import Tokenizer

    found = None if folder is None else Tokenizer.find(folder)
    if found is None:
        diagnostics.note("no tokenizer found: prompts are random words; use --tokenizer DIR for exact lengths")
    return found


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
        with diagnostics.progress(len(items), "requests") as advance:
            found = run_batch(llm, items, cost, limits, lambda: advance(1))
    return _workload(args) | about | found


def _latency(args: argparse.Namespace) -> dict[str, Any]:
    from tapscope.engine.bench.offline import run_latency

    if args.dataset != "random":
        raise UsageError("bench latency measures batches of equal length; use --dataset random")
    args.spread = 0.0
    with _offline(args) as (llm, cost, limits, about):
        seeds = range(args.seed, args.seed + args.repeat + 1)
        batches = [_items(args, llm.tokenizer, args.batch_size, seed=seed) for seed in seeds]
        with diagnostics.progress(len(batches), "batches") as advance:
            found = run_latency(llm, batches, cost, limits, lambda: advance(1))
    return about | found


@contextmanager
def _offline(args: argparse.Namespace) -> "Iterator[tuple[LLM, ModelCost, MachineLimits, dict[str, Any]]]":
    """A loaded model, its costs, the machine's limits, and their description for the result."""
    from tapscope.engine import LLM
    from tapscope.engine.bench.machine_limits import MachineLimits
    from tapscope.engine.bench.model_cost import ModelCost

    longest = args.batch_size if args.kind == "latency" else args.max_num_seqs
    names = ("dtype", "kv_cache_dtype", "quantization_param_path", "tp")
    settings = {name: getattr(args, name) for name in names} | capture_flags.speculative_settings(args)
    with LLM(args.target, max_num_seqs=longest, **settings) as llm:
        weight, state = next(llm.model.parameters()), llm.engine.state()
        limits = MachineLimits.measure(weight.device, weight.dtype)
        about = {"model": args.target, "dtype": limits.dtype, "kv_cache_dtype": state["kv_cache_dtype"]}
        about |= {"device": str(weight.device), "tp": args.tp, "machine": asdict(limits)}
        yield (
            llm,
            replace(ModelCost.read(Path(args.target)), kv_bytes=state["kv_bytes_per_token"] * args.tp),
            limits,
            about,
        )


RUNS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "serving": _serving,
    "batch": _batch,
    "latency": _latency,
}
"""Measurements by the first word after `tapscope bench`."""
