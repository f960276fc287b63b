"""Token usage of a request, response ids, and server-sent events."""

import json
import uuid
from dataclasses import dataclass
from typing import Any

from tapscope.core.errors import LiveError, RequestError
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.output import Output
from tapscope.engine.requests.request import GRAMMAR_DEAD_END


@dataclass(slots=True)
class Usage:
    """Token counts; a prompt with n generations counts once."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None
    """Of these; None if the model does not reason."""

    def add(self, output: Output) -> None:
        """Count an output of one generation."""
        self.prompt_tokens, self.cached_tokens = output.prompt_tokens, output.cached_tokens
        self.completion_tokens += len(output.token_ids)

    def openai(self) -> dict[str, Any]:
        """In OpenAI's format."""
        counts: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return counts


def stop_reason(output: Output, params: SamplingParams) -> dict[str, Any]:
    """vLLM's ``stop_reason`` of a choice: the string or the id of ``stop_token_ids`` that ended it; else nothing."""
    matched = output.matched
    is_asked_for = isinstance(matched, str) or (matched is not None and matched in params.stop_token_ids)
    return {"stop_reason": matched} if output.finish_reason == "stop" and is_asked_for else {}


class AbortedError(LiveError):
    """A request was aborted; the message has the reason."""


def check_not_aborted(output: Output) -> None:
    """Raise AbortedError if the request was aborted; RequestError if its own constraint caused it."""
    if output.finish_reason == "abort":
        if output.reason.startswith(GRAMMAR_DEAD_END):
            raise RequestError(output.reason)  # not a 503, after which clients would retry
        raise AbortedError(f"the request was aborted: {output.reason or 'by POST /abort_request'}")


def new_id(prefix: str) -> str:
    """A unique id."""
    return f"{prefix}{uuid.uuid4().hex}"


def sse_event(data: Any, event: str | None = None) -> str:
    """One server-sent event (WHATWG HTML, 9.2)."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, allow_nan=False)
    return (f"event: {event}\n" if event else "") + f"data: {text}\n\n"
