"""Parser of benchmark results: the JSON of `tapscope bench`, SGLang and vLLM.

Supported formats: `tapscope bench`; SGLang's `bench_serving`, `bench_one_batch_server` and nightly CI metrics; vLLM's
`bench serve`, `bench throughput` and `bench latency`.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from typing import Any

Fields = Mapping[str, Any]

MAX_TEXT = 300
"""Maximum length of a string field, in characters; the rest is cut off."""
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True, slots=True)
class BenchMetric:
    """Metric of a benchmark, with label and unit for display."""

    name: str
    label: str
    unit: str
    higher_is_better: bool


METRICS = (
    BenchMetric("total_tokens_per_s", "total throughput", "tok/s", True),
    BenchMetric("output_tokens_per_s", "output throughput", "tok/s", True),
    BenchMetric("input_tokens_per_s", "input throughput", "tok/s", True),
    BenchMetric("requests_per_s", "request throughput", "requests/s", True),
    *(
        BenchMetric(f"{key}_{statistic}", f"{label} {statistic}", "ms", False)
        for key, label in (("e2e_ms", "latency"), ("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"))
        for statistic in ("mean", "p50", "p99")
    ),
    BenchMetric("accept_length", "accept length", "tokens", True),
)
"""All metrics, in the order of tables and charts."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Configuration of a measurement. Only results with equal configurations are compared."""

    model: str
    hardware: str
    variant: str
    """Parallelism, dtype, tag: everything that distinguishes servers of the same model."""
    load: str
    """``batch 8``, ``concurrency 64``, ``8 requests/s`` or ``all at once``."""
    workload: str
    """Dataset, lengths, number of prompts."""
    tool: str
    """Benchmark tool: ``tapscope bench serving``, ``SGLang bench_serving``, …"""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Measurement of one configuration at one commit."""

    config: BenchConfig
    commit: str
    """Empty if the file does not contain a commit."""
    date: str
    """ISO 8601; empty if the file does not contain a date."""
    branch: str
    run: str
    """Id of the CI run."""
    run_url: str
    """URL of the CI run; empty unless http or https."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A benchmark result with the file that contains it."""

    file: str
    """Path relative to the scanned path; ``artifact.zip/result.json`` within an archive."""
    result: BenchResult
    """The result, with commit and date filled in."""


@dataclass(frozen=True, slots=True)
class BenchFiles:
    """Results and problems of one scan."""

    results: tuple[StoredResult, ...]
    problems: tuple[str, ...]
    """One sentence per file that could not be read or parsed."""
    num_files: int
    num_other: int
    """Number of JSON files without a benchmark result."""
    read_at: datetime


def bench_results(item: Any) -> list[BenchResult]:
    """Parse one JSON value, an object or a list of objects; return its results. Empty for other JSON."""
    if isinstance(item, list):
        return [result for each in item if isinstance(each, dict) for result in bench_results(each)]
    if not isinstance(item, dict):
        return []
    for is_format, read in _FORMATS:
        if is_format(item):
            return [result for result in read(item) if result.metrics]
    return []


# --- formats ---------------------------------------------------------------------------------------


def _tapscope(item: Fields) -> Iterator[BenchResult]:
    metadata = item.get("metadata")
    known = dict(metadata) if isinstance(metadata, dict) else {}
    metrics = {m.name: item.get(m.name) for m in METRICS}
    for key in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        metrics |= _statistics(key, item.get(key))
    if item.get("kind") == "latency":
        metrics |= _statistics("ttft_ms", item.get("prefill_ms")) | _statistics("itl_ms", item.get("step_ms"))
        metrics |= _statistics("e2e_ms", item.get("latency_ms"))
        metrics["input_tokens_per_s"] = item.get("prefill_tokens_per_s")
        metrics["output_tokens_per_s"] = item.get("decode_tokens_per_s")
        load = f"batch {item.get('batch_size')}"
        workload = _words(_length(item, "prompt_tokens", "in"), _length(item, "output_tokens", "out"))
    else:
        load = _load(item, "rate") if item.get("kind") == "serving" else "offline"
        workload = _words(_lengths(item, "input_len", "output_len"), _dataset(item), _prompts(item), _adapters(item))
    kept = "" if item.get("kv_cache_dtype") == item.get("dtype") else f"KV {_text(item.get('kv_cache_dtype'))}"
    variant = known.get("variant") or _words(_parallel(item), item.get("dtype"), kept)
    config = BenchConfig(
        _model(item.get("model")),
        _text(known.get("hardware") or item.get("device")),
        _text(variant),
        load,
        workload,
        f"tapscope bench {_text(item['kind'])}",
    )
    yield _result(config, known | {"date": item.get("date")}, metrics)


