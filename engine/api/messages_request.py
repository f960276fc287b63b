"""The bodies of POST /v1/messages and /v1/messages/count_tokens (Anthropic)."""

import json
from dataclasses import dataclass
from typing import Any

from tapscope.core.errors import RequestError
from tapscope.engine.api import anthropic_messages
from tapscope.engine.api.prompting import Conversation
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.params.json_fields import Fields

_COUNTED = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config")
_FIELDS = (*_COUNTED, "max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p")
_WITHOUT_EFFECT = ("metadata", "cache_control")
_NEUTRAL = {"context_management": ({}, {"edits": []}), "mcp_servers": ([],), "container": ("",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest:
    """A checked body."""

    talk: Conversation
    stream: bool

    @classmethod
    def parse(cls, body: Any, model: ServedModel) -> "MessagesRequest":
        """From decoded JSON; raises RequestError with one sentence that says what to write instead."""
        fields = Fields(body)
        if fields.values.get("service_tier") not in (None, "auto", "standard_only"):
            raise fields.wrong("service_tier", "it must be auto or standard_only")
        fields.refuse_unknown(_FIELDS, (*_WITHOUT_EFFECT, "service_tier"), _NEUTRAL)
        max_tokens = fields.whole("max_tokens", 1)
        if max_tokens is None:
            raise RequestError("max_tokens is missing; it must be a whole number from 1", param="max_tokens")
        return cls(talk=_conversation(fields, model, max_tokens), stream=fields.flag("stream"))


def parse_count(body: Any, model: ServedModel) -> Conversation:
    """The conversation whose tokens are to be counted; raises RequestError."""
    fields = Fields(body)
    fields.refuse_unknown(_COUNTED, _WITHOUT_EFFECT)
    return _conversation(fields, model, None)


def _conversation(fields: Fields, model: ServedModel, max_tokens: int | None) -> Conversation:
    model.check_name(fields.required_text("model"))
    tools = anthropic_messages.read_tools(fields)
    turns = anthropic_messages.read_turns(fields)
    sampling = {"temperature": 1.0} | dict(model.sampling) | _sampling(fields)
    return Conversation(
        messages=[*anthropic_messages.read_system(fields), *turns],
        sampling=sampling | {"json_schema": _schema(fields)},
        tools=tools,
        max_tokens=max_tokens,
        variables=_thinking(fields, model, max_tokens, has_tools=bool(tools.definitions)),
        continue_final_message=turns[-1]["role"] == "assistant",
    )


def _sampling(fields: Fields) -> dict[str, Any]:
    values = {
        "temperature": fields.number("temperature", 0, 1),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.whole("top_k", 0, (1 << 31) - 1),
        "stop": fields.texts("stop_sequences"),
    }
    return {name: value for name, value in values.items() if value is not None}


def _schema(fields: Fields) -> str | None:
    """The JSON schema of ``output_config.format``, as text."""
    config = fields.object("output_config")
    if config is None:
        return None
    config.refuse_unknown(("format",))
    form = config.object("format")
    if form is None:
        return None
    schema = form.object("schema")
    if form.values.get("type") != "json_schema" or schema is None:
        raise config.wrong("format", 'it must be {"type": "json_schema", "schema": {...}}')
    return json.dumps(schema.values)


def _thinking(fields: Fields, model: ServedModel, max_tokens: int | None, *, has_tools: bool) -> dict[str, Any]:
    """Thinking is off unless asked for, where the chat template has a switch.

    How much a model thinks is its own affair: ``budget_tokens`` is only checked to lie below ``max_tokens``.
    """
    wanted = fields.object("thinking")
    kind = "disabled" if wanted is None else wanted.required_text("type")
    has_switch = model.require_template().reads("enable_thinking", tools=has_tools)
    if wanted is not None:
        wanted.refuse_unknown(("type", "budget_tokens", "display"))
        if kind not in ("enabled", "adaptive", "disabled"):
            raise wanted.wrong("type", "it must be enabled, adaptive or disabled")
        if kind != "disabled" and not (model.thinks or has_switch):
            raise wanted.wrong("type", f"{model.name} does not think; leave thinking out")
        budget = wanted.whole("budget_tokens", 1)
        if budget is not None and max_tokens is not None and budget >= max_tokens:
            raise wanted.wrong("budget_tokens", f"it must be below max_tokens, {max_tokens}")
    return {"enable_thinking": kind != "disabled"} if has_switch else {}
