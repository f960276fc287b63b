"""Request body and responses of POST /v1/completions."""

import time
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from tapscope.core.convert import Count, NonEmptyStr, PositiveInt, must_be, shown
from tapscope.core.errors import RequestError
from tapscope.engine.api.logprobs import completion_logprobs, prompt_logprobs
from tapscope.engine.api.sampling_fields import SamplingFields, TokenId, make_params
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.api.usage import Usage, check_not_aborted, new_id, stop_reason
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.output import Output
from tapscope.engine.requests.token_logprob import TokenLogprob

Prompts = Annotated[
    NonEmptyStr | list[TokenId | NonEmptyStr | list[TokenId]],
    must_be("a string, a list of token ids, or a list of these, none of them empty"),
]


class CompletionBody(SamplingFields, kw_only=True, frozen=True):
    """The body of POST /v1/completions."""

    prompt: Prompts
    """A string, token ids, or a list of prompts."""
    max_tokens: Count = 16
    """Maximum number of generated tokens; 0 only with ``echo``."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Return the logprob of each token and of this many most likely tokens. None: no logprobs."""
    echo: bool = False
    """Return the prompt before the generated text."""
    best_of: PositiveInt | None = None
    """Must equal ``n``."""
    add_special_tokens: bool = True
    """Let the tokenizer add special tokens, such as BOS (vLLM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A validated request to POST /v1/completions; choices are numbered prompt by prompt, n of each."""

    prompts: tuple[tuple[int, ...], ...]
    prompt_strings: tuple[str, ...]
    """The prompts as strings, for ``echo``."""
    params: tuple[SamplingParams, ...]
    """Sampling parameters of each prompt; ``n`` is not expanded yet."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    """Whether each chunk of a stream includes the token counts so far of its choice."""
    echo: bool
    logprobs: int | None
    has_prompt_logprobs: bool
    """Whether choices include vLLM's ``prompt_logprobs``."""
    with_token_ids: bool
    """Whether choices include ``token_ids`` and ``prompt_token_ids``."""
    tokens_as_ids: bool
    """Whether tokens in logprobs are written as ``token_id:ID``."""
    priority: int
    cache_salt: str
    constraint_field: str
    """Name of the field that constrains the output; empty: none."""
    request_id: str | None

    @classmethod
    def parse(cls, body: Any, model: ServedModel) -> "CompletionRequest":
        """Parse and validate decoded JSON; the RequestError names the field, its value and the valid values."""
        fields = CompletionBody.parse(body)
        model.check_name(fields.model)
        include_usage = fields.include_usage
        prompts, strings = read_prompts(
            fields.prompt,
            "prompt",
            model,
            n=fields.n,
            add_special_tokens=fields.add_special_tokens,
            max_tokens=fields.max_prompt_tokens(fields.max_tokens, model),
        )
        if fields.max_tokens == 0 and not fields.echo:
            raise RequestError("max_tokens=0: must be an integer ≥ 1 without echo", param="max_tokens")
        if fields.best_of is not None and fields.best_of != fields.n:
            raise RequestError(f"best_of={fields.best_of}: only the value of n is supported", param="best_of")
        values = fields.sampling(model) | {"logprobs": fields.logprobs}
        if fields.echo and fields.logprobs is not None:
            if fields.prompt_logprobs is not None:
                text = "prompt_logprobs is not supported together with echo and logprobs, which return the same"
                raise RequestError(text, param="prompt_logprobs")
            values["prompt_logprobs"] = fields.logprobs
        shared = make_params(values)
        counts = [model.num_new_tokens(len(ids), fields.max_tokens, prompt="prompt") for ids in prompts]
        model.check_answer(shared, sum(map(len, prompts)), sum(counts), "logprobs")
        return cls(
            prompts=prompts,
            prompt_strings=strings,
            params=tuple(replace(shared, max_new_tokens=count) for count in counts),
            stream=fields.stream,
            include_usage=include_usage,
            continuous_usage=fields.continuous_usage,
            echo=fields.echo,
            logprobs=fields.logprobs,
            has_prompt_logprobs=fields.prompt_logprobs is not None,
            with_token_ids=fields.return_token_ids,
            tokens_as_ids=fields.return_tokens_as_token_ids,
            priority=fields.priority,
            cache_salt=fields.cache_salt,
            constraint_field=fields.constraint_field,
            request_id=fields.rid,
        )


