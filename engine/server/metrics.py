"""Metrics: the engine's counters and the front's latencies as text for Prometheus."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tapscope.engine.output import Output
from tapscope.engine.server.meters import Stopwatch

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "tapscope_engine_"
_COUNTERS = {
    "kv_pages_evicted": "Pages taken back from the prefix cache.",
    "prefill_tokens": "Prompt tokens computed.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "decode_tokens": "Tokens generated.",
    "recomputed_tokens": "Tokens computed again after a preemption.",
    "num_preemptions": "Requests put back to be computed again later.",
    "num_steps": "Steps computed.",
}
_GAUGES = {
    "num_running": "Requests in the running batch.",
    "num_waiting": "Requests that wait to run.",
    "kv_pages_used": "Pages of the KV cache in use.",
    "kv_pages_cached": "Pages that only the prefix cache holds, and that may be taken back.",
    "kv_pages_total": "Pages of the KV cache.",
    "kv_bytes_total": "Bytes of the KV cache on each rank, as it is stored.",
    "kv_bytes_per_token": "Bytes of one token in the KV cache on each rank.",
}
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class FrontMetrics:
    """A listener of requests, and the text of everything."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter(
            f"{_PREFIX}requests", "Requests that ended, by finish reason; gone: the client left.", ["reason"],
            registry=registry,
        )  # fmt: skip
        self._ttft = _histogram("time_to_first_token_seconds", "Time until the first token came.", registry)
        self._itl = _histogram("inter_token_latency_seconds", "Time between two tokens of a request.", registry)
        self._e2e = _histogram("e2e_request_latency_seconds", "Time until the last token came.", registry)

    def gave(self, watch: Stopwatch, output: Output) -> None:
        """An output came."""
        if not output.token_ids:
            return
        if watch.between is None:
            self._ttft.observe(watch.ttft_s or 0.0)
            return
        seconds, num_tokens = watch.between
        for _ in range(num_tokens):
            self._itl.observe(seconds / num_tokens)

    def ended(self, request: str, prompt_tokens: int, watch: Stopwatch) -> None:
        """A request is over."""
        reason = "error" if watch.error is not None else watch.finish_reason or "gone"
        self._requests.labels(reason).inc()
        if reason in ("stop", "length"):
            self._e2e.observe(watch.elapsed_s)

    def exposition(self, engines: Mapping[str, Mapping[str, Any]]) -> bytes:
        """Prometheus' text format; ``engines`` are states by name of DP replica."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Engines(engines))
        return generate_latest(registry) + generate_latest(self._registry)


class _Engines(Collector):
    """Counters and gauges of the engines at one moment."""

    def __init__(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        """Every metric that an engine has a number for."""
        for name, text in _COUNTERS.items():
            yield self._filled(CounterMetricFamily(_PREFIX + name, text, labels=["replica"]), name)
        for name, text in _GAUGES.items():
            yield self._filled(GaugeMetricFamily(_PREFIX + name, text, labels=["replica"]), name)
        yield self._staged("startup_seconds", "Seconds that a stage of the start took.", "startup_s")
        yield self._staged("startup_bytes", "By how much a stage of the start grew the process.", "startup_bytes")

    def _staged(self, metric: str, text: str, name: str) -> Metric:
        family = GaugeMetricFamily(_PREFIX + metric, text, labels=["replica", "stage"])
        for replica, state in self._engines.items():
            for stage, value in state.get(name, {}).items():
                family.add_metric([replica, stage], value)
        return family

    def _filled(self, family: Any, name: str) -> Metric:
        for replica, state in self._engines.items():
            if name in state:
                family.add_metric([replica], float(state[name]))
        metric: Metric = family
        return metric


def _histogram(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(_PREFIX + name, text, buckets=_SECONDS, registry=registry)
