"""Tools that a request offers, which of them it wants called, and the JSON schema that makes the model call them."""

import json
from dataclasses import dataclass
from typing import Any

from tapscope.core.errors import RequestError
from tapscope.engine.params.json_fields import Fields

JsonSchema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request."""

    definitions: tuple[dict[str, Any], ...] = ()
    """In OpenAI's form, as a chat template takes them."""
    choice: str = "none"
    """``none``, ``auto``, ``required``, or ``named``."""
    named: str = ""
    """The tool to call when the choice is ``named``."""
    is_parallel: bool = True
    """Whether one answer may call several."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tools, in order."""
        return tuple(tool["function"]["name"] for tool in self.definitions)

    @property
    def is_forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice in ("required", "named")

    @property
    def is_strict(self) -> bool:
        """Whether calls that the model makes of its own accord are to be what a tool's schema accepts."""
        return self.choice == "auto" and any(tool["function"].get("strict") for tool in self.definitions)

    def schema(self) -> str:
        """JSON schema (as text) of an answer that is forced to be calls: arguments alone, or a list of calls."""
        schemas = {tool["function"]["name"]: parameters_of(tool) for tool in self.definitions}
        if self.choice == "named":
            return json.dumps(schemas[self.named])
        definitions: JsonSchema = {}
        calls = [_call_schema(name, schema, definitions) for name, schema in schemas.items()]
        items: JsonSchema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if not self.is_parallel:
            items["maxItems"] = 1
        return json.dumps(items | ({"$defs": definitions} if definitions else {}))


NO_TOOLS = Tools()


def read_tools(fields: Fields) -> Tools:
    """From ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of an OpenAI body."""
    definitions = tuple(_definition(tool) for tool in fields.objects("tools"))
    names = [tool["function"]["name"] for tool in definitions]
    if len(set(names)) < len(names):
        raise fields.wrong("tools", "no two tools may have the same name")
    choice, named = _choice(fields, bool(definitions))
    if choice in ("required", "named") and not definitions:
        raise RequestError("tool_choice asks for a call but there are no tools; add tools", param="tool_choice")
    if choice == "named" and named not in names:
        text = f"tool_choice names {named!r}, which is not among the tools {', '.join(names)}"
        raise RequestError(text, param="tool_choice")
    return Tools(definitions, choice, named, fields.flag("parallel_tool_calls", True))


def _definition(tool: Fields) -> dict[str, Any]:
    if tool.values.get("type", "function") != "function":
        raise tool.wrong("type", "only tools of the type function are supported")
    function = tool.object("function")
    if function is None:
        raise RequestError(f"{tool.path('function')} is missing", param=tool.path("function"))
    function.name("name")
    function.text("description")
    function.object("parameters")
    function.flag("strict")
    return tool.values if "type" in tool.values else {"type": "function"} | tool.values


def _choice(fields: Fields, has_tools: bool) -> tuple[str, str]:
    value = fields.values.get("tool_choice")
    if value is None:
        return ("auto" if has_tools else "none"), ""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return (value if has_tools or value == "required" else "none"), ""
    rule = 'it must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
    if not isinstance(value, dict) or value.get("type") != "function" or not isinstance(value.get("function"), dict):
        raise fields.wrong("tool_choice", rule)
    return "named", Fields(value["function"], "tool_choice.function").required_text("name")


def parameters_of(tool: dict[str, Any]) -> JsonSchema:
    """The JSON schema of a tool's arguments."""
    schema = tool["function"].get("parameters") or {}
    return {"type": "object"} | schema


def _call_schema(name: str, schema: JsonSchema, definitions: JsonSchema) -> JsonSchema:
    """Of one call; ``$defs`` move to the root, where ``#/$defs/...`` looks for them."""
    own = schema.get("$defs") or {}
    if not isinstance(own, dict):
        raise RequestError(f"the parameters of the tool {name!r} have $defs that are no object", param="tools")
    schema = {key: value for key, value in schema.items() if key != "$defs"}
    for key, value in own.items():
        if definitions.setdefault(key, value) != value:
            raise RequestError(f"two tools define $defs.{key} differently; rename one", param="tools")
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": schema},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
