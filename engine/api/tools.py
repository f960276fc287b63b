"""A request's tools and tool choice, and the JSON schema of required calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from tapscope.core.convert import NonEmptyStr, must_be
from tapscope.core.errors import RequestError
from tapscope.engine.api.request_model import read_as

JsonSchema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools and the tool choice of one request."""

    definitions: tuple[dict[str, Any], ...] = ()
    """Tool definitions in OpenAI's format, which chat templates use."""
    choice: str = "none"
    """``none``, ``auto``, ``required``, or ``named``."""
    named: str = ""
    """Name of the tool to call if the choice is ``named``."""
    is_parallel: bool = True
    """Whether one output may contain several calls."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tools, in order."""
        return tuple(tool["function"]["name"] for tool in self.definitions)

    @property
    def is_forced(self) -> bool:
        """Whether the output must be a call."""
        return self.choice in ("required", "named")

    @property
    def is_strict(self) -> bool:
        """Whether calls are optional and some tool is strict, so that calls to it must match its schema."""
        return self.choice == "auto" and any(tool["function"].get("strict") for tool in self.definitions)

    def schema(self) -> str:
        """Return the JSON-encoded schema of a forced output: the named call's arguments, or a list of calls."""
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


class FunctionDefinition(msgspec.Struct, kw_only=True):
    """A function that a model may call; ``parameters`` is the JSON schema of its arguments."""

    name: NonEmptyStr
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool, in OpenAI's format."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, kw_only=True):
    """The function to call."""

    name: str
    """Name of the function."""


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """A choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice,
    must_be('"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'),
]


def read_tools(tools: Sequence[dict[str, Any]], choice: "str | NamedToolChoice | None", *, is_parallel: bool) -> Tools:
    """Validate ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of an OpenAI body; raises RequestError."""
    names = [read_as(ToolDefinition, tool, f"tools[{i}]").function.name for i, tool in enumerate(tools)]
    check_unique(names)
    if isinstance(choice, NamedToolChoice):
        kind, named = "named", choice.function.name
    elif choice == "required":
        kind, named = "required", ""
    else:
        kind, named = (choice or "auto") if tools else "none", ""
    if kind in ("required", "named") and not tools:
        raise RequestError("tool_choice requires a call but there are no tools; add tools", param="tool_choice")
    if kind == "named" and named not in names:
        text = f"tool_choice names the unknown tool {named!r}; tools: {', '.join(names)}"
        raise RequestError(text, param="tool_choice")
    definitions = tuple(tool if "type" in tool else {"type": "function"} | tool for tool in tools)
    return Tools(definitions, kind, named, is_parallel)


def check_unique(names: Sequence[str]) -> None:
    """Raise RequestError if two tools have the same name."""
    if len(set(names)) < len(names):
        name = next(each for each in names if names.count(each) > 1)
        raise RequestError(f"tools: two tools are named {name!r}; rename one", param="tools")


def parameters_of(tool: dict[str, Any]) -> JsonSchema:
    """Return the JSON schema of a tool's arguments."""
    schema = tool["function"].get("parameters") or {}
    return {"type": "object"} | schema


def _call_schema(name: str, schema: JsonSchema, definitions: JsonSchema) -> JsonSchema:
    """Return the schema of one call; its ``$defs`` move to ``definitions``, the root that ``#/$defs/...`` refers to.

    Raises RequestError if two tools define the same name in ``$defs`` differently.
    """
    own = schema.get("$defs") or {}
    if not isinstance(own, dict):
        raise RequestError(f"the $defs in the parameters of the tool {name!r} must be an object", param="tools")
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
