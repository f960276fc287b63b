"""Responses of POST /v1/chat/completions: build one object, or the chunks of a stream, from n generations' outputs."""

import time
from dataclasses import dataclass, field
from typing import Any

from tapscope.engine.api.chat_request import ChatRequest
from tapscope.engine.api.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallStart
from tapscope.engine.api.logprobs import chat_logprobs, prompt_logprobs
from tapscope.engine.api.prompting import Prompt
from tapscope.engine.api.reasoning_tokens import ReasoningTokens
from tapscope.engine.api.reply import Reply
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.api.usage import Usage, check_not_aborted, new_id, stop_reason
from tapscope.engine.requests.output import Output


@dataclass(slots=True)
class _Choice:
    """The state of one choice, accumulated over its outputs."""

    reply: Reply
    reasoning_tokens: ReasoningTokens
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    num_sent_logprobs: int = 0
    token_ids: list[int] = field(default_factory=list)
    num_sent_token_ids: int = 0
    has_role: bool = False
    finish_reason: str | None = None
    stop_reason: dict[str, Any] = field(default_factory=dict)


class ChatResponse:
    """Response builder that accepts the outputs of a request's n generations in any order."""

    def __init__(self, model: ServedModel, request: ChatRequest, prompt: Prompt) -> None:
        self.id = new_id("chatcmpl-")
        self.usage = Usage()
        self._model = model
        self._created = int(time.time())
        self._request = request
        self._prompt = prompt
        self._prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
        form, tokenizer = prompt.form, model.require_tokenizer()
        self._choices = [_Choice(Reply(form), ReasoningTokens(form, tokenizer)) for _ in range(prompt.params.n)]

    def take(self, index: int, output: Output) -> None:
        """Add an output of choice ``index``. Raises AbortedError."""
        self._take(self._choices[index], index, output)

    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:
        """Add an output of choice ``index``; return its stream chunk, or None if all of its text is held back.

        Raises AbortedError.
        """
        choice = self._choices[index]
        delta = self._take(choice, index, output)
        if not choice.has_role:
            choice.has_role, delta = True, {"role": "assistant", "content": ""} | delta
        if not delta and choice.finish_reason is None:
            return None
        body = {"index": index, "delta": delta, "finish_reason": choice.finish_reason} | choice.stop_reason
        if self._request.with_logprobs:
            body["logprobs"] = {"content": choice.logprobs[choice.num_sent_logprobs :]}
            choice.num_sent_logprobs = len(choice.logprobs)
        frame = self._frame("chat.completion.chunk", [body])
        if self._request.with_token_ids:
            body["token_ids"] = choice.token_ids[choice.num_sent_token_ids :]
            if not choice.num_sent_token_ids:
                frame["prompt_token_ids"] = list(self._prompt.token_ids)
            choice.num_sent_token_ids = len(choice.token_ids)
        return frame

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream that includes usage."""
        return self._frame("chat.completion.chunk", []) | {"usage": self.usage.openai()}

    def answer(self) -> dict[str, Any]:
        """Return the complete response; call this after every generation has finished."""
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices)]
        whole = self._frame("chat.completion", choices) | {"usage": self.usage.openai()}
        if self._request.has_prompt_logprobs:
            whole["prompt_logprobs"] = self._prompt_logprobs
        return whole | ({"prompt_token_ids": list(self._prompt.token_ids)} if self._request.with_token_ids else {})

    def _take(self, choice: _Choice, index: int, output: Output) -> dict[str, Any]:
        """Add an output to its choice and return the delta."""
        check_not_aborted(output)
        self.usage.completion_tokens += len(output.token_ids)
        if index == 0:
            self.usage.prompt_tokens, self.usage.cached_tokens = output.prompt_tokens, output.cached_tokens
        choice.token_ids += output.token_ids
        if self._model.reasoning_format is not None:
            choice.reasoning_tokens.push(output.token_ids)
            self.usage.reasoning_tokens = sum(each.reasoning_tokens.count for each in self._choices)
        tokenizer = self._model.require_tokenizer()
        if self._request.with_logprobs and output.logprobs:
            choice.logprobs += chat_logprobs(output.logprobs, tokenizer, as_ids=self._request.tokens_as_ids)
        if self._request.has_prompt_logprobs and output.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(output.prompt_logprobs, tokenizer)
        delta: dict[str, Any] = {}
        for piece in choice.reply.feed(output.text, is_final=output.finish_reason is not None):
            _add(choice, delta, piece)
        if output.finish_reason is not None:
            is_call = output.finish_reason == "stop" and choice.calls
            choice.finish_reason = "tool_calls" if is_call else output.finish_reason
            choice.stop_reason = stop_reason(output, self._prompt.params)
        return delta

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.calls:
            message |= {"content": choice.content or None, "tool_calls": choice.calls}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        logprobs = {"content": choice.logprobs, "refusal": None} if self._request.with_logprobs else None
        whole = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        whole |= choice.stop_reason
        return whole | ({"token_ids": choice.token_ids} if self._request.with_token_ids else {})

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self._created, "model": self._model.name}
        return head | {"choices": choices}


def _add(choice: _Choice, delta: dict[str, Any], piece: Delta) -> None:
    """Add a delta of the reply to the choice and to the ``delta`` object of this chunk."""
    match piece:
        case ContentDelta(text):
            choice.content += text
            delta["content"] = delta.get("content", "") + text
        case ReasoningDelta(text):
            choice.reasoning += text
            delta["reasoning_content"] = delta.get("reasoning_content", "") + text
        case ToolCallStart(index, name, call_id):
            head = {"id": call_id or new_id("call_"), "type": "function"}
            choice.calls.append(head | {"function": {"name": name, "arguments": ""}})
            fresh = {"index": index} | head | {"function": {"name": name, "arguments": ""}}
            delta.setdefault("tool_calls", []).append(fresh)
        case ToolCallArguments(index, text):
            choice.calls[index]["function"]["arguments"] += text
            fragments = delta.setdefault("tool_calls", [])
            if not fragments or fragments[-1]["index"] != index:
                fragments.append({"index": index, "function": {"arguments": ""}})
            fragments[-1]["function"]["arguments"] += text
