"""Workloads: the prompts of a benchmark and the number of tokens to generate for each."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tapscope.core.errors import DataError, UsageError
from tapscope.engine.text.tokenizer import Tokenizer

_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRequest:
    """One request of a benchmark."""

    prompt: str | tuple[int, ...]
    """A string, or token ids."""
    num_prompt: int
    """Number of tokens in the prompt; without a tokenizer, number of words."""
    num_output: int
    """Number of tokens to generate."""
    at_s: float | None = None
    """Send time in seconds after the first request; None: determined by :attr:`.LoadSettings.rate`."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request body in place of ``prompt``; a body with ``messages`` is a chat request."""
    followups: "tuple[BenchmarkRequest, ...]" = ()
    """Further turns of a conversation: each is sent with all earlier turns, after the response to the previous turn."""
    adapter: str | None = None
    """Name of the LoRA adapter; None: the base model."""


class PromptGenerator:
    """Generator of prompts of a given length from random token ids, or from random words without a tokenizer."""

    def __init__(self, seed: int, tokenizer: Tokenizer | None, *, as_text: bool) -> None:
        self._random = random.Random(seed)
        self._tokenizer = tokenizer
        self._as_text = as_text

    def length(self, middle: int, spread: float) -> int:
        """Draw a length uniformly from ``middle`` · (1 ± ``spread``), at least 1."""
        return max(1, self._random.randint(round(middle * (1 - spread)), round(middle * (1 + spread))))

    def pieces(self, count: int) -> list[Any]:
        """Draw ``count`` random token ids, or words without a tokenizer."""
        if self._tokenizer is None:
            return self._random.choices(_WORDS, k=count)
        ids = self._tokenizer.plain_ids
        return self._random.choices(ids, k=count)

    def item(self, pieces: Sequence[Any], num_output: int, at_s: float | None = None) -> BenchmarkRequest:
        """Create a request whose prompt consists of ``pieces`` (token ids or words)."""
        prompt: str | tuple[int, ...] = tuple(pieces)
        if self._tokenizer is None:
            prompt = " ".join(pieces)
        elif self._as_text:
            prompt = self._tokenizer.decode(list(pieces))
        return BenchmarkRequest(prompt=prompt, num_prompt=len(pieces), num_output=num_output, at_s=at_s)

    def shuffle(self, items: list[BenchmarkRequest]) -> None:
        """Shuffle ``items`` in place."""
        self._random.shuffle(items)


def random_items(
    writer: PromptGenerator, count: int, *, num_prompt: int, num_output: int, spread: float
) -> list[BenchmarkRequest]:
    """Create requests with independent random prompts; prompt and output lengths vary by ``spread``."""
    return [
        writer.item(writer.pieces(writer.length(num_prompt, spread)), writer.length(num_output, spread))
        for _ in range(count)
    ]


def shared_prefix_items(
    writer: PromptGenerator,
    count: int,
    *,
    groups: int,
    num_prefix: int,
    num_prompt: int,
    num_output: int,
    spread: float,
) -> list[BenchmarkRequest]:
    """Create requests in random order, in ``groups`` whose prompts share a prefix (a system prompt)."""
    prefixes = [writer.pieces(num_prefix) for _ in range(groups)]
    items = [
        writer.item(
            [*prefixes[index % groups], *writer.pieces(writer.length(num_prompt, spread))],
            writer.length(num_output, spread),
        )
        for index in range(count)
    ]
    writer.shuffle(items)
    return items


def multi_turn_items(
    writer: PromptGenerator,
    count: int,
    *,
    num_turns: int,
    num_prefix: int,
    num_prompt: int,
    num_output: int,
    spread: float,
) -> list[BenchmarkRequest]:
    """Create conversations of ``num_turns`` turns with ``num_prompt`` tokens each, plus ``num_prefix`` in the first."""

    def turn(num_more: int) -> BenchmarkRequest:
        pieces = writer.pieces(num_more + writer.length(num_prompt, spread))
        return writer.item(pieces, writer.length(num_output, spread))

    conversations = ([turn(num_prefix if index == 0 else 0) for index in range(num_turns)] for _ in range(count))
    return [replace(first, followups=tuple(others)) for first, *others in conversations]


def with_adapters(items: Sequence[BenchmarkRequest], adapters: Sequence[str], seed: int) -> list[BenchmarkRequest]:
    """Return ``items`` with an adapter for each, drawn uniformly from ``adapters``."""
    drawn = random.Random(seed)
    return [replace(item, adapter=drawn.choice(adapters)) for item in items]


def sharegpt_items(
    path: Path, count: int, *, tokenizer: Tokenizer | None, seed: int, num_output: int | None, max_tokens: int
) -> tuple[list[BenchmarkRequest], int]:
    """Read ``count`` requests from a ShareGPT file; return (requests, number of skipped conversations).

    A request is the first turn of a conversation, with the length of the stored reply or ``num_output``. Conversations
    with fewer than two turns, with a turn of fewer than 4 tokens, or with more than ``max_tokens`` tokens are skipped;
    if too few remain, they are repeated. Raises DataError, and UsageError if none remains.
    """
    pairs = _first_turns(path)
    random.Random(seed).shuffle(pairs)
    items: list[BenchmarkRequest] = []
    skipped = 0
    for question, reply in pairs:
        if len(items) == count:
            break
        num_prompt, num_reply = count_tokens(question, tokenizer), num_output or count_tokens(reply, tokenizer)
        if min(num_prompt, num_reply) < 4 or num_prompt + num_reply > max_tokens:
            skipped += 1
            continue
        items.append(BenchmarkRequest(prompt=question, num_prompt=num_prompt, num_output=num_reply))
    if not items:
        raise UsageError(f"{path} has no conversation of 4 to {max_tokens} tokens; raise --max-tokens")
    return list(islice(cycle(items), count)), skipped


def _first_turns(path: Path) -> list[tuple[str, str]]:
    try:
        stored: Any = json.loads(path.read_text(encoding="utf-8"))
        conversations = [entry.get("conversations") or entry.get("conversation") or [] for entry in stored]
        return [(str(turns[0]["value"]), str(turns[1]["value"])) for turns in conversations if len(turns) >= 2]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        form = '[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}, ...]'
        raise DataError(f"{path} is not a ShareGPT file ({form}): {error!r}") from None


def count_tokens(text: str, tokenizer: Tokenizer | None) -> int:
    """Return the number of tokens in ``text``; without a tokenizer, the number of words."""
    return len(text.split()) if tokenizer is None else len(tokenizer.encode(text))