def _dataset(item: Fields) -> str:
    name = _text(item.get("dataset"))
    if name == "multi-turn":
        return f"{name} {_text(item.get('num_turns'))}"
    is_file = name in ("trace", "openai")
    return f"{name} {PurePath(_text(item.get('dataset_path'))).name}" if is_file else name


def _adapters(item: Fields) -> str:
    names = item.get("lora")
    return f"{len(names)} adapters" if isinstance(names, list) and names else ""


def _nightly(item: Fields) -> Iterator[BenchResult]:
    """Yield the results of SGLang's consolidated nightly metrics, or of one partition's nightly metrics."""
    for group in item["results"]:
        if not isinstance(group, dict) or not isinstance(group.get("benchmarks"), list):
            continue
        for each in group["benchmarks"]:
            if not isinstance(each, dict):
                continue
            hardware = group.get("gpu_config") or item.get("gpu_config")
            config = BenchConfig(
                _model(group.get("model")),
                _text(hardware),
                _text(group.get("variant")),
                f"batch {_text(each.get('batch_size'))}",
                _lengths(each, "input_len", "output_len"),
                "SGLang nightly",
            )
            yield _result(config, item, _one_batch(each) | {"e2e_ms_mean": each.get("latency_ms")})


def _one_batch_server(item: Fields) -> Iterator[BenchResult]:
    """Yield the result of SGLang's `bench_one_batch_server`, whose times are in seconds."""
    run_name = _text(item.get("run_name"))
    config = BenchConfig(
        _model(item.get("model_path")),
        _hardware(item),
        "" if run_name == "default" else run_name,
        f"batch {_text(item.get('batch_size'))}",
        _lengths(item, "input_len", "output_len"),
        "SGLang bench_one_batch_server",
    )
    times = {"e2e_ms_mean": _milliseconds(item.get("latency")), "ttft_ms_mean": _milliseconds(item.get("last_ttft"))}
    yield _result(config, item, _one_batch(item) | times)


def _one_batch(item: Fields) -> dict[str, Any]:
    return {
        "input_tokens_per_s": item.get("input_throughput"),
        "output_tokens_per_s": item.get("output_throughput"),
        "total_tokens_per_s": item.get("overall_throughput"),
        "ttft_ms_mean": item.get("ttft_ms"),
        "accept_length": item.get("acc_length"),
    }


def _sglang_serving(item: Fields) -> Iterator[BenchResult]:
    raw = item.get("server_info")
    server: Fields = raw if isinstance(raw, dict) else {}
    lengths = _lengths(item, "random_input_len", "random_output_len") if item.get("dataset_name") == "random" else ""
    config = BenchConfig(
        _model(item.get("model") or item.get("model_id") or server.get("model_path")),
        _hardware(item),
        _text(item.get("variant") or item.get("tag") or _words(_parallel(server), server.get("quantization"))),
        _load(item, "request_rate"),
        _words(lengths, item.get("dataset_name"), _prompts({"num_prompts": item.get("completed")})),
        f"{_tool(item)} bench_serving",
    )
    yield _result(config, item, _serving(item))


