"""ServerMetrics: engine counters and request latencies for Prometheus."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tapscope.engine.requests.output import Output
from tapscope.engine.runners.latency_metrics import RequestTimer
from tapscope.http.prometheus import exposition

_PREFIX = "tapscope_engine_"
_COUNTERS = {
    "kv_pages_evicted": "Pages evicted from the prefix cache.",
    "prefill_tokens": "Prompt tokens computed.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "decode_tokens": "Tokens generated.",
    "recomputed_tokens": "Tokens computed again after a preemption.",
    "num_preemptions": "Preemptions of requests, which are recomputed later.",
    "num_steps": "Steps computed.",
    "corrupted_requests": "Requests with NaN in their logits.",
}
_GAUGES = {
    "num_running": "Requests in the running batch.",
    "num_waiting": "Requests that wait to run.",
    "num_grammars_compiling": "Grammars that are being compiled.",
    "kv_pages_used": "Pages of the KV cache held by requests.",
    "kv_pages_cached": "Pages held only by the prefix cache, which can be evicted.",
    "kv_pages_total": "Pages of the KV cache.",
    "kv_bytes_total": "Size of the KV cache on each rank in bytes.",
    "kv_bytes_per_token": "Size of one token in the KV cache of each rank in bytes.",
}
_SPECULATION = {
    "num_verifications": "Verifications of a request's draft tokens.",
    "num_draft_tokens": "Draft tokens verified.",
    "num_accepted_tokens": "Draft tokens accepted.",
    "draft_seconds": "Seconds spent on proposing draft tokens.",
    "num_unprofitable_steps": "Steps without drafts because drafts would take longer than they save.",
}
_BY_POSITION = {
    "drafted_by_position": "Draft tokens verified, by their position after the last token.",
    "accepted_by_position": "Draft tokens accepted, by their position after the last token.",
}
_OF_EACH_RANK = ("kv_bytes_total", "kv_bytes_per_token")
"""Per-rank gauges, equal on all ranks of all replicas, which must not be summed."""
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


_TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))


class ServerMetrics:
    """Request listener that records latencies and exposes all metrics of the server."""

    def __init__(self, model_name: str, dp: int = 1) -> None:
        """``dp`` is the number of replicas; metrics have the labels ``dp_rank`` and, as in vLLM, ``model_name``."""
        self._labels = {"model_name": model_name}
        self._registry = registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter(
            f"{_PREFIX}requests", "Finished requests by finish reason; gone: the client disconnected.",
            ["dp_rank", "reason"], registry=registry,
        )  # fmt: skip
        self._routed = Counter(
            f"{_PREFIX}routed_requests", "Requests routed to a replica, by reason: pinned, prefix or load.",
            ["dp_rank", "by"], registry=registry,
        )  # fmt: skip
        self._ttft = _histogram("time_to_first_token_seconds", "Time to the first token.", registry)
        self._itl = _histogram("inter_token_latency_seconds", "Time between two tokens of a request.", registry)
        self._e2e = _histogram("e2e_request_latency_seconds", "Time to the last token.", registry)
        self._queue_time = _histogram("request_queue_time_seconds", "Time that requests waited to run.", registry)
        self._prompt_tokens = _histogram("request_prompt_tokens", "Prompt tokens of requests.", registry, _TOKENS)
        for histogram in (self._ttft, self._itl, self._e2e, self._queue_time, self._prompt_tokens):
            for number in range(dp):
                histogram.labels(str(number))  # exposed from the start, with zero observations

    def on_output(self, timer: RequestTimer, output: Output) -> None:
        """Record the latencies of an output: queue time, time to first token, or inter-token latency."""
        replica = str(timer.dp_rank)
        if output.queue_time_s is not None:
            self._queue_time.labels(replica).observe(output.queue_time_s)
        if not output.token_ids:
            return
        if timer.between is None:
            self._ttft.labels(replica).observe(timer.ttft_s or 0.0)
            return
        seconds, num_tokens = timer.between
        for _ in range(num_tokens):
            self._itl.labels(replica).observe(seconds / num_tokens)

    def ended(self, request: str, prompt_tokens: int, timer: RequestTimer) -> None:
        """Record the end of a request: finish reason, routing, latency and prompt length."""
        reason = "error" if timer.error is not None else timer.finish_reason or "gone"
        self._requests.labels(str(timer.dp_rank), reason).inc()
        self._routed.labels(str(timer.dp_rank), timer.routed_by).inc()
        if reason in ("stop", "length"):
            self._e2e.labels(str(timer.dp_rank)).observe(timer.elapsed_s)
        if reason != "error":
            self._prompt_tokens.labels(str(timer.dp_rank)).observe(prompt_tokens)

    def exposition(self, engines: Sequence[Mapping[str, Any]], accept: str = "") -> bytes:
        """Encode all metrics like :func:`tapscope.http.prometheus.exposition`.

        ``engines`` are the states of the DP replicas, in order.
        """
        return exposition([_Labelled(each, self._labels) for each in (_Engines(engines), self._registry)], accept)


class _Labelled(Collector):
    """Wrapper of a collector that adds labels to each sample."""

    def __init__(self, collector: Collector, labels: Mapping[str, str]) -> None:
        self._collector, self._labels = collector, labels

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics with the added labels."""
        for metric in self._collector.collect():
            metric.samples = [each._replace(labels={**each.labels, **self._labels}) for each in metric.samples]
            yield metric


