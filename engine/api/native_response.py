"""Responses of POST /generate, in the format of SGLang's native API."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from tapscope.engine.api.native_request import LogprobOptions
from tapscope.engine.requests.output import Output
from tapscope.engine.requests.per_token_outputs import HiddenStates
from tapscope.engine.requests.token_logprob import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseStyle:
    """Formatting options for the responses to one body."""

    decode: Callable[[int], str] | None = None
    """Function that decodes one token id; None if token strings were not requested."""
    weight_version: Callable[[], str] = lambda: "default"
    """Function that returns the current weight version, which may change during a request."""


def answer(
    output: Output, latency_s: float, options: LogprobOptions, style: ResponseStyle, *, has_text: bool
) -> dict[str, Any]:
    """Build one element of the response from the merged outputs so far."""
    meta: dict[str, Any] = {
        "id": output.request,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": len(output.token_ids),
        "cached_tokens": output.cached_tokens,
        "finish_reason": _finish_reason(output),
        "e2e_latency": latency_s,
        "weight_version": style.weight_version(),
        "dp_rank": output.dp_rank,
    }
    verifications, drafted, accepted = counts = output.draft_counts
    if verifications:
        meta["spec_verify_ct"], meta["spec_draft_token_num"], meta["spec_accept_token_num"] = counts
        meta["spec_accept_length"], meta["spec_accept_rate"] = 1 + accepted / verifications, accepted / drafted
    if output.routed_experts is not None:
        meta["routed_experts"] = output.routed_experts.text
        meta["routed_experts_shape"] = output.routed_experts.shape
    if output.hidden_states is not None:
        meta["hidden_states"] = _hidden_states(output.hidden_states, output.prompt_tokens)
    if options.enabled or output.logprobs or output.prompt_logprobs:  # requested in the body or in sampling_params
        meta |= _logprobs(output, options, style)
    return {"text": output.text if has_text else None, "output_ids": output.token_ids, "meta_info": meta}


def _hidden_states(every: HiddenStates, num_prompt: int) -> list[Any]:
    """Return SGLang's list: [tokens, hidden] of the prompt, then one [hidden] per computed generated token."""
    rows = every.array()
    if not np.isfinite(rows).all():  # JSON has neither infinities nor NaN
        rows = np.where(np.isfinite(rows), rows.astype(object), np.array(None, dtype=object))
    plain = rows.tolist()
    return [plain[:num_prompt], *plain[num_prompt:]]


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


def _logprobs(output: Output, options: LogprobOptions, style: ResponseStyle) -> dict[str, Any]:
    """Return SGLang's lists of [logprob, token id, string or null]; prompt tokens start at ``options.start``."""
    given = output.logprobs or ()
    meta: dict[str, Any] = {"output_token_logprobs": [_triple(item, style) for item in given]}
    prompt = (output.prompt_logprobs or ())[max(0, options.start) :]
    head = [None, output.prompt_head, _text(output.prompt_head, style)]  # the first token has no logprob
    meta["input_token_logprobs"] = [head if item is None else _triple(item, style) for item in prompt]
    every = (*given, *filter(None, prompt))
    if options.top or any(item.top for item in every):
        meta["output_top_logprobs"] = [_entries(item.top, style) for item in given]
        meta["input_top_logprobs"] = [None if item is None else _entries(item.top, style) for item in prompt]
    if options.token_ids or any(item.chosen for item in every):
        meta["output_token_ids_logprobs"] = [_entries(item.chosen, style) for item in given]
        meta["input_token_ids_logprobs"] = [None if item is None else _entries(item.chosen, style) for item in prompt]
    if any(item.full for item in given):
        meta["output_full_logprobs"] = [[v if isfinite(v) else None for v in item.full or ()] for item in given]
    return meta


def _triple(item: TokenLogprob, style: ResponseStyle) -> list[Any]:
    return _entry(item.token_id, item.logprob, style)


def _entries(items: Sequence[tuple[int, float]], style: ResponseStyle) -> list[list[Any]]:
    return [_entry(token, value, style) for token, value in items]


def _entry(token: int, logprob: float, style: ResponseStyle) -> list[Any]:
    """Return [logprob, token id, string]; the logprob of a masked token (-inf) is null, as JSON has no infinity."""
    return [logprob if isfinite(logprob) else None, token, _text(token, style)]


def _text(token: int | None, style: ResponseStyle) -> str | None:
    return None if style.decode is None or token is None else style.decode(token)
