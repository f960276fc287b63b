"""Benchmark requests from JSON lines files: traces with arrival times, and request bodies of OpenAI's API."""

import json
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec

from tapscope.core.errors import DataError
from tapscope.engine.bench.workload import BenchmarkRequest, PromptGenerator, count_tokens
from tapscope.engine.text.tokenizer import Tokenizer

_MODES = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}


class TraceEntry(msgspec.Struct, frozen=True):
    """A line of a trace in Mooncake's format (github.com/kvcache-ai/Mooncake, FAST25-release/traces)."""

    timestamp: float
    """Arrival time in milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    """One id per prompt block, which depends on all earlier blocks: prompts with equal ids share a prefix."""


def trace_items(
    path: Path, count: int | None, writer: PromptGenerator, *, block_size: int, slowdown: float
) -> list[BenchmarkRequest]:
    """Read the first ``count`` requests of a trace (None: all), in timestamp order.

    The ``block_size`` tokens of a block are random, but equal for equal block ids. Arrival times are multiplied by
    ``slowdown``. Raises DataError.
    """
    entries = sorted(_entries(path), key=lambda entry: entry.timestamp)[:count]
    blocks: dict[int, Sequence[Any]] = {}
    items = []
    for entry in entries:
        pieces: list[Any] = []
        for number in entry.hash_ids:
            if number not in blocks:
                blocks[number] = writer.pieces(block_size)
            pieces += blocks[number]
        pieces = pieces[: entry.input_length]
        pieces += writer.pieces(entry.input_length - len(pieces))
        at_s = (entry.timestamp - entries[0].timestamp) / 1000 * slowdown
        items.append(writer.item(pieces, entry.output_length, at_s=at_s))
    return items


def _entries(path: Path) -> Iterator[TraceEntry]:
    for where, line in _lines(path):
        try:
            entry = msgspec.json.decode(line, type=TraceEntry)
        except msgspec.MsgspecError as error:
            form = '{"timestamp": MS, "input_length": N, "output_length": N, "hash_ids": [ID, ...]}'
            raise DataError(f"{where} is not a request of a trace ({form}): {error}") from None
        if entry.input_length < 1 or entry.output_length < 1:
            raise DataError(f"{where}: input_length and output_length must be at least 1")
        yield entry


def openai_items(
    path: Path, count: int | None, *, tokenizer: Tokenizer | None, num_output: int
) -> list[BenchmarkRequest]:
    """Read ``count`` request bodies (None: all) from ``path``, repeating them if the file has fewer.

    Each line is the body of a completion or chat completion, or a line in the format of OpenAI's Batch API, with the
    field ``body``. Bodies without a maximum number of tokens generate ``num_output``. Raises DataError.
    """
    items = [_openai_item(where, line, tokenizer, num_output) for where, line in _lines(path)]
    return items if count is None else list(islice(cycle(items), count))


def _openai_item(where: str, line: bytes, tokenizer: Tokenizer | None, num_output: int) -> BenchmarkRequest:
    try:
        stored: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    url = stored.get("url") if isinstance(stored, dict) else None
    body = stored.get("body", stored) if isinstance(stored, dict) else stored
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        raise DataError(f"{where} has no body with either 'messages' or 'prompt'")
    if url is not None and _MODES.get(url) not in body:
        raise DataError(f"{where}: the url {url!r} does not fit its body; supported: {', '.join(_MODES)}")
    most = body.get("max_completion_tokens") or body.get("max_tokens") or num_output
    if not isinstance(most, int) or most < 1:
        raise DataError(f"{where}: max_tokens is {most!r}; it must be an integer of at least 1")
    fields = {name: value for name, value in body.items() if name not in ("model", "stream", "stream_options")}
    text = _text(body["messages"]) if "messages" in body else body["prompt"]
    num_prompt = len(text) if isinstance(text, list) else count_tokens(str(text), tokenizer)
    return BenchmarkRequest(prompt="", num_prompt=num_prompt, num_output=most, body=fields)


def _text(messages: Any) -> str:
    """Join the contents of all messages; contents other than strings are encoded as JSON."""
    contents = (message.get("content") if isinstance(message, dict) else message for message in messages)
    return "\n".join(one if isinstance(one, str) else json.dumps(one) for one in contents)


def _lines(path: Path) -> list[tuple[str, bytes]]:
    """Read the non-empty lines as (``PATH:LINE`` for error messages, content); raises DataError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    lines = [(f"{path}:{number}", line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    if not lines:
        raise DataError(f"{path} has no request")
    return lines
