"""RequestTraces: OpenTelemetry spans of HTTP requests and of their generations, sent as OTLP over HTTP."""

import os
import threading
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tapscope._version import __version__
from tapscope.core.errors import ConfigError
from tapscope.core.extras import requiring
from tapscope.engine.requests.output import Output
from tapscope.engine.runners.latency_metrics import RequestTimer
from tapscope.engine.server.request_id import request_id

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Traced routes: path -> ``gen_ai.operation.name``."""
_PROTOCOL = "http/protobuf"
_NS = 1e9
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Traced:
    """The HTTP request that a generation belongs to."""

    operation: str
    context: Any
    """OpenTelemetry context that contains the request's span."""


_traced: ContextVar[_Traced] = ContextVar("traced")


class RequestTraces:
    """Request listener that records one span per generation, as a child of the span of :class:`TraceMiddleware`.

    Attributes follow OpenTelemetry's semantic conventions for generative AI (``gen_ai.*``) and HTTP (``http.*``,
    ``url.*``). Prompts and outputs are not recorded.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        """Start a thread that sends spans to ``endpoint`` in batches; raises ConfigError, MissingExtraError.

        ``model`` is the served model's name. OpenTelemetry's environment variables apply: ``OTEL_SERVICE_NAME``,
        ``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS`` and others.
        """
        _check(endpoint)
        with requiring("otlp_traces_endpoint", "otel"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

        own = Resource({"service.name": "tapscope", "service.version": __version__})
        given = OTELResourceDetector().detect()
        self._exporter, self._model = OTLPSpanExporter(endpoint=endpoint), model
        self._provider = TracerProvider(resource=Resource.create().merge(own).merge(given), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer = self._provider.get_tracer("tapscope.engine", __version__)

    def on_output(self, timer: RequestTimer, output: Output) -> None:
        """Ignore the output: the span is recorded when the request ends."""

    def ended(self, request: str, prompt_tokens: int, timer: RequestTimer) -> None:
        """Record the span of a generation; it has no parent unless a traced HTTP request sent the generation."""
        from opentelemetry.trace import StatusCode

        traced = timer.context.get(_traced)
        operation = "text_completion" if traced is None else traced.operation
        model = f"{self._model}:{timer.adapter}" if timer.adapter else self._model
        now = time.time_ns()
        started = now - int(timer.elapsed_s * _NS)
        span = self.tracer.start_span(
            f"{operation} {model}", context=None if traced is None else traced.context, start_time=started
        )
        span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "tapscope",
                "gen_ai.request.model": model,
                "gen_ai.response.id": request,
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": timer.cached_tokens,
                "gen_ai.usage.output_tokens": timer.num_tokens,
                "tapscope.dp_rank": timer.dp_rank,
            }
        )
        if operation != "embeddings":
            span.set_attributes(_sampling(timer))
        if timer.ttft_s is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", timer.ttft_s)
            span.add_event("first token", timestamp=started + int(timer.ttft_s * _NS))
        if timer.finish_reason is not None:
            span.set_attribute("gen_ai.response.finish_reasons", [timer.finish_reason])
        elif timer.error is not None:
            span.set_attribute("error.type", timer.error_type)
            span.set_status(StatusCode.ERROR, timer.error)
        else:
            span.set_attribute("error.type", "client_disconnected")
        span.end(now)

    def close(self) -> None:
        """Flush the remaining spans for at most two seconds, and stop the thread."""
        timer = threading.Timer(_CLOSE_S, self._exporter.shutdown)  # stops the exporter's retries
        timer.start()
        self._provider.shutdown()
        timer.cancel()


class TraceMiddleware:
    """ASGI middleware that records a span for each HTTP request that generates or embeds.

    The span continues the caller's trace if the request has a ``traceparent`` header (W3C Trace Context).
    ``OTEL_PROPAGATORS`` selects other propagators.
    """

    def __init__(self, app: ASGIApp, traces: RequestTraces) -> None:
        self._app, self._tracer = app, traces.tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI) within a span."""
        operation = _OPERATIONS.get(scope.get("path", "")) if scope["type"] == "http" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        path, method = scope["path"], scope["method"]
        span = self._tracer.start_span(
            f"{method} {path}",
            context=propagate.extract(Headers(scope=scope)),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": method,
                "http.route": path,
                "url.path": path,
                "url.scheme": scope.get("scheme", "http"),
                "http.response.header.x-request-id": [request_id.get() or ""],
            },
        )

        async def send_with_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set_attribute("http.response.status_code", status)
                if status >= 500:  # the semantic conventions count only server failures as errors
                    span.set_attribute("error.type", str(status))
                    span.set_status(StatusCode.ERROR)
            await send(message)

        token = _traced.set(_Traced(operation, set_span_in_context(span)))
        try:
            await self._app(scope, receive, send_with_status)
        finally:
            _traced.reset(token)
            span.end()


def _sampling(timer: RequestTimer) -> dict[str, Any]:
    """Return the span attributes of the sampling parameters; unset parameters are left out."""
    params = timer.params
    values = {
        "gen_ai.request.max_tokens": params.max_new_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.stop_sequences": list(params.stop) or None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _check(endpoint: str) -> None:
    """Raise ConfigError unless ``endpoint`` is a URL and the configured protocol is OTLP over HTTP."""
    try:
        url = urlsplit(endpoint)
        is_valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        example = "http://localhost:4318/v1/traces"
        raise ConfigError(f"otlp_traces_endpoint={endpoint!r}: expected the URL of a collector, such as {example}")
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if os.environ.get(name, _PROTOCOL) != _PROTOCOL:
            raise ConfigError(f"{name}={os.environ[name]!r} is not supported; traces are sent as {_PROTOCOL}")
