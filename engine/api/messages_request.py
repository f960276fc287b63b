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
    """Format of the output."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Format of the output, and how much the model should reason: the template variable ``reasoning_effort``."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model reasons first; ``between_tools`` is ``disabled``. ``budget_tokens`` is not enforced."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: PositiveInt | None = None
    display: Any = None


class CountBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /v1/messages/count_tokens."""

    IGNORED = ("metadata", "cache_control")
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"speed": ("standard",)}

    model: str
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody, kw_only=True, frozen=True):
    """The body of POST /v1/messages."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CountBody.NEUTRAL,
        "context_management": ({}, {"edits": []}),
        "mcp_servers": ([],),
        "container": ("",),
    }

    max_tokens: PositiveInt
    stop_sequences: Strings | None = None
    stream: bool = False
    temperature: Fraction | None = None
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    top_p: TopP | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest:
    """A validated body."""

    conversation: Conversation
    stream: bool

    @classmethod
    def parse(cls, body: Any, model: ServedModel) -> "MessagesRequest":
        """From decoded JSON; raises RequestError, which names the field, its value and what is valid."""
        fields = MessagesBody.parse(body)
        given = {"temperature": fields.temperature, "top_p": fields.top_p, "top_k": fields.top_k}
        sampling = {name: value for name, value in given.items() if value is not None}
        conversation = _conversation(fields, model, fields.max_tokens, sampling | {"stop": fields.stop_sequences or ()})
        return cls(conversation=conversation, stream=fields.stream)


def parse_count(body: Any, model: ServedModel) -> Conversation:
    """The conversation to count the tokens of; raises RequestError."""
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
    """Template variables for thinking: off by default, if the chat template has a switch.

    ``budget_tokens`` is only checked to be below ``max_tokens``.
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
