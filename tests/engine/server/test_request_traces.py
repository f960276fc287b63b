"""OpenTelemetry traces: spans that a collector receives over HTTP."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import make_llama
from engine_http import served

from tapscope.core.errors import ConfigError, MissingExtraError
from tapscope.engine.server.request_traces import RequestTraces

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
GREEDY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


class Collector:
    """A collector that receives traces as OTLP over HTTP."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Discard the log line."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def resource(self) -> dict[str, Any]:
        return _values(self.requests[0].resource_spans[0].resource.attributes)

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def _values(attributes: Any) -> dict[str, Any]:
    found = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1)


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk", reason="needs tapscope[otel]")
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_spans_follow_the_conventions_and_continue_the_callers_trace(path: Path, collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "mine"}
    with (
        served(path, settings={"otlp_traces_endpoint": collector.url, "model_name": "tiny"}) as address,
        httpx.Client(base_url=address, headers=headers, timeout=60) as client,
    ):
        body = {"model": "tiny", "prompt": [5, 6, 7], "seed": 3, "n": 2, "stop": ["\x00"]} | GREEDY
        client.post("/v1/completions", json=body).raise_for_status()
        client.get("/metrics").raise_for_status()
    assert collector.resource["service.name"] == "tapscope"
    by_name: dict[str, list[Any]] = {}
    for span in collector.spans:
        by_name.setdefault(span.name, []).append(span)
    assert {name: len(spans) for name, spans in by_name.items()} == {
        "POST /v1/completions": 1,
        "text_completion tiny": 2,
    }
    (outer,) = by_name["POST /v1/completions"]
    assert (outer.trace_id.hex(), outer.parent_span_id.hex()) == (TRACE, CALLER)
    assert _values(outer.attributes)["http.response.status_code"] == 200
    assert _values(outer.attributes)["http.response.header.x-request-id"] == ["mine"]
    for span in by_name["text_completion tiny"]:
        assert (span.trace_id, span.parent_span_id) == (outer.trace_id, outer.span_id)
        assert outer.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano < span.events[0].time_unix_nano <= span.end_time_unix_nano
        found = _values(span.attributes)
        assert 0 < found.pop("gen_ai.response.time_to_first_chunk") < 60
        assert found.pop("gen_ai.response.id").startswith("cmpl-")
        assert found.pop("gen_ai.usage.cache_read.input_tokens") >= 0
        assert found.pop("gen_ai.request.seed") is not None
        assert found == {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "tapscope",
            "gen_ai.request.model": "tiny",
            "gen_ai.request.max_tokens": 4,
            "gen_ai.request.temperature": 0.0,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.stop_sequences": ["\x00"],
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 4,
            "tapscope.dp_rank": 0,
        }


def test_streams_refusals_and_lost_clients_have_spans(path: Path, collector: Collector) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
    with (
        served(path, settings={"otlp_traces_endpoint": collector.url, "model_name": "tiny"}) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        client.post("/generate", json=body | {"stream": True, "rid": "streamed"}).raise_for_status()
        far = {"sampling_params": {"max_new_tokens": 999}, "rid": "refused"}
        assert client.post("/generate", json=body | far).status_code == 400
        long = {"sampling_params": {"max_new_tokens": 200, "ignore_eos": True}, "rid": "lost"}
        with client.stream("POST", "/generate", json=body | long | {"stream": True}) as response:
            next(response.iter_lines())
    outer = {span.span_id: span for span in collector.spans if span.name == "POST /generate"}
    spans = {_values(s.attributes)["gen_ai.response.id"]: s for s in collector.spans if s.span_id not in outer}
    assert spans.keys() == {"streamed", "refused", "lost"}
    parents = {name: outer[span.parent_span_id] for name, span in spans.items()}
    assert len({parent.trace_id for parent in parents.values()}) == 3  # each request starts a trace
    whole, streamed = parents["streamed"], spans["streamed"]
    assert whole.end_time_unix_nano >= streamed.end_time_unix_nano
    assert _values(spans["refused"].attributes)["error.type"] == "UsageError"
    assert "the limit is 256" in spans["refused"].status.message
    assert _values(parents["refused"].attributes)["http.response.status_code"] == 400
    assert _values(spans["lost"].attributes)["error.type"] == "client_disconnected"


def test_a_dead_collector_disturbs_neither_requests_nor_the_end(path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs tapscope[otel]")
    settings = {"otlp_traces_endpoint": "http://127.0.0.1:1/v1/traces"}
    with served(path, settings=settings) as address:
        body = {"prompt": [5, 6, 7]} | GREEDY
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60).raise_for_status().json()
        ended = time.monotonic()
    assert time.monotonic() - ended < 6  # the exporter alone would retry for 10 s
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("endpoint", ["localhost:4317", "http://", "grpc://localhost:4317", "http://localhost:x"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="expected the URL of a collector"):
        RequestTraces(endpoint, "tiny")


def test_grpc_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL='grpc' is not supported"):
        RequestTraces("http://localhost:4317", "tiny")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingExtraError, match=r"otlp_traces_endpoint needs .*: pip install 'tapscope\[otel\]'"):
        RequestTraces("http://localhost:4318/v1/traces", "tiny")


def test_without_an_endpoint_the_sdk_is_not_imported() -> None:
    program = (
        "import sys; from tapscope.engine.server.app import build_app\n"
        "from tapscope.engine.server import ServerSettings; from tapscope.engine.server.app_state import AppState\n"
        "app = build_app(AppState('tiny', ServerSettings()), lambda metrics: None)\n"
        "loaded = [m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]\n"
        "print(loaded, [each.cls.__name__ for each in app.user_middleware])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    middleware = ["RequestIdMiddleware", "CrossOriginMiddleware", "BodyLimitMiddleware"]
    assert done.stdout.strip() == f"[] {middleware}"  # fastapi may load the opentelemetry API
