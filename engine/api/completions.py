"""The body and the answers of POST /v1/completions."""

import time
from dataclasses import dataclass, replace
from typing import Any

from tapscope.core.errors import RequestError
from tapscope.engine.api import sampling_fields
from tapscope.engine.api.chat_request import check_only, read_stream
from tapscope.engine.api.logprobs import completion_logprobs
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.api.usage import Usage, check_not_aborted, new_id
from tapscope.engine.params.json_fields import Fields
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.output import Output
from tapscope.engine.requests.token_logprob import TokenLogprob

_FIELDS = (
    *("model", "prompt", "max_tokens", "stream", "stream_options", "logprobs", "echo", "best_of", "suffix"),
    *("response_format", "add_special_tokens"),
    *sampling_fields.OPENAI,
    *sampling_fields.EXTRA,
    *sampling_fields.ROUTING,
)
_MAX_TOKENS = 16  # OpenAI's default
_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A checked body; its answers are numbered prompt by prompt, n of each."""

    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    """Of the prompts, for echo."""
    params: tuple[SamplingParams, ...]
    """Of each prompt; ``n`` is still to be dealt out."""
    stream: bool
    include_usage: bool
    echo: bool
    logprobs: int | None
    priority: int
    cache_salt: str
    request_id: str | None

    @classmethod
    def parse(cls, body: Any, model: ServedModel) -> "CompletionRequest":
        """From decoded JSON; raises RequestError with one sentence that says what to write instead."""
        fields = Fields(body)
        check_only(fields)
        fields.refuse_unknown(_FIELDS, (*sampling_fields.WITHOUT_EFFECT, "service_tier"), sampling_fields.NEUTRAL)
        model.check_name(fields.text("model"))
        if fields.text("suffix"):
            raise RequestError("suffix is not supported; put what shall follow into the prompt", param="suffix")
        stream, include_usage = read_stream(fields)
        prompts, texts = read_prompts(fields, model, add_special_tokens=fields.flag("add_special_tokens", True))
        asked, echo, logprobs = (
            fields.whole("max_tokens", 0),
            fields.flag("echo"),
            fields.whole("logprobs", 0, _TOP_LOGPROBS),
        )
        max_tokens = _MAX_TOKENS if asked is None else asked
        if max_tokens == 0 and not echo:
            raise fields.wrong("max_tokens", "without echo it must be at least 1")
        return cls(
            prompts=prompts,
            texts=texts,
            params=_params(fields, model, prompts, max_tokens, logprobs, echo),
            stream=stream,
            include_usage=include_usage,
            echo=echo,
            logprobs=logprobs,
            priority=fields.whole("priority", -(1 << 31), 1 << 31) or 0,
            cache_salt=fields.name("cache_salt") if fields.has("cache_salt") else "",
            request_id=fields.text("rid"),
        )


def read_prompts(
    fields: Fields, model: ServedModel, *, name: str = "prompt", add_special_tokens: bool = True
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """(token ids, texts) of a text, a list of ids, or a list of either; texts of ids are decoded."""
    value = fields.values.get(name)
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and _is_id(value[0]))
    items = [value] if is_one else value
    if not isinstance(items, list) or not items or not all(isinstance(item, str | list) and item for item in items):
        raise fields.wrong(name, "it must be a text, a list of token ids, or a list of these, none of them empty")
    model.limits.check_generations(len(items), fields.whole("n", 1, 128) or 1, name)
    ids, texts = [], []
    for item in items:
        if isinstance(item, str):
            model.check_text(item, name)
            ids.append(tuple(model.require_tokenizer().encode(item, add_special_tokens=add_special_tokens)))
            texts.append(item)
            continue
        if not all(_is_id(token) for token in item):
            raise fields.wrong(name, "a list of token ids must hold whole numbers from 0, below 2^31")
        ids.append(tuple(item))
        texts.append("" if model.tokenizer is None else model.tokenizer.decode(item, skip_special_tokens=False))
    return tuple(ids), tuple(texts)


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _params(
    fields: Fields,
    model: ServedModel,
    prompts: tuple[tuple[int, ...], ...],
    max_tokens: int,
    logprobs: int | None,
    echo: bool,
) -> tuple[SamplingParams, ...]:
    values = sampling_fields.read_sampling(fields, model.sampling)
    best_of = fields.whole("best_of", 1)
    if best_of is not None and best_of != values.get("n", 1):
        raise fields.wrong("best_of", "only the value of n is supported")
    values |= sampling_fields.response_constraint(fields)
    values |= {"logprobs": logprobs, "prompt_logprobs": logprobs if echo else None}
    shared = sampling_fields.make_params(values)
    counts = [model.num_new_tokens(len(ids), max_tokens) for ids in prompts]
    model.check_answer(shared, sum(map(len, prompts)), sum(counts), "logprobs")
    return tuple(replace(shared, max_new_tokens=count) for count in counts)


class CompletionAnswer:
    """Takes the outputs of all generations of a request, in any order."""

    def __init__(self, model: ServedModel, request: CompletionRequest) -> None:
        self.id = new_id("cmpl-")
        self.usage = Usage()
        self._model = model
        self._request = request
        self._created = int(time.time())
        self._n = request.params[0].n
        self._parts: dict[int, list[dict[str, Any]]] = {}
        self._offsets: dict[int, int] = {}

    def take(self, index: int, output: Output) -> None:
        """Take an output of answer ``index``. Raises AbortedError."""
        self._take(index, output)

    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:
        """Take an output of answer ``index``; the stream's chunk for it, or None when it has nothing to show."""
        choice = self._take(index, output)
        shows = choice["text"] or choice["finish_reason"] or choice["logprobs"]
        return self._frame([choice]) if shows else None

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that includes usage."""
        return self._frame([]) | {"usage": self.usage.openai()}

    def answer(self) -> dict[str, Any]:
        """The whole answer, once every generation is finished."""
        choices = [_joined(parts) for _, parts in sorted(self._parts.items())]
        return self._frame(choices) | {"usage": self.usage.openai()}

    def _take(self, index: int, output: Output) -> dict[str, Any]:
        """Add an output to its answer; its part of the choice."""
        check_not_aborted(output)
        request, prompt, is_first = self._request, index // self._n, index not in self._parts
        ids, text, entries = output.token_ids, output.text, tuple(output.logprobs or ())
        self._count(output, ids, is_new_prompt=is_first and index % self._n == 0, prompt=prompt)
        shown: tuple[TokenLogprob | None, ...] = entries
        if is_first and request.echo:
            ids, text = request.prompts[prompt] + ids, request.texts[prompt] + text
            shown = (*(output.prompt_logprobs or ()), *entries)
        logprobs = None
        if request.logprobs is not None and ids:
            logprobs, self._offsets[index] = completion_logprobs(
                shown, ids, self._model.tokenizer, self._offsets.get(index, 0)
            )
        part = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason}
        self._parts.setdefault(index, []).append(part)
        return part

    def _count(self, output: Output, ids: tuple[int, ...], *, is_new_prompt: bool, prompt: int) -> None:
        self.usage.completion_tokens += len(ids)
        if is_new_prompt:
            self.usage.prompt_tokens += len(self._request.prompts[prompt])
            self.usage.cached_tokens += output.cached_tokens

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self._created, "model": self._model.name}
        return head | {"choices": choices}


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts of one choice as one."""
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    joined = {name: [item for part in logprobs for item in part[name] or ()] for name in _LISTS} if logprobs else None
    if joined is not None and not joined["top_logprobs"]:
        joined["top_logprobs"] = None  # type: ignore[assignment]
    text = "".join(part["text"] for part in parts)
    return {"index": parts[0]["index"], "text": text, "logprobs": joined, "finish_reason": parts[-1]["finish_reason"]}


_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
