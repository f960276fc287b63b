"""Text output of `tapscope bench`."""

from typing import Any

from tapscope.cli import bench_baseline
from tapscope.core.formatting import plural

_TIMES = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2e_ms", "E2E"))


def lines(result: dict[str, Any]) -> list[str]:
    """Format the result of one benchmark as lines of text."""
    text = {"serving": _serving, "batch": _batch, "latency": _latency}[result["kind"]](result)
    text += [f"profile   {trace}" for trace in result.get("profile", ())]
    return text + (bench_baseline.lines(result["baseline"]) if "baseline" in result else [])


def _serving(result: dict[str, Any]) -> list[str]:
    rate = "all at once" if result["rate"] is None else f"{result['rate']:g} requests/s"
    if result["dataset"] == "trace":
        rate = f"as recorded, times x {result['trace_slowdown']:g}"
    most = "" if result["max_concurrency"] is None else f", max concurrency {result['max_concurrency']}"
    text = [
        f"serving   {result['model']} at {result['target']} ({result['endpoint']}); {_workload(result)}",
        f"load      {rate}{most}; peak {result['peak_concurrency']} in flight",
        f"requests  {result['completed']} completed, {result['failed']} failed in {result['duration_s']:.2f} s: "
        f"{result['requests_per_s']:.2f}/s",
        f"tokens    {_tokens(result)}",
    ]
    if "flops_share" in result:
        text[-1] += f"; {_compute(result, result['machine'])}"
    text += ["", f"{'ms':<14}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p95", "p99", "max"))]
    for key, label in _TIMES:
        text.append(_row(label, result[key]))
    return text + [f"failed    {item['count']} x {item['error']}" for item in result["errors"]]


def _batch(result: dict[str, Any]) -> list[str]:
    machine = result["machine"]
    return [
        f"batch     {_model(result)}; {_workload(result)}",
        f"requests  {result['requests']} in {result['duration_s']:.2f} s: {result['requests_per_s']:.2f}/s, "
        f"{result['steps']} steps",
        f"tokens    {_tokens(result)}",
        f"compute   {_compute(result, machine)}",
        f"memory    {_memory(result, machine)}",
    ]


def _latency(result: dict[str, Any]) -> list[str]:
    machine, batch, repeats = result["machine"], result["batch_size"], result["repeats"]
    text = [
        f"latency   {_model(result)}; batch {batch}, {result['prompt_tokens']} prompt and {result['output_tokens']} "
        f"output tokens, {repeats} times",
        f"prefill   {result['prefill_ms']['p50']:.2f} ms, {result['prefill_tokens_per_s']:,.0f} tok/s; "
        f"{_compute(result['prefill'], machine)}",
    ]
    if "decode" in result:
        step = f"{result['step_ms']['p50']:.2f} ms per step, {result['decode_tokens_per_s']:,.0f} tok/s"
        text.append(f"decode    {step}; {_memory(result['decode'], machine)}")
    text += ["", f"{'ms':<14}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p95", "p99", "max"))]
    for key, label in (("prefill_ms", "prefill"), ("step_ms", "step"), ("latency_ms", "E2E")):
        text.append(_row(label, result.get(key)))
    return text


def _model(result: dict[str, Any]) -> str:
    ranks = f", {result['tp']} ranks" if result["tp"] > 1 else ""
    kept = "" if result["kv_cache_dtype"] == result["dtype"] else f", KV cache {result['kv_cache_dtype']}"
    where = f"{result['device']}, {plural(result['machine']['threads'], 'thread')}{ranks}"
    return f"{result['model']} ({result['dtype']}{kept}, {where})"


def _workload(result: dict[str, Any]) -> str:
    kind = result["dataset"]
    adapters = f", adapters {', '.join(result['lora'])}" if result.get("lora") else ""
    if kind in ("sharegpt", "trace", "openai"):
        return f"{kind}, {result['num_prompts']} requests of {result['dataset_path']}{adapters}"
    prefix = f"{result['prefix_len']} shared + " if kind == "shared-prefix" else ""
    lengths = f"{prefix}{result['input_len']} prompt and {result['output_len']} output tokens{adapters}"
    if kind == "multi-turn":
        return f"{kind}, {result['num_prompts']} x {result['num_turns']} turns, {result['prefix_len']} + {lengths}"
    return f"{kind}, {result['num_prompts']} x {lengths}"


def _tokens(result: dict[str, Any]) -> str:
    cached = f" ({result['cached_tokens']:,} cached)" if result["cached_tokens"] else ""
    counts = f"{result['prompt_tokens']:,} prompt{cached}, {result['output_tokens']:,} output"
    rates = f"{result['output_tokens_per_s']:,.1f} output tok/s, {result['total_tokens_per_s']:,.1f} total tok/s"
    return f"{counts}: {rates}"


def _compute(shares: dict[str, Any], machine: dict[str, Any]) -> str:
    limit = f"{_size(machine['flops_per_s'])}FLOP/s ({machine['dtype']} GEMM)"
    return f"{_size(shares['tflops_per_s'] * 1e12)}FLOP/s, {shares['flops_share']:.1%} of this machine's {limit}"


def _memory(shares: dict[str, Any], machine: dict[str, Any]) -> str:
    limit = f"{_size(machine['read_bytes_per_s'])}B/s (memory reads)"
    return f"{_size(shares['gb_per_s'] * 1e9)}B/s, {shares['bytes_share']:.1%} of this machine's {limit}"


def _size(value: float) -> str:
    """Format with an SI prefix: giga, or tera from 1e12."""
    return f"{value / 1e12:.3g} T" if value >= 1e12 else f"{value / 1e9:.3g} G"


def _row(label: str, values: dict[str, float] | None) -> str:
    if values is None:
        return f"{label:<14}" + "".join(f"{'-':>10}" for _ in range(6))
    return f"{label:<14}" + "".join(f"{values[name]:>10.2f}" for name in ("mean", "p50", "p90", "p95", "p99", "max"))
