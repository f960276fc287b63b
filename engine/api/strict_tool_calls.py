"""Strict tools with ``tool_choice: auto``: a structural tag constrains calls to the tools' schemas."""

import json
from typing import Any, NamedTuple

from tapscope.engine.api.tool_parsers import CALL_CLOSE, CALL_OPEN, PYTHON_TAG
from tapscope.engine.api.tools import Tools, parameters_of


class _Form(NamedTuple):
    """Format of a call: ``begin``, its name, ``between``, its arguments, ``end``."""

    trigger: str
    begin: str
    between: str
    end: str


_FORMS = {
    "hermes": (_Form(CALL_OPEN, f'{CALL_OPEN}\n{{"name": ', ', "arguments": ', f"}}\n{CALL_CLOSE}"),),
    "llama3": (
        _Form('{"name"', '{"name": ', ', "parameters": ', "}"),
        _Form(PYTHON_TAG, f'{PYTHON_TAG}{{"name": ', ', "parameters": ', "}"),
    ),
}


def strict_tag(tools: Tools, tool_format: str) -> str:
    """The structural tag, JSON-encoded: arguments of strict tools match their schemas, those of others are objects.

    Without parallel calls the output ends after the first one.
    """
    forms = _FORMS[tool_format]
    tags = [_tag(form, tool) for form in forms for tool in tools.definitions]
    calls: dict[str, Any] = {"type": "triggered_tags", "triggers": [form.trigger for form in forms], "tags": tags}
    return json.dumps({"format": calls | {"stop_after_first": not tools.is_parallel}})


def _tag(form: _Form, tool: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = parameters_of(tool) if tool["function"].get("strict") else {"type": "object"}
    begin = form.begin + json.dumps(tool["function"]["name"]) + form.between
    return {"begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": form.end}
