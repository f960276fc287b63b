"""Bodies of the OpenAI and Anthropic routes as JSON schemas, for the server's OpenAPI description."""

from typing import Any

from tapscope.engine.api.sampling_fields import RESPONSE_FORMATS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NAMES: Schema = {"anyOf": [_TEXT, {"type": "array", "items": {"type": "string", "minLength": 1}}]}
_IDS: Schema = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT: Schema = {"anyOf": [{"type": "string", "minLength": 1}, _IDS]}
_PROMPTS: Schema = {"anyOf": [*_PROMPT["anyOf"], {"type": "array", "minItems": 1, "items": _PROMPT}]}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}


def _whole(low: int, high: int | None = None) -> Schema:
    return {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})


def _number(low: float, high: float | None = None) -> Schema:
    return {"type": "number", "minimum": low} | ({} if high is None else {"maximum": high})


def _body(required: list[str], properties: Schema) -> Schema:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


_STREAM: Schema = {"stream": _FLAG, "stream_options": _body([], {"include_usage": _FLAG})}
_SAMPLING: Schema = {
    "temperature": _number(0),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _whole(-1, (1 << 31) - 1),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "logit_bias": {
        "type": "object",
        "additionalProperties": _number(-100, 100),
        "propertyNames": {"pattern": "^[0-9]+$"},
    },
    "seed": _whole(-(1 << 63), (1 << 63) - 1),
    "n": _whole(1, 128),
    "stop": _NAMES,
    "stop_token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "min_tokens": _whole(0),
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "include_stop_str_in_output": _FLAG,
    "stop_regex": _NAMES,
    "regex": _TEXT,
    "ebnf": _TEXT,
    "response_format": _body(
        ["type"],
        {
            "type": {"enum": [*RESPONSE_FORMATS]},
            "json_schema": _OBJECT,
            "format": _OBJECT,
            "structures": {"type": "array", "items": _OBJECT},
            "triggers": _NAMES,
        },
    ),
    "priority": _whole(-(1 << 31), (1 << 31) - 1),
    "rid": {"type": "string", "minLength": 1},
    "cache_salt": {"type": "string", "minLength": 1},
    "user": _TEXT,
}
_PART: Schema = _body(["type", "text"], {"type": {"const": "text"}, "text": _TEXT})
_CONTENT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}
_FUNCTION: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "description": _TEXT,
        "parameters": _OBJECT,
        "strict": _FLAG,
    },
}
_TOOL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
}
_MESSAGE: Schema = _body(
    ["role", "content"],
    {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": _CONTENT,
        "name": _TEXT,
        "tool_call_id": _TEXT,
        "tool_calls": {"type": "array", "items": _OBJECT},
        "reasoning_content": _TEXT,
    },
)

CHAT: Schema = _body(
    ["messages"],
    {
        "model": _TEXT,
        "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
        "max_tokens": _whole(1),
        "max_completion_tokens": _whole(1),
        "logprobs": _FLAG,
        "top_logprobs": _whole(0, 20),
        "tools": {"type": "array", "items": _TOOL},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _OBJECT]},
        "parallel_tool_calls": _FLAG,
        "reasoning_effort": _TEXT,
        "chat_template_kwargs": _OBJECT,
        "add_generation_prompt": _FLAG,
        "continue_final_message": _FLAG,
        "separate_reasoning": _FLAG,
    }
    | _STREAM
    | _SAMPLING,
)
"""POST /v1/chat/completions."""

COMPLETION: Schema = _body(
    ["prompt"],
    {
        "model": _TEXT,
        "prompt": _PROMPTS,
        "max_tokens": _whole(0),
        "logprobs": _whole(0, 20),
        "echo": _FLAG,
        "best_of": _whole(1, 128),
        "add_special_tokens": _FLAG,
    }
    | _STREAM
    | _SAMPLING,
)
"""POST /v1/completions."""

EMBEDDING: Schema = _body(
    ["input"],
    {
        "model": _TEXT,
        "input": _PROMPTS,
        "encoding_format": {"enum": ["float", "base64"]},
        "pooling": {"enum": ["last", "mean"]},
        "add_special_tokens": _FLAG,
        "user": _TEXT,
    },
)
"""POST /v1/embeddings."""

COUNT: Schema = _body(
    ["model", "messages"],
    {
        "model": _TEXT,
        "system": _CONTENT,
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": _body(["role", "content"], {"role": {"enum": ["user", "assistant"]}, "content": _CONTENT}),
        },
        "tools": {
            "type": "array",
            "items": _body(
                ["name", "input_schema"],
                {"name": {"type": "string", "minLength": 1}, "description": _TEXT, "input_schema": _OBJECT},
            ),
        },
        "tool_choice": _body(["type"], {"type": {"enum": ["auto", "any", "tool", "none"]}, "name": _TEXT}),
        "thinking": _body(
            ["type"], {"type": {"enum": ["enabled", "adaptive", "disabled"]}, "budget_tokens": _whole(1)}
        ),
    },
)
"""POST /v1/messages/count_tokens."""

MESSAGES: Schema = _body(
    ["model", "messages", "max_tokens"],
    COUNT["properties"]
    | {
        "max_tokens": _whole(1),
        "stop_sequences": _NAMES,
        "stream": _FLAG,
        "temperature": _number(0, 1),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": _whole(0, (1 << 31) - 1),
        "metadata": _OBJECT,
    },
)
"""POST /v1/messages."""


def openapi_body(schema: Schema, example: dict[str, Any]) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads its body itself."""
    content = {"application/json": {"schema": schema, "example": example}}
    return {"requestBody": {"required": True, "content": content}}
