"""Load generator: send requests to an OpenAI-compatible server at a given rate and measure token latencies."""

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter
from typing import Any, Literal

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
    adapter_models: Mapping[str, str] = field(default_factory=dict)
    """Name of a LoRA adapter -> model name that selects it in requests."""
    is_chat: bool = False
    """Whether to use /v1/chat/completions instead of /v1/completions."""
    rate: float = float("inf")
    """Mean requests per second of a Poisson arrival process; infinite: send all requests immediately."""
    max_concurrency: int | None = None
    """Maximum number of concurrent requests; further requests are delayed, and timed from when they are sent."""
    seed: int = 0
    turn_delay_s: float = 0.0
    """Seconds between a response and the next turn of the conversation."""
    timeout_s: float = 600.0
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of every request body."""


async def run_load(
    load: LoadSettings, items: Sequence[BenchmarkRequest], on_done: Callable[[], None]
) -> tuple[list[RequestTiming], float, int]:
    """Run a load test; return (timings, duration in seconds, peak number of concurrent requests).

    The timings are in the order of ``items`` and their turns; ``on_done`` is called after each request.
    """
    # One connection per request: httpx may assign an idle connection to several waiting requests.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(load.timeout_s, connect=30.0)
    async with httpx.AsyncClient(base_url=load.url, limits=limits, timeout=timeout, headers=load.headers) as client:
        runner = _Runner(load, client, on_done)
        begun = perf_counter()
        tasks = []
        for arrival, item in zip(_arrivals(load, items), items, strict=True):
            if (wait := begun + arrival - perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.ensure_future(runner.converse(item)))
        timings = [timing for turns in await asyncio.gather(*tasks) for timing in turns]
        return timings, perf_counter() - begun, runner.peak


async def profile(url: str, action: Literal["start", "stop"], headers: Mapping[str, str]) -> dict[str, Any]:
    """Start or stop the server's torch profiler (SGLang's and vLLM's routes); raises UnreachableError."""
    try:
        async with httpx.AsyncClient(headers=headers, timeout=600) as client:  # writing a trace takes long
            answer = await client.post(f"{url}/{action}_profile")
    except httpx.HTTPError as error:
        raise UnreachableError(f"{url}/{action}_profile did not respond: {error!r}") from None
    if not answer.is_success:
        raise UnreachableError(f"{url}/{action}_profile returned {answer.status_code}: {answer.text[:300]}")
    try:
        body = answer.json()
    except ValueError:  # SGLang responds with plain text
        return {}
    return body if isinstance(body, dict) else {}


async def model_names(url: str, headers: Mapping[str, str]) -> list[str]:
    """Return the names of the server's models, at least one; raises UnreachableError."""
    answer = await _get(f"{url}/v1/models", headers)
    try:
        names = [str(each["id"]) for each in answer["data"]]
    except (KeyError, TypeError):
        names = []
    if not names:
        raise UnreachableError(f"{url}/v1/models lists no model; is it an OpenAI-compatible server?")
    return names


async def server_info(url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the response of /get_server_info; empty if the server does not have this route."""
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
    except httpx.TransportError as error:
        raise UnreachableError(f"no response from {url}: {str(error) or repr(error)}; is the server running?") from None
    except (httpx.HTTPError, ValueError, TypeError) as error:
        raise UnreachableError(f"{url} did not respond like an OpenAI-compatible server: {error!r}") from None


def _arrivals(load: LoadSettings, items: Sequence[BenchmarkRequest]) -> list[float]:
    """Return the send time of each item in seconds after the start: ``at_s``, or drawn from a Poisson process."""
    if any(item.at_s is not None for item in items):
        return [item.at_s or 0.0 for item in items]
    drawn = random.Random(load.seed)
    gaps = (drawn.expovariate(load.rate) if load.rate < float("inf") else 0.0 for _ in items[1:])
    return list(accumulate(gaps, initial=0.0))[: len(items)]


class _Runner:
    def __init__(self, load: LoadSettings, client: httpx.AsyncClient, on_done: Callable[[], None]) -> None:
        self._load = load
        self._client = client
        self._on_done = on_done
        self._room = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else nullcontext()
        self._live = 0
        self.peak = 0

    async def converse(self, item: BenchmarkRequest) -> list[RequestTiming]:
        """Send a request and its further turns; a failed request ends the conversation."""
        history: list[tuple[str, str]] = []
        timings: list[RequestTiming] = []
        for index, turn in enumerate((item, *item.followups)):
            if index:
                await asyncio.sleep(self._load.turn_delay_s)
            timings.append(await self._run(turn, item.adapter, history))
            if timings[-1].error is not None:
                break
            history.append((str(turn.prompt), timings[-1].text))
        return timings

    async def _run(self, item: BenchmarkRequest, adapter: str | None, history: list[tuple[str, str]]) -> RequestTiming:
        """Send one request and return its timing, in which errors are recorded."""
        async with self._room:
            self._live += 1
            self.peak = max(self.peak, self._live)
            timing = RequestTiming(perf_counter(), num_prompt=item.num_prompt)
            try:
                await self._stream(self._body(item, adapter, history), timing)
            except httpx.HTTPError as error:
                timing.error = repr(error)
            finally:
                timing.ended = perf_counter()
                self._live -= 1
                self._on_done()
            return timing

    async def _stream(self, body: dict[str, Any], timing: RequestTiming) -> None:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        async with self._client.stream("POST", path, json=body) as response:
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

    def _body(self, item: BenchmarkRequest, adapter: str | None, history: list[tuple[str, str]]) -> dict[str, Any]:
        model = self._load.model if adapter is None else self._load.adapter_models.get(adapter, adapter)
        body: dict[str, Any] = {"max_tokens": item.num_output, "temperature": 0} | dict(self._load.extra)
        if item.body.get("max_completion_tokens") is not None:  # OpenAI rejects bodies with both fields
            del body["max_tokens"]
        body |= dict(item.body) | {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        if item.body:
            return body
        if self._load.is_chat:
            turns = [(role, text) for turn in history for role, text in zip(("user", "assistant"), turn, strict=True)]
            turns.append(("user", str(item.prompt)))
            return body | {"messages": [{"role": role, "content": text} for role, text in turns]}
        if history:
            return body | {"prompt": "".join(text for turn in history for text in turn) + str(item.prompt)}
        return body | {"prompt": item.prompt}


def _note(timing: RequestTiming, chunk: dict[str, Any], last: float | None) -> float | None:
    """Record a chunk's arrival and token counts in ``timing``; return the arrival time of the last text."""
    if "error" in chunk:
        timing.error = str(chunk["error"].get("message", chunk["error"]))[:300]
    if usage := chunk.get("usage"):
        timing.num_prompt, timing.num_output = usage["prompt_tokens"], usage["completion_tokens"]
        timing.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    choices = chunk.get("choices") or ()
    timing.text += "".join(_text(choice) for choice in choices[:1])
    if not any(_has_text(choice) for choice in choices):
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


def _text(choice: dict[str, Any]) -> str:
    """Return the text of the reply without reasoning, as included in further turns."""
    delta = choice.get("delta") or choice
    return delta.get("text") or delta.get("content") or ""
