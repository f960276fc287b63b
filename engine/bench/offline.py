"""Offline benchmarks of the engine: throughput of many prompts, and latency of one batch."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from tapscope.engine.bench.latency_stats import spread
from tapscope.engine.bench.machine_limits import MachineLimits
from tapscope.engine.bench.model_cost import ModelCost
from tapscope.engine.bench.workload import BenchmarkRequest
from tapscope.engine.llm import LLM
from tapscope.engine.params.sampling_params import SamplingParams


def run_batch(
    llm: LLM, items: Sequence[BenchmarkRequest], cost: ModelCost, limits: MachineLimits, on_done: Callable[[], None]
) -> dict[str, Any]:
    """Submit all ``items``, run them to completion and return the throughput as JSON values."""
    before = llm.engine.state()["num_steps"]
    begun = perf_counter()
    prompts = outputs = cached = 0
    for item in items:
        params = SamplingParams(max_new_tokens=item.num_output, ignore_eos=True)
        llm.submit(item.prompt, params, adapter=item.adapter or "")
    while llm.has_work:
        for output in llm.advance():
            outputs += len(output.token_ids)
            if output.finish_reason is not None:
                prompts += output.prompt_tokens
                cached += output.cached_tokens
                on_done()
    seconds = perf_counter() - begun
    steps = llm.engine.state()["num_steps"] - before
    pairs = sum((item.num_prompt + item.num_output) ** 2 / 2 for item in items)  # a causal mask keeps half of all pairs
    computed = prompts - cached + outputs
    return {
        "duration_s": seconds,
        "requests": len(items),
        "steps": steps,
        "prompt_tokens": prompts,
        "cached_tokens": cached,
        "output_tokens": outputs,
        "requests_per_s": len(items) / seconds,
        "output_tokens_per_s": outputs / seconds,
        "total_tokens_per_s": (prompts + outputs) / seconds,
    } | against(limits, cost.flops(computed, pairs), cost.bytes_read(steps, _decode_pairs(items)), seconds)


def run_latency(
    llm: LLM,
    batches: Sequence[Sequence[BenchmarkRequest]],
    cost: ModelCost,
    limits: MachineLimits,
    on_done: Callable[[], None],
) -> dict[str, Any]:
    """Run batches of equal size and length one after another; return prefill and decode latencies as JSON values.

    The first batch is a warm-up and does not count.
    """
    runs = []
    for batch in batches:
        runs.append(_one_batch(llm, batch))
        on_done()
    del runs[0]
    prefill, steps = [run[0] for run in runs], [gap for run in runs for gap in run[1:]]
    size, length, num_output = len(batches[0]), batches[0][0].num_prompt, batches[0][0].num_output
    first_s, step_s = _median(prefill), _median(steps)
    middle = length + num_output / 2
    result = {
        "batch_size": size,
        "prompt_tokens": length,
        "output_tokens": num_output,
        "repeats": len(runs),
        "latency_ms": spread([sum(run) for run in runs]),
        "prefill_ms": spread(prefill),
        "prefill_tokens_per_s": size * length / first_s,
        "prefill": against(
            limits, cost.flops(size * length, size * length * length / 2), cost.bytes_read(1, 0), first_s
        ),
    }
    if steps:
        result["step_ms"] = spread(steps)
        result["decode_tokens_per_s"] = size / step_s
        result["decode"] = against(limits, cost.flops(size, size * middle), cost.bytes_read(1, size * middle), step_s)
    return result


def against(limits: MachineLimits, flops: float, num_bytes: float, seconds: float) -> dict[str, float]:
    """Return FLOPs and bytes per second, and their fractions of the machine's limits."""
    return {
        "tflops_per_s": flops / seconds / 1e12,
        "flops_share": flops / seconds / limits.flops_per_s,
        "gb_per_s": num_bytes / seconds / 1e9,
        "bytes_share": num_bytes / seconds / limits.read_bytes_per_s,
    }


def _one_batch(llm: LLM, batch: Sequence[BenchmarkRequest]) -> list[float]:
    """Run one batch; return the seconds until every request has its first token, then of each further step."""
    names = {
        llm.submit(
            item.prompt, SamplingParams(max_new_tokens=item.num_output, ignore_eos=True), adapter=item.adapter or ""
        )
        for item in batch
    }
    seconds: list[float] = []
    waiting, begun = set(names), perf_counter()
    while llm.has_work:
        outputs = llm.advance()
        waiting -= {output.request for output in outputs if output.token_ids}
        if not waiting:
            now = perf_counter()
            seconds.append(now - begun)
            begun = now
    return seconds


def _decode_pairs(items: Sequence[BenchmarkRequest]) -> float:
    """Return the number of cached tokens read by all decode steps, summed over requests."""
    return sum(item.num_output * (item.num_prompt + item.num_output / 2) for item in items)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else float("nan")