def _vllm_serving(item: Fields) -> Iterator[BenchResult]:
    variant = item.get("variant") or item.get("label") or _parallel(item)
    config = BenchConfig(
        _model(item.get("model_id")),
        _hardware(item),
        _text(variant),
        _load(item, "request_rate"),
        _words(_mean_lengths(item), item.get("dataset_name"), _prompts(item)),
        f"{_tool(item)} bench serve",
    )
    yield _result(config, item, _serving(item))


def _vllm_throughput(item: Fields) -> Iterator[BenchResult]:
    config = BenchConfig(
        _model(item.get("model_id") or item.get("model")),
        _hardware(item),
        _text(item.get("variant") or _parallel(item)),
        "offline",
        _prompts({"num_prompts": item.get("num_requests")}),
        "vLLM bench throughput",
    )
    metrics = {"requests_per_s": item.get("requests_per_second"), "total_tokens_per_s": item.get("tokens_per_second")}
    yield _result(config, item, metrics)


def _vllm_latency(item: Fields) -> Iterator[BenchResult]:
    config = BenchConfig(
        _model(item.get("model_id") or item.get("model")),
        _hardware(item),
        _text(item.get("variant") or _parallel(item)),
        f"batch {_text(item['batch_size'])}" if item.get("batch_size") else "",
        "",
        "vLLM bench latency",
    )
    points = item.get("percentiles")
    shares = points if isinstance(points, dict) else {}
    metrics = {"e2e_ms_mean": _milliseconds(item.get("avg_latency"))}
    metrics |= {f"e2e_ms_p{p}": _milliseconds(shares.get(str(p))) for p in (50, 99)}
    yield _result(config, item, metrics)


_TIMES = {"e2e_ms": ("e2e_latency", "e2el"), "ttft_ms": ("ttft",), "tpot_ms": ("tpot",), "itl_ms": ("itl",)}
"""Metric key -> names of the same time in the output of SGLang and vLLM."""


def _serving(item: Fields) -> dict[str, Any]:
    """Return the serving metrics, whose field names SGLang and vLLM mostly share."""
    metrics = {
        "requests_per_s": item.get("request_throughput"),
        "input_tokens_per_s": item.get("input_throughput"),
        "output_tokens_per_s": item.get("output_throughput"),
        "total_tokens_per_s": item.get("total_token_throughput") or item.get("total_throughput"),
        "accept_length": item.get("accept_length"),
    }
    for key, names in _TIMES.items():
        for statistic, theirs in (("mean", "mean"), ("p50", "median"), ("p99", "p99")):
            values = [item.get(f"{theirs}_{name}_ms") for name in names]
            metrics[f"{key}_{statistic}"] = next((value for value in values if value is not None), None)
    return metrics


_FORMATS: tuple[tuple[Callable[[Fields], bool], Callable[[Fields], Iterator[BenchResult]]], ...] = (
    (lambda i: i.get("kind") in ("serving", "batch", "latency") and "tapscope" in i, _tapscope),
    (lambda i: isinstance(i.get("results"), list) and "run_id" in i, _nightly),
    (lambda i: "overall_throughput" in i and "batch_size" in i, _one_batch_server),
    (lambda i: "request_throughput" in i and "total_token_throughput" in i and "model_id" in i, _vllm_serving),
    (lambda i: "request_throughput" in i and "completed" in i, _sglang_serving),
    (lambda i: "tokens_per_second" in i and "elapsed_time" in i, _vllm_throughput),
    (lambda i: "avg_latency" in i, _vllm_latency),
)
"""(predicate, parser) per format; the first matching format is used."""


# --- fields ----------------------------------------------------------------------------------------


def _result(config: BenchConfig, about: Fields, metrics: Fields) -> BenchResult:
    commits = (about.get(name) for name in ("commit", "commit_sha", "git_commit", "commit_hash"))
    dates = (about.get(name) for name in ("date", "run_date", "timestamp"))
    url = _text(about.get("run_url"))
    known = {metric.name: _number(metrics.get(metric.name)) for metric in METRICS}
    return BenchResult(
        config,
        next((_text(each) for each in commits if each), ""),
        next((_iso(_text(each)) for each in dates if each), ""),
        _text(about.get("branch")),
        _text(about.get("run_id")),
        url if url.startswith(("https://", "http://")) else "",
        {name: value for name, value in known.items() if value is not None},
    )


