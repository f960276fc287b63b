"""What POST /generate asks for and how it is answered, in the form of SGLang's native API."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from tapscope.engine.logprob import TokenLogprob
from tapscope.engine.output import Output
from tapscope.engine.sampling_params import SamplingParams
from tapscope.engine.server.bodies import GenerateBody
from tapscope.errors import UsageError

DEFAULT_MAX_NEW_TOKENS = 128
_RENAMED = {"no_stop_trim": "include_stop", "sampling_seed": "seed"}
_IGNORED = ("spaces_between_special_tokens",)  # older tokenizers' only


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One generation that a body asks for."""

    prompt: str | tuple[int, ...]
    params: SamplingParams
    request_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How its answers look."""

    logprobs: bool = False
    top: bool = False
    logprob_start: int = -1
    decode: Callable[[int], str] | None = None
    """Gives the text of a token; None where texts were not asked for."""
    weight_version: str = "default"


def wanted(body: GenerateBody) -> list[Wanted]:
    """Every generation of ``body``, prompt by prompt; raises UsageError."""
    prompts = _prompts(body)
    many = body.sampling_params
    if isinstance(many, list) and len(many) != len(prompts):
        raise UsageError(f"'sampling_params' has {len(many)} entries for {len(prompts)} prompts; give one each")
    each = many if isinstance(many, list) else [many] * len(prompts)
    names = _request_ids(body, len(prompts))
    found = []
    for prompt, values, name in zip(prompts, each, names, strict=True):
        params = _sampling(values, body)
        for index in range(params.n):
            own = name if name is None or params.n == 1 else f"{name}-{index}"
            found.append(Wanted(prompt=prompt, params=params.child(index), request_id=own))
    return found


def is_batch(body: GenerateBody, count: int) -> bool:
    """Whether the answer is a list."""
    ids = body.input_ids
    return count > 1 or isinstance(body.text, list) or (ids is not None and isinstance(ids[0], list))


def answer(output: Output, latency_s: float, style: Style, *, has_text: bool) -> dict[str, Any]:
    """One element of the answer, of all that has come so far."""
    meta: dict[str, Any] = {
        "id": output.request,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": len(output.token_ids),
        "cached_tokens": output.cached_tokens,
        "finish_reason": _finish_reason(output),
        "e2e_latency": latency_s,
        "weight_version": style.weight_version,
        "dp_rank": output.dp_rank,
    }
    if output.routed_experts is not None:
        meta["routed_experts"] = output.routed_experts.text
        meta["routed_experts_shape"] = output.routed_experts.shape
    if style.logprobs or output.logprobs or output.prompt_logprobs:  # asked for in the body or among the parameters
        meta |= _logprobs(output, style)
    return {"text": output.text if has_text else None, "output_ids": output.token_ids, "meta_info": meta}


def _finish_reason(output: Output) -> dict[str, Any] | None:
    if output.finish_reason is None:
        return None
    reason: dict[str, Any] = {"type": output.finish_reason}
    if output.finish_reason == "stop":
        reason["matched"] = output.matched
    elif output.finish_reason == "length":
        reason["length"] = len(output.token_ids)
    elif output.reason:
        reason["message"] = output.reason
    return reason


def _logprobs(output: Output, style: Style) -> dict[str, Any]:
    """SGLang's lists: [log-probability, token id, text or null], prompt tokens from ``logprob_start`` on."""
    given = output.logprobs or ()
    meta: dict[str, Any] = {"output_token_logprobs": [_triple(item, style) for item in given]}
    prompt = (output.prompt_logprobs or ())[max(0, style.logprob_start) :]
    head = [None, output.prompt_head, _text(output.prompt_head, style)]  # which nothing predicts
    meta["input_token_logprobs"] = [head if item is None else _triple(item, style) for item in prompt]
    if style.top or any(item.top for item in (*given, *filter(None, prompt))):
        meta["output_top_logprobs"] = [_top(item, style) for item in given]
        meta["input_top_logprobs"] = [None if item is None else _top(item, style) for item in prompt]
    if any(item.full for item in given):
        meta["output_full_logprobs"] = [[v if isfinite(v) else None for v in item.full or ()] for item in given]
    return meta


def _triple(item: TokenLogprob, style: Style) -> list[Any]:
    return _entry(item.token_id, item.logprob, style)


def _top(item: TokenLogprob, style: Style) -> list[list[Any]]:
    return [_entry(token, value, style) for token, value in item.top]


def _entry(token: int, logprob: float, style: Style) -> list[Any]:
    """JSON knows no infinity: what cannot be drawn has null."""
    return [logprob if isfinite(logprob) else None, token, _text(token, style)]


def _text(token: int | None, style: Style) -> str | None:
    return None if style.decode is None or token is None else style.decode(token)


def _sampling(values: Mapping[str, Any], body: GenerateBody) -> SamplingParams:
    given = {_RENAMED.get(name, name): value for name, value in values.items() if value is not None}
    for name in _IGNORED:
        given.pop(name, None)
    if body.return_routed_experts:
        given["routed_experts"] = True
    params = SamplingParams.build({"max_new_tokens": DEFAULT_MAX_NEW_TOKENS} | given)
    if not body.return_logprob:
        return params
    prompt = body.top_logprobs_num if body.logprob_start_len >= 0 else None
    return replace(params, logprobs=body.top_logprobs_num, prompt_logprobs=prompt)


def _prompts(body: GenerateBody) -> list[str | tuple[int, ...]]:
    if body.text is not None:
        return [body.text] if isinstance(body.text, str) else list(body.text)
    ids: list[Any] = body.input_ids or []
    return [tuple(item) for item in ids] if isinstance(ids[0], list) else [tuple(ids)]


def _request_ids(body: GenerateBody, count: int) -> list[str | None]:
    if body.rid is None:
        return [None] * count
    names = body.rid if isinstance(body.rid, list) else [body.rid]
    if len(names) != count:
        raise UsageError(f"'rid' has {len(names)} request ids for {count} prompts; give one each")
    if len(set(names)) < count:
        raise UsageError("'rid' names a request twice")
    return list(names)