class _Engines(Collector):
    """Snapshot of the counters and gauges of all engines."""

    def __init__(self, engines: Sequence[Mapping[str, Any]]) -> None:
        self._engines = {str(number): state for number, state in enumerate(engines)}

    def collect(self) -> Iterable[Metric]:
        """Yield all counters and gauges."""
        for name, text in _COUNTERS.items():
            yield self._filled(CounterMetricFamily(_PREFIX + name, text, labels=["dp_rank"]), name)
        for name, text in _GAUGES.items():
            yield self._filled(GaugeMetricFamily(_PREFIX + name, text, labels=["dp_rank"]), name)
        yield from self._speculation()
        yield self._staged("startup_seconds", "Duration of each start-up stage.", "startup_s")
        yield self._staged("startup_bytes", "Growth of resident memory in each start-up stage.", "startup_bytes")

    def _speculation(self) -> Iterable[Metric]:
        """Yield the metrics of engines with speculation, prefixed ``spec_`` as in SGLang and vLLM."""
        stats = {replica: state["speculation"] for replica, state in self._engines.items() if "speculation" in state}
        if not stats:
            return
        for name, text in _SPECULATION.items():
            family = CounterMetricFamily(f"{_PREFIX}spec_{name}", text, labels=["dp_rank"])
            for replica, values in stats.items():
                family.add_metric([replica], float(values[name]))
            yield family
        for name, text in _BY_POSITION.items():
            family = CounterMetricFamily(f"{_PREFIX}spec_{name}", text, labels=["dp_rank", "position"])
            for replica, values in stats.items():
                for position, count in enumerate(values[name]):
                    family.add_metric([replica, str(position)], float(count))
            yield family
        text = "Tokens that a verification yields on average; 1 when no draft token is accepted."
        gauge = GaugeMetricFamily(f"{_PREFIX}spec_accept_length", text, labels=["dp_rank"])
        for replica, values in stats.items():
            gauge.add_metric([replica], float(values["acceptance_length"]))
        yield gauge
        text = "Time that a draft token adds to a step of at most num_requests, relative to a token without drafts."
        gauge = GaugeMetricFamily(f"{_PREFIX}spec_draft_cost", text, labels=["dp_rank", "num_requests"])
        for replica, values in stats.items():
            for count, cost in values["draft_costs"].items():
                gauge.add_metric([replica, count], cost)
        yield gauge

    def _staged(self, metric: str, text: str, name: str) -> Metric:
        family = GaugeMetricFamily(_PREFIX + metric, text, labels=["dp_rank", "stage"])
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


def _histogram(name: str, text: str, registry: CollectorRegistry, buckets: Sequence[float] = _SECONDS) -> Histogram:
    return Histogram(_PREFIX + name, text, ["dp_rank"], buckets=buckets, registry=registry)


def info_of(engines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the settings and load of all replicas: counts are summed, start-up times are the maximum.

    With several replicas, ``replicas`` contains the state of each.
    """
    whole = dict(engines[0])
    if len(engines) == 1:
        return whole
    counted = [name for name in (*_COUNTERS, *_GAUGES) if name in whole and name not in _OF_EACH_RANK]
    whole |= {name: sum(state[name] for state in engines) for name in counted}
    for name, join in (("startup_s", max), ("startup_bytes", sum)):
        whole[name] = {stage: join(state[name].get(stage, 0) for state in engines) for stage in whole[name]}
    if "speculation" in whole:
        whole["speculation"] = summed_speculation([state["speculation"] for state in engines])
    return whole | {"replicas": [dict(state) for state in engines]}


def summed_speculation(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum the speculation counters of several engines; draft costs are per engine and left out."""
    summed: dict[str, Any] = {name: sum(state[name] for state in states) for name in _SPECULATION}
    for name in _BY_POSITION:
        summed[name] = [sum(counts) for counts in zip_longest(*(state[name] for state in states), fillvalue=0)]
    count = summed["num_verifications"]
    return summed | {"acceptance_length": 1 + summed["num_accepted_tokens"] / count if count else 0.0}
