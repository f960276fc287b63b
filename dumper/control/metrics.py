"""Prometheus metrics of the recorder's state, formatted by prometheus_client."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tapscope.http import prometheus

_COUNTERS = {
    "tapscope_records": ("total_records", "Records written."),
    "tapscope_lines": ("total_records", "Deprecated: tapscope_records."),
    "tapscope_payload_bytes": ("total_bytes", "Payload bytes written."),
    "tapscope_values_dropped": ("dropped", "Values dropped because the pipeline was full, or the recorder had ended."),
    "tapscope_values_failed": ("failed", "Values that could not be captured."),
    "tapscope_values_compared": ("compared", "Tensors compared with the reference run."),
    "tapscope_diverged_steps": ("diverged_steps", "Steps that diverged from the reference run."),
}
_GAUGES = {
    "tapscope_step": ("step", "Current step of the rank, -1 before the first."),
    "tapscope_epoch": ("epoch", "Configuration epoch applied by the rank."),
    "tapscope_capture_steps_left": ("capture_steps_left", "Steps left of a capture."),
    "tapscope_idle_seconds": ("idle_s", "Seconds since the rank's step number last increased."),
    "tapscope_queue_bytes": ("queue_bytes", "Bytes queued for the recorder."),
    "tapscope_shm_bytes": ("shm_bytes", "Size of the shared-memory ring."),
    "tapscope_shm_used_bytes": ("shm_bytes_used", "Bytes in use in the shared-memory ring."),
    "tapscope_ring_bytes": ("ring_bytes", "Deprecated: tapscope_shm_bytes."),
    "tapscope_ring_used_bytes": ("ring_bytes_used", "Deprecated: tapscope_shm_used_bytes."),
}


def exposition(state: Mapping[str, Any], accept: str = "") -> bytes:
    """Return a ``state`` response as metrics labeled by rank, see :func:`tapscope.http.prometheus.exposition`."""
    return prometheus.exposition([_State(state)], accept)


class _State(Collector):
    """Prometheus collector of one ``state`` response."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics; a rank that does not report a value is omitted from its metric."""
        ranks = self._state["ranks"]
        for metric, (name, text) in _COUNTERS.items():
            yield _filled(CounterMetricFamily(metric, text, labels=["rank"]), ranks, name)
        for metric, (name, text) in _GAUGES.items():
            yield _filled(GaugeMetricFamily(metric, text, labels=["rank"]), ranks, name)
        up = GaugeMetricFamily("tapscope_rank_up", "1 where the rank is connected.", labels=["rank"])
        for rank in ranks:
            up.add_metric([str(rank["rank"])], float(rank["status"] == "connected"))
        yield up
        yield from self._write_metrics()
        yield GaugeMetricFamily("tapscope_agreed_epoch", "Newest epoch all ranks accepted.", self._state["epoch"])
        yield GaugeMetricFamily("tapscope_world_size", "Ranks of the job.", self._state["world_size"])
        yield GaugeMetricFamily("tapscope_hints", "Hints in /dumper/state.", len(self._state["hints"]))

    def _write_metrics(self) -> Iterable[Metric]:
        seconds = CounterMetricFamily("tapscope_write_seconds", "Seconds spent writing.", labels=["rank"])
        speed = GaugeMetricFamily(
            "tapscope_write_bytes_per_second", "Payload bytes per second of writing.", labels=["rank"]
        )
        nbytes = {str(rank["rank"]): rank["total_bytes"] for rank in self._state["ranks"]}
        for rank, spent in self._state["write_s"].items():
            seconds.add_metric([rank], spent)
            speed.add_metric([rank], nbytes[rank] / spent if spent else 0.0)
        return seconds, speed


def _filled(family: Any, ranks: list[dict[str, Any]], name: str) -> Metric:
    for rank in ranks:
        if rank.get(name) is not None:
            family.add_metric([str(rank["rank"])], rank[name])
    return family  # type: ignore[no-any-return]
