"""The body and the answer of POST /generate, in the form of SGLang's native API."""

from dataclasses import dataclass
from typing import Any

from tapscope.engine.request import Generation
from tapscope.errors import UsageError

DEFAULT_MAX_NEW_TOKENS = 128
_FIELDS = ("text", "input_ids", "sampling_params", "rid", "stream")
_SAMPLING = ("max_new_tokens", "temperature", "ignore_eos")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A checked body; one prompt, or a batch."""

    prompts: tuple[str | tuple[int, ...], ...]
    request_ids: tuple[str | None, ...]
    is_batch: bool
    """Whether the answer is a list."""
    max_new_tokens: int
    ignore_eos: bool

    @classmethod
    def parse(cls, body: Any) -> "GenerateRequest":
        """From decoded JSON; raises UsageError with one sentence that says what to write instead."""
        if not isinstance(body, dict):
            raise UsageError("the body must be a JSON object with 'text' or 'input_ids'")
        _refuse_unknown(body, _FIELDS, "field")
        if body.get("stream"):
            raise UsageError("'stream': true is not supported; leave it out")
        prompts, is_batch = _prompts(body)
        params = body.get("sampling_params")
        params = {} if params is None else params
        if not isinstance(params, dict):
            raise UsageError("'sampling_params' must be a JSON object")
        _refuse_unknown(params, _SAMPLING, "sampling parameter")
        temperature = params.get("temperature", 0)
        if isinstance(temperature, bool) or temperature != 0:
            raise UsageError(f"'temperature': {temperature!r} is not supported; decoding is greedy, write 0")
        ignore_eos = params.get("ignore_eos", False)
        if not isinstance(ignore_eos, bool):
            raise UsageError(f"'ignore_eos' is {ignore_eos!r}; it must be true or false")
        max_new_tokens = params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise UsageError(f"'max_new_tokens' is {max_new_tokens!r}; it must be a whole number above 0")
        return cls(prompts, _request_ids(body.get("rid"), len(prompts), is_batch), is_batch, max_new_tokens, ignore_eos)


def answer(generation: Generation, latency_s: float) -> dict[str, Any]:
    """One element of the answer."""
    reason: dict[str, Any] = {"type": generation.finish_reason}
    if generation.finish_reason == "stop":
        reason["matched"] = generation.token_ids[-1]
    elif generation.finish_reason == "length":
        reason["length"] = len(generation.token_ids)
    return {
        "text": generation.text,
        "output_ids": generation.token_ids,
        "meta_info": {
            "id": generation.request,
            "prompt_tokens": len(generation.prompt_ids),
            "completion_tokens": len(generation.token_ids),
            "finish_reason": reason,
            "e2e_latency": latency_s,
            "weight_version": "default",
        },
    }


def _refuse_unknown(values: dict[str, Any], known: tuple[str, ...], what: str) -> None:
    """Refuse what would change the answer if it were understood; a null or false asks for nothing."""
    for name, value in values.items():
        if name not in known and value is not None and value is not False:
            raise UsageError(f"{what} {name!r} is not supported; supported: {', '.join(known)}")


def _prompts(body: dict[str, Any]) -> tuple[tuple[str | tuple[int, ...], ...], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise UsageError("the body needs exactly one of 'text' and 'input_ids'")
    if isinstance(text, str):
        return (text,), False
    if text is not None:
        if not isinstance(text, list) or not text or not all(isinstance(item, str) for item in text):
            raise UsageError("'text' must be a text or a list of at least one text")
        return tuple(text), True
    is_batch = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    lists: list[Any] = ids if isinstance(ids, list) and is_batch else [ids]
    if not all(_is_ids(item) for item in lists):
        raise UsageError("'input_ids' must be a list of token ids or a list of such lists, none of them empty")
    return tuple(tuple(item) for item in lists), is_batch


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _request_ids(rid: Any, count: int, is_batch: bool) -> tuple[str | None, ...]:
    if rid is None:
        return (None,) * count
    names = rid if isinstance(rid, list) and is_batch else [rid]
    if len(names) != count or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"'rid' must be {'a list of ' + str(count) + ' texts' if is_batch else 'a text'}")
    if len(set(names)) < count:
        raise UsageError("'rid' names a request twice")
    return tuple(names)
