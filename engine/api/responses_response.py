"""Responses of POST /v1/responses: build a response object, or OpenAI's event stream, from one generation's outputs."""

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tapscope.engine.api.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallStart
from tapscope.engine.api.prompting import Prompt
from tapscope.engine.api.reasoning_tokens import ReasoningTokens
from tapscope.engine.api.reply import Reply
from tapscope.engine.api.responses_request import ResponsesBody
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.api.usage import check_not_aborted, new_id, sse_event
from tapscope.engine.requests.output import Output

_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_IDS = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


@dataclass(slots=True)
class _Item:
    """An output item; ``text`` is the text, the reasoning, or the JSON-encoded arguments of a call."""

    kind: str
    name: str = ""
    text: str = ""
    id: str = field(init=False)
    call_id: str = ""

    def __post_init__(self) -> None:
        self.id = new_id(_IDS[self.kind])

    def part(self) -> dict[str, Any]:
        """Return the content part of a message or reasoning item."""
        extra: dict[str, Any] = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": _PARTS[self.kind], "text": self.text} | extra

    def whole(self, status: str) -> dict[str, Any]:
        """Return the complete item; an item with the status ``in_progress`` has no content."""
        head: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return head | {"call_id": self.call_id, "name": self.name, "arguments": self.text}
        content: dict[str, Any] = {"content": [] if status == "in_progress" else [self.part()]}
        other: dict[str, Any] = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return head | content | other


class ResponsesResponse:
    """Response builder for the outputs of one request."""

    def __init__(self, model: ServedModel, fields: ResponsesBody, prompt: Prompt) -> None:
        self.id = new_id("resp_")
        self._model, self._fields, self._params = model, fields, prompt.params
        self._reply = Reply(prompt.form)
        self._reasoning = ReasoningTokens(prompt.form, model.require_tokenizer())
        self._created = int(time.time())
        self._items: list[_Item] = []
        self._counts = {"input": len(prompt.token_ids), "cached": 0, "output": 0}
        self._finish_reason: str | None = None
        self._num_events = 0

    def events(self, output: Output) -> str:
        """Add an output and return its server-sent events; empty if all text is held back. Raises AbortedError."""
        pieces = self._take(output)
        text = ""
        if not self._num_events:
            empty = self._response("in_progress")
            text += self._event("response.created", response=empty)
            text += self._event("response.in_progress", response=empty)
        text += "".join(self._show(piece) for piece in pieces)
        if self._finish_reason is not None:
            text += self._end_item(self._status)
            text += self._event(f"response.{self._status}", response=self._response(self._status))
        return text

    def answer(self, output: Output) -> dict[str, Any]:
        """Return the complete response for the merged outputs. Raises AbortedError."""
        for piece in self._take(output):
            self._show(piece)
        return self._response(self._status)

    @property
    def _status(self) -> str:
        """Status of the response and of its last item."""
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _take(self, output: Output) -> list[Delta]:
        check_not_aborted(output)
        self._counts["output"] += len(output.token_ids)
        self._reasoning.push(output.token_ids)
        self._counts["cached"] = self._counts["cached"] or output.cached_tokens
        self._finish_reason = output.finish_reason
        return self._reply.feed(output.text, is_final=output.finish_reason is not None)

    def _show(self, piece: Delta) -> str:
        """Add a delta to the current or a new item and return its events."""
        match piece:
            case ContentDelta(text):
                return self._continue("message", text)
            case ReasoningDelta(text):
                return self._continue("reasoning", text)
            case ToolCallStart(_, name, call_id):
                return self._begin(_Item("function_call", name, call_id=call_id or new_id("call_")))
            case ToolCallArguments(_, text):
                return self._grow(text)

    def _continue(self, kind: str, text: str) -> str:
        is_same = bool(self._items) and self._items[-1].kind == kind
        return ("" if is_same else self._begin(_Item(kind))) + self._grow(text)

    def _begin(self, item: _Item) -> str:
        ended = self._end_item("completed")
        self._items.append(item)
        begun = self._event("response.output_item.added", **self._index(), item=item.whole("in_progress"))
        if item.kind in _PARTS:
            begun += self._event("response.content_part.added", **self._place(), part=item.part())
        return ended + begun

    def _grow(self, text: str) -> str:
        item = self._items[-1]
        item.text += text
        if item.kind == "function_call":
            place = self._index() | {"item_id": item.id}
            return self._event("response.function_call_arguments.delta", **place, delta=text)
        logprobs: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
        return self._event(f"response.{_PARTS[item.kind]}.delta", **self._place(), delta=text, **logprobs)

    def _end_item(self, status: str) -> str:
        """Return the events that end the last item with ``status``."""
        if not self._items:
            return ""
        item = self._items[-1]
        if item.kind == "function_call":
            place = self._index() | {"item_id": item.id}
            name = "response.function_call_arguments.done"
            ended = self._event(name, **place, name=item.name, arguments=item.text)
        else:
            logprobs: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
            ended = self._event(f"response.{_PARTS[item.kind]}.done", **self._place(), text=item.text, **logprobs)
            ended += self._event("response.content_part.done", **self._place(), part=item.part())
        return ended + self._event("response.output_item.done", **self._index(), item=item.whole(status))

    def _index(self) -> dict[str, Any]:
        return {"output_index": len(self._items) - 1}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1].id, "content_index": 0} | self._index()

    def _event(self, kind: str, **values: Any) -> str:
        number, self._num_events = self._num_events, self._num_events + 1
        return sse_event({"type": kind, "sequence_number": number} | values, event=kind)

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response object, including the effective settings."""
        fields, is_done = self._fields, status != "in_progress"
        last = len(self._items) - 1
        items = [item.whole(status if index == last else "completed") for index, item in enumerate(self._items)]
        text = fields.text.format if fields.text is not None else None
        choice = fields.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "model": self._model.name,
            "output": items,
            "parallel_tool_calls": fields.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": fields.reasoning.effort if fields.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": self._params.temperature,
            "text": {"format": {"type": "text"} if text is None else msgspec.to_builtins(text)},
            "tool_choice": msgspec.to_builtins(choice) if choice is not None else "auto",
            "tools": fields.tools or [],
            "top_logprobs": 0,
            "top_p": self._params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_done else None,
            "user": None,
            "metadata": {},
        }

    def _usage(self) -> dict[str, Any]:
        counts = self._counts
        return {
            "input_tokens": counts["input"],
            "input_tokens_details": {"cached_tokens": counts["cached"]},
            "output_tokens": counts["output"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning.count},
            "total_tokens": counts["input"] + counts["output"],
        }