def read_prompts(
    given: str | list[int | str | list[int]],
    name: str,
    model: ServedModel,
    *,
    n: int = 1,
    add_special_tokens: bool,
    max_tokens: int | None = None,
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Return the token ids and strings of one or several prompts, each given as a string or as token ids.

    Strings are tokenized and ids are decoded. Only the last ``max_tokens`` tokens of each prompt are kept; None: all.
    Raises RequestError; ``name`` is the body's field, for the error.
    """
    kinds = set(map(type, given)) if isinstance(given, list) else {str}
    is_list = isinstance(given, list)
    if not given or (is_list and [] in given) or (int in kinds and len(kinds) > 1):
        rule = "must be a string, a list of token ids, or a list of these, none of them empty"
        raise RequestError(f"{name}={shown(given)}: {rule}", param=name)
    items: list[Any] = [given] if isinstance(given, str) or int in kinds else given
    model.limits.check_generations(len(items), n, name)
    ids, strings = [], []
    for item in items:
        string = item if isinstance(item, str) else None
        if string is not None:
            model.check_text(string, name)
            item = model.require_tokenizer().encode(string, add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(item) > max_tokens:
            item, string = item[-max_tokens:], None
        if string is None:
            string = "" if model.tokenizer is None else model.tokenizer.decode(item, skip_special_tokens=False)
        ids.append(tuple(item))
        strings.append(string)
    return tuple(ids), tuple(strings)


class CompletionResponse:
    """Response builder that accepts the outputs of all generations of a request in any order."""

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
        """Add an output of choice ``index``. Raises AbortedError."""
        self._take(index, output)

    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:
        """Add an output of choice ``index``; return its stream chunk, or None if the chunk would be empty.

        Raises AbortedError.
        """
        choice = self._take(index, output)
        shows = choice["text"] or choice["finish_reason"] or choice["logprobs"]
        return self._frame([choice]) if shows else None

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream that includes usage."""
        return self._frame([]) | {"usage": self.usage.openai()}

    def answer(self) -> dict[str, Any]:
        """Return the complete response; call this after every generation has finished."""
        choices = [_joined(parts) for _, parts in sorted(self._parts.items())]
        return self._frame(choices) | {"usage": self.usage.openai()}

    def _take(self, index: int, output: Output) -> dict[str, Any]:
        """Add an output to its choice and return the new part of the choice."""
        check_not_aborted(output)
        request, prompt, is_first = self._request, index // self._n, index not in self._parts
        ids, text, entries = output.token_ids, output.text, tuple(output.logprobs or ())
        self._count(output, ids, is_new_prompt=is_first and index % self._n == 0, prompt=prompt)
        shown: tuple[TokenLogprob | None, ...] = entries
        if is_first and request.echo:
            ids, text = request.prompts[prompt] + ids, request.prompt_strings[prompt] + text
            shown = (*(output.prompt_logprobs or ()), *entries)
        logprobs = None
        if request.logprobs is not None and ids:
            logprobs, self._offsets[index] = completion_logprobs(
                shown, ids, self._model.tokenizer, self._offsets.get(index, 0), as_ids=request.tokens_as_ids
            )
        part = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason}
        part |= stop_reason(output, request.params[prompt])
        if request.has_prompt_logprobs and is_first:
            part["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or (), self._model.tokenizer)
        if request.with_token_ids:
            part["token_ids"] = list(output.token_ids)
            part |= {"prompt_token_ids": list(request.prompts[prompt])} if is_first else {}
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
    """Join the parts of one choice."""
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    joined = {name: [item for part in logprobs for item in part[name] or ()] for name in _LISTS} if logprobs else None
    if joined is not None and not joined["top_logprobs"]:
        joined["top_logprobs"] = None  # type: ignore[assignment]
    text = "".join(part["text"] for part in parts)
    first: dict[str, Any] = {
        name: parts[0][name] for name in ("prompt_logprobs", "prompt_token_ids") if name in parts[0]
    }
    if "token_ids" in parts[0]:
        first["token_ids"] = [token for part in parts for token in part["token_ids"]]
    whole = {"index": parts[0]["index"], "text": text, "logprobs": joined, "finish_reason": parts[-1]["finish_reason"]}
    ended = {name: parts[-1][name] for name in ("stop_reason",) if name in parts[-1]}
    return whole | ended | first


_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
