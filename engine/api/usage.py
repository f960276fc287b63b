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
    """Token counts of a request; a prompt with n generations counts once."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None
    """The part of ``completion_tokens`` that is reasoning; None if the model does not reason."""

    def add(self, output: Output) -> None:
        """Add an output; all added outputs must belong to the same generation."""
        self.prompt_tokens, self.cached_tokens = output.prompt_tokens, output.cached_tokens
        self.completion_tokens += len(output.token_ids)

    def openai(self) -> dict[str, Any]:
        """Return the counts in OpenAI's format."""
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
    """Return vLLM's ``stop_reason`` field of a choice: the matched stop string or the matched id of ``stop_token_ids``.

    The dictionary is empty if the generation ended for another reason.
    """
    matched = output.matched
    is_asked_for = isinstance(matched, str) or (matched is not None and matched in params.stop_token_ids)
    return {"stop_reason": matched} if output.finish_reason == "stop" and is_asked_for else {}


class AbortedError(LiveError):
    """Raised when a request was aborted; the message contains the reason."""


def check_not_aborted(output: Output) -> None:
    """Raise AbortedError if the request was aborted, or RequestError if its own grammar constraint caused the abort."""
    if output.finish_reason == "abort":
        if output.reason.startswith(GRAMMAR_DEAD_END):
            raise RequestError(output.reason)  # status 400: clients would retry after a 503
        raise AbortedError(f"the request was aborted: {output.reason or 'by POST /abort_request'}")


def new_id(prefix: str) -> str:
    """Return ``prefix`` followed by a random UUID."""
    return f"{prefix}{uuid.uuid4().hex}"


def sse_event(data: Any, event: str | None = None) -> str:
    """Format one server-sent event (WHATWG HTML, 9.2); ``data`` other than a string is encoded as JSON."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, allow_nan=False)
    return (f"event: {event}\n" if event else "") + f"data: {text}\n\n"
