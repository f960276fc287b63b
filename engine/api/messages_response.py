"""Responses of POST /v1/messages: build a message, or Anthropic's event stream, from the outputs of one generation."""

from dataclasses import dataclass
from typing import Any

from tapscope.engine.api.anthropic_messages import input_of, input_of_truncated
from tapscope.engine.api.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallStart
from tapscope.engine.api.reply import Reply, ReplyFormat
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.api.usage import check_not_aborted, new_id, sse_event
from tapscope.engine.requests.output import Output

_TEXTS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
_DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


@dataclass(slots=True)
class _Block:
    """A content block; ``text`` is the text, the thinking, or the JSON-encoded input of a tool call."""

    kind: str
    text: str = ""
    name: str = ""
    id: str = ""

    def start(self) -> dict[str, Any]:
        """Return the empty block that starts it in a stream."""
        if self.kind == "tool_use":
            return {"type": "tool_use", "id": self.id, "name": self.name, "input": {}}
        signature = {"signature": ""} if self.kind == "thinking" else {}
        return {"type": self.kind, self.kind: ""} | signature

    def whole(self, *, is_cut: bool) -> dict[str, Any]:
        """Return the complete block for a message; a tool call whose input is not a JSON object becomes text.

        ``is_cut``: ``max_tokens`` cut the block off. A tool call then keeps the complete members of its input.
        """
        if self.kind != "tool_use":
            return self.start() | {self.kind: self.text}
        value = input_of(self.text or "{}")
        if value is None and is_cut:
            value = input_of_truncated(self.text)
        if value is None:
            return {"type": "text", "text": f"{self.name} {self.text}"}
        return self.start() | {"input": value}


class MessagesResponse:
    """Response builder for the outputs of one request."""

    def __init__(self, model: ServedModel, form: ReplyFormat, num_prompt: int) -> None:
        self.id = new_id("msg_")
        self._model = model
        self._reply = Reply(form)
        self._blocks: list[_Block] = []
        self._counts = {"input_tokens": num_prompt, "cache_read_input_tokens": 0, "output_tokens": 0}
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._has_started = False

    def events(self, output: Output) -> str:
        """Add an output and return its server-sent events; empty if all text is held back. Raises AbortedError."""
        pieces = self._take(output)
        text = ""
        if not self._has_started:
            self._has_started = True
            text += _event("message_start", message=self._message([])) + _event("ping")
        text += "".join(self._show(piece) for piece in pieces)
        if self._stop_reason is not None:
            text += self._end_block()
            delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
            text += _event("message_delta", delta=delta, usage=self._counts) + _event("message_stop")
        return text

    def answer(self, output: Output) -> dict[str, Any]:
        """Return the complete message for the merged outputs. Raises AbortedError."""
        for piece in self._take(output):
            self._show(piece)
        cut = self._blocks[-1] if self._blocks and self._stop_reason == "max_tokens" else None
        return self._message([block.whole(is_cut=block is cut) for block in self._blocks])

    def _take(self, output: Output) -> list[Delta]:
        check_not_aborted(output)
        counts = self._counts
        counts["output_tokens"] += len(output.token_ids)
        if output.cached_tokens and not counts["cache_read_input_tokens"]:
            counts["cache_read_input_tokens"] = output.cached_tokens
            counts["input_tokens"] -= output.cached_tokens
        pieces = self._reply.feed(output.text, is_final=output.finish_reason is not None)
        if output.finish_reason == "length":
            self._stop_reason = "max_tokens"
        elif output.finish_reason is not None:
            is_text = isinstance(output.matched, str)
            self._stop_sequence = str(output.matched) if is_text else None
            called = "tool_use" if self._reply.num_calls else "end_turn"
            self._stop_reason = "stop_sequence" if is_text else called
        return pieces

    def _show(self, piece: Delta) -> str:
        """Add a delta to the current or a new block and return its events."""
        match piece:
            case ContentDelta(text):
                return self._continue("text", text)
            case ReasoningDelta(text):
                return self._continue("thinking", text)
            case ToolCallStart(_, name, call_id):
                return self._begin(_Block("tool_use", name=name, id=call_id or new_id("toolu_")))
            case ToolCallArguments(_, text):
                return self._grow(text)

    def _continue(self, kind: str, text: str) -> str:
        is_same = bool(self._blocks) and self._blocks[-1].kind == kind
        return ("" if is_same else self._begin(_Block(kind))) + self._grow(text)

    def _begin(self, block: _Block) -> str:
        ended = self._end_block()
        self._blocks.append(block)
        return ended + _event("content_block_start", index=len(self._blocks) - 1, content_block=block.start())

    def _grow(self, text: str) -> str:
        block = self._blocks[-1]
        block.text += text
        delta = {"type": _DELTAS[block.kind], _TEXTS[block.kind]: text}
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _end_block(self) -> str:
        return _event("content_block_stop", index=len(self._blocks) - 1) if self._blocks else ""

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self._model.name, "content": content}
        ended = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return head | ended | {"usage": dict(self._counts) | {"cache_creation_input_tokens": 0}}


def _event(kind: str, **fields: Any) -> str:
    return sse_event({"type": kind} | fields, event=kind)
