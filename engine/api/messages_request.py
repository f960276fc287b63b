"""Request bodies of POST /v1/messages and /v1/messages/count_tokens (Anthropic)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from tapscope.core.convert import PositiveInt
from tapscope.core.errors import RequestError
from tapscope.engine.api.anthropic_messages import (
    AnthropicTool,
    AnthropicToolChoice,
    TextBlock,
    Turn,
    read_system,
    read_tools,
    read_turns,
)
from tapscope.engine.api.prompting import Conversation
from tapscope.engine.api.request_model import RequestModel
from tapscope.engine.api.sampling_fields import Strings
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.params.sampling_params import Fraction, TopP

_EFFORT = "reasoning_effort"


class OutputFormat(msgspec.Struct, kw_only=True):
    """Format of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]
    """JSON schema of the answer."""


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Format of the answer and reasoning effort."""

    format: OutputFormat | None = None
    """Constraint on the answer."""
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Sets the chat template variable ``reasoning_effort``; without effect if the template does not read it."""


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model reasons before it answers; ``between_tools`` is treated as ``disabled``."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    """``enabled`` and ``adaptive`` turn reasoning on, the others off."""
    budget_tokens: PositiveInt | None = None
    """Not enforced; must be below ``max_tokens``."""
    display: Any = None
    """Without effect."""


class CountBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /v1/messages/count_tokens."""

    IGNORED = ("metadata", "cache_control")
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"speed": ("standard",)}

    model: str
    """Name of the model; MODEL:ADAPTER or ADAPTER selects a LoRA adapter."""
    messages: Annotated[list[Turn], Meta(min_length=1)]
    """Turns, oldest first; if the last turn is the assistant's, the model continues it."""
    system: str | list[TextBlock] | None = None
    """System prompt: a string, or text blocks."""
    tools: list[AnthropicTool] | None = None
    """Functions that the model may call; Anthropic's own tools are not supported."""
    tool_choice: AnthropicToolChoice | None = None
    """``auto``, ``any``, ``tool`` (with ``name``) or ``none``. None: ``auto`` with tools."""
    thinking: Thinking | None = None
    """Whether the model reasons before it answers, if the chat template has a switch. None: no."""
    output_config: OutputConfig | None = None
    """``format``: JSON schema of the answer; ``effort``: ``reasoning_effort`` of the template."""


class MessagesBody(CountBody, kw_only=True, frozen=True):
    """The body of POST /v1/messages."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CountBody.NEUTRAL,
        "context_management": ({}, {"edits": []}),
        "mcp_servers": ([],),
        "container": ("",),
    }

    max_tokens: PositiveInt
    """Maximum number of generated tokens, reasoning included."""
    stop_sequences: Strings | None = None
    """Strings that end the generation when they occur in the generated text."""
    stream: bool = False
    """Respond with server-sent events, as in Anthropic's API."""
    temperature: Fraction | None = None
    """Divisor of the logits; 0 is greedy. None: the value in generation_config.json, or 1."""
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    """Sample from the k most likely tokens; 0: from all tokens."""
    top_p: TopP | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """Without effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest:
    """A validated request to POST /v1/messages."""

    conversation: Conversation
    stream: bool

    @classmethod
    def parse(cls, body: Any, model: ServedModel) -> "MessagesRequest":
        """Parse and validate decoded JSON; the RequestError names the field, its value and the valid values."""
        fields = MessagesBody.parse(body)
        given = {"temperature": fields.temperature, "top_p": fields.top_p, "top_k": fields.top_k}
        sampling = {name: value for name, value in given.items() if value is not None}
        conversation = _conversation(fields, model, fields.max_tokens, sampling | {"stop": fields.stop_sequences or ()})
        return cls(conversation=conversation, stream=fields.stream)


def parse_count(body: Any, model: ServedModel) -> Conversation:
    """Parse the body of /v1/messages/count_tokens to the conversation to be counted; raises RequestError."""
    return _conversation(CountBody.parse(body), model, None, {})


def _conversation(
    fields: CountBody, model: ServedModel, max_tokens: int | None, sampling: dict[str, Any]
) -> Conversation:
    model.check_name(fields.model)
    tools = read_tools(fields.tools or [], fields.tool_choice)
    turns = read_turns(fields.messages)
    output = fields.output_config or OutputConfig()
    schema = None if output.format is None else json.dumps(output.format.schema)
    variables = _thinking(fields.thinking, model, max_tokens, has_tools=bool(tools.definitions))
    if output.effort is not None and model.require_template().reads(_EFFORT, tools=bool(tools.definitions)):
        variables[_EFFORT] = output.effort
    return Conversation(
        messages=[*read_system(fields.system), *turns],
        sampling={"temperature": 1.0} | dict(model.sampling) | sampling | {"json_schema": schema},
        tools=tools,
        max_tokens=max_tokens,
        variables=variables,
        constraint_field="output_config.format",
        continue_final_message=turns[-1]["role"] == "assistant",
    )


def _thinking(
    wanted: Thinking | None, model: ServedModel, max_tokens: int | None, *, has_tools: bool
) -> dict[str, Any]:
    """Return the template variables for thinking: off by default; empty if the chat template has no switch.

    ``budget_tokens`` is only checked to be below ``max_tokens``. Raises RequestError if the model cannot think.
    """
    has_switch = model.require_template().reads("enable_thinking", tools=has_tools)
    is_on = wanted is not None and wanted.type in ("enabled", "adaptive")
    if wanted is not None and is_on and not (model.reasoning_format or has_switch):
        name = "thinking.type"
        raise RequestError(f"{name}={wanted.type!r}: {model.name} does not support thinking; omit it", param=name)
    budget = None if wanted is None else wanted.budget_tokens
    if budget is not None and max_tokens is not None and budget >= max_tokens:
        name = "thinking.budget_tokens"
        raise RequestError(f"{name}={budget}: must be below max_tokens={max_tokens}", param=name)
    return {"enable_thinking": is_on} if has_switch else {}