def commit_in(part: str) -> str:
    """Return the commit hash in a file or folder name, or an empty string."""
    pieces = filter(_COMMIT.fullmatch, re.split(r"[^0-9a-zA-Z]+", part))
    # a hash has letters and digits: skips words and dates
    hashes = [piece for piece in pieces if re.search("[a-f]", piece) and re.search(r"\d", piece)]
    return hashes[-1] if hashes else ""


def _number(value: Any) -> float | None:
    """Return a positive finite number, else None: a throughput or time of 0 means that the measurement failed."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if 0.0 < number < math.inf else None


def _milliseconds(value: Any) -> float | None:
    number = _number(value)
    return None if number is None else 1000 * number


def _text(value: Any) -> str:
    if value is None or isinstance(value, dict | list):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)[:MAX_TEXT]


def _iso(text: str) -> str:
    """Convert vLLM's ``20260125-222402`` to ISO 8601; other dates are ISO 8601 already."""
    if match := re.fullmatch(r"(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)", text):
        year, month, day, hour, minute, second = match.groups()
        return f"{year}-{month}-{day}T{hour}:{minute}:{second}"
    return text


def _statistics(key: str, values: Any) -> dict[str, Any]:
    """Flatten the ``{"mean": …, "p50": …, "p99": …}`` of `tapscope bench` to metrics with the prefix ``key``."""
    known = values if isinstance(values, dict) else {}
    return {f"{key}_{name}": known.get(name) for name in ("mean", "p50", "p99")}


def _words(*parts: Any) -> str:
    return ", ".join(text for text in map(_text, parts) if text)


def _model(value: Any) -> str:
    """Return the repository id, or the last two components of a local path."""
    return "/".join(_text(value).rstrip("/").split("/")[-2:]) or "unknown"


def _tool(item: Fields) -> str:
    backend = _text(item.get("backend") or item.get("endpoint_type"))
    return {"sglang": "SGLang", "vllm": "vLLM", "": "vLLM"}.get(backend.partition("-")[0], backend)


def _hardware(item: Fields) -> str:
    names = ("hardware", "gpu_config", "gpu", "gpu_type", "device", "device_name")
    return next((_text(item[name]) for name in names if item.get(name)), "")


def _parallel(item: Fields) -> str:
    sizes = (str(item.get(name)) for name in ("tensor_parallel_size", "tp_size", "tp"))  # a string in vLLM's metadata
    return next((f"TP {size}" for size in sizes if size.isdigit() and size not in ("0", "1")), "")


def _load(item: Fields, rate_name: str) -> str:
    most, rate = _number(item.get("max_concurrency")), _number(item.get(rate_name))
    parts = [f"concurrency {most:g}" if most else "", f"{rate:g} requests/s" if rate else ""]
    return _words(*parts) or "all at once"


def _length(item: Fields, name: str, direction: str) -> str:
    value = _number(item.get(name))
    return f"{value:g} {direction}" if value else ""


def _lengths(item: Fields, prompt: str, output: str) -> str:
    return _words(_length(item, prompt, "in"), _length(item, output, "out"))


def _mean_lengths(item: Fields) -> str:
    """Describe approximate prompt and output lengths, because vLLM's file does not contain the configured ones.

    The mean prompt length is rounded to two digits, the mean output length to a power of two: outputs that end at EOS
    differ slightly between commits and must stay in one series.
    """
    prompt, output = _number(item.get("total_input_tokens")), _number(item.get("total_output_tokens"))
    requests = _number(item.get("completed"))
    if not prompt or not output or not requests:
        return ""
    return f"about {float(f'{prompt / requests:.2g}'):g} in, {2 ** round(math.log2(output / requests))} out"


def _prompts(item: Fields) -> str:
    value = _number(item.get("num_prompts"))
    return f"{value:g} prompts" if value else ""
