"""Load generator: sends requests to an OpenAI-compatible server at a given rate and times every token."""

import asyncio
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx

from tapscope.core.errors import UnreachableError
from tapscope.engine.bench.latency_stats import RequestTiming
from tapscope.engine.bench.workload import BenchmarkRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """Settings of a load test."""

    url: str
    """Base URL of the server, without ``/v1``."""
    model: str
    is_chat: bool = False
    """Whether to use /v1/chat/completions instead of /v1/completions."""
    rate: float = float("inf")
    """Requests per second, arriving as a Poisson process; infinite sends all immediately."""
    max_concurrency: int | None = None
    """Maximum number of concurrent requests; the times of the others start when they are sent."""
    seed: int = 0
    timeout_s: float = 600.0
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of every request body."""


async def run_load(
    load: LoadSettings, items: Sequence[BenchmarkRequest], on_done: Callable[[], None]
) -> tuple[list[RequestTiming], float, int]:
    """(timings in the order of ``items``, duration in seconds, peak number of concurrent requests)."""
    # One connection per request: httpx assigns an idle connection to several waiting requests.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(load.timeout_s, connect=30.0)
    async with httpx.AsyncClient(base_url=load.url, limits=limits, timeout=timeout, headers=load.headers) as client:
        runner = _Runner(load, client, on_done)
        begun = perf_counter()
        tasks = []
        for gap, item in zip(_gaps(load, len(items)), items, strict=True):
            if gap:
                await asyncio.sleep(gap)
            tasks.append(asyncio.ensure_future(runner.run(item)))
        timings = await asyncio.gather(*tasks)
        return timings, perf_counter() - begun, runner.peak


async def first_model(url: str, headers: Mapping[str, str]) -> str:
    """Name of the server's first model; raises UnreachableError."""
    answer = await _get(f"{url}/v1/models", headers)
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise UnreachableError(f"{url}/v1/models lists no model; is it an OpenAI-compatible server?") from None


async def server_info(url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """/get_server_info of a tapscope server; empty for other servers."""
    try:
        return await _get(f"{url}/get_server_info", headers)
    except UnreachableError:
        return {}


async def _get(url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    try:
        async with httpx.AsyncClient(headers=headers, timeout=30) as client:
            answer = await client.get(url)
        if answer.status_code in (401, 403):
            status = answer.status_code
            raise UnreachableError(f"{url} requires an API key ({status}); set TAPSCOPE_API_KEY or OPENAI_API_KEY")
        if not answer.is_success:
            raise UnreachableError(f"{url} returned {answer.status_code}; is it an OpenAI-compatible server?")
        return dict(answer.json())
    except (httpx.HTTPError, ValueError, TypeError) as error:
        raise UnreachableError(f"{url} did not respond like an OpenAI-compatible server: {error!r}") from None


def _gaps(load: LoadSettings, count: int) -> Iterable[float]:
    """Seconds before each request: exponentially distributed; the first is sent immediately."""
    drawn = random.Random(load.seed)
    return [0.0 if index == 0 or load.rate == float("inf") else drawn.expovariate(load.rate) for index in range(count)]


class _Runner:
    def __init__(self, load: LoadSettings, client: httpx.AsyncClient, on_done: Callable[[], None]) -> None:
        self._load = load
        self._client = client
        self._on_done = on_done
        self._room = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else nullcontext()
        self._live = 0
        self.peak = 0

    async def run(self, item: BenchmarkRequest) -> RequestTiming:
        """Send one request; errors are recorded in its timing."""
        async with self._room:
            self._live += 1
            self.peak = max(self.peak, self._live)
            timing = RequestTiming(perf_counter(), num_prompt=item.num_prompt)
            try:
                await self._stream(item, timing)
            except httpx.HTTPError as error:
                timing.error = repr(error)
            finally:
                timing.ended = perf_counter()
                self._live -= 1
                self._on_done()
            return timing

    async def _stream(self, item: BenchmarkRequest, timing: RequestTiming) -> None:
        path = "/v1/chat/completions" if self._load.is_chat else "/v1/completions"
        async with self._client.stream("POST", path, json=self._body(item)) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                timing.error = f"{response.status_code}: {text[:300]}"
                return
            last: float | None = None
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    last = _note(timing, json.loads(line[6:]), last)
        if timing.error is None and not timing.num_output:
            timing.error = "the stream ended without a token or without usage"

    def _body(self, item: BenchmarkRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._load.model, "stream": True, "max_tokens": item.num_output}
        body |= {"stream_options": {"include_usage": True}, "temperature": 0} | dict(self._load.extra)
        if self._load.is_chat:
            return body | {"messages": [{"role": "user", "content": item.prompt}]}
        return body | {"prompt": item.prompt}


def _note(timing: RequestTiming, chunk: dict[str, Any], last: float | None) -> float | None:
    """Record a chunk's arrival and token counts in ``timing``; returns when the last text arrived."""
    if "error" in chunk:
        timing.error = str(chunk["error"].get("message", chunk["error"]))[:300]
    if usage := chunk.get("usage"):
        timing.num_prompt, timing.num_output = usage["prompt_tokens"], usage["completion_tokens"]
        timing.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not any(_has_text(choice) for choice in chunk.get("choices") or ()):
        return last
    now = perf_counter()
    if last is None:
        timing.first = now
    else:
        timing.gaps.append(now - last)
    return now


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    return any(delta.get(name) for name in ("text", "content", "reasoning_content", "reasoning", "tool_calls"))
