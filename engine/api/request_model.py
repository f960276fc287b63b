"""RequestModel: base class of request bodies, which validates JSON and describes it for OpenAPI."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from tapscope.core.convert import InvalidValueError, convert
from tapscope.core.errors import RequestError
from tapscope.core.field_docs import field_docs
from tapscope.engine.params.sampling_params import SamplingParams

T = TypeVar("T")
Name = Annotated[str, Meta(min_length=1, max_length=500)]

SENDER_FIELDS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""OpenAI's metadata fields about the sender, which never affect the output."""


class RequestModel(msgspec.Struct, kw_only=True, frozen=True):
    """A request body. Null fields count as absent; unknown fields are rejected unless they cannot affect the output."""

    IGNORED: ClassVar[tuple[str, ...]] = ()
    """Undeclared fields that are accepted with any value because they never affect the output."""
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Undeclared fields -> values that are accepted because they request the default behavior."""

    FALSE_IS_ABSENT: ClassVar[bool] = False
    """Whether any undeclared field is accepted if its value is false."""

    @classmethod
    def parse(cls, body: Any) -> Self:
        """Parse and validate decoded JSON; the RequestError names the field, its value and the valid values."""
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        known = cls.__struct_fields__
        given = {}
        for name, value in body.items():
            if value is None or (name not in known and cls._is_neutral(name, value)):
                continue
            if name not in known:
                harmless = cls.NEUTRAL.get(name)
                rule = f"supported: {', '.join(known) or 'no field'}"
                rule = rule if harmless is None else f"leave it out, or give {' or '.join(map(_encoded, harmless))}"
                text = f"{name[:100]} is not supported; {rule}"
                raise RequestError(text, param=name[:100], code="unsupported_parameter")
            given[name] = value
        return read_as(cls, given)

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        is_neutral = name in cls.IGNORED or value in cls.NEUTRAL.get(name, ())
        return is_neutral or (value is False and cls.FALSE_IS_ABSENT)


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def read_as(to: type[T], value: Any, path: str = "") -> T:
    """Convert ``value``, found at ``path`` in a body, to the type ``to``; raises RequestError."""
    try:
        return convert(value, to, path)
    except InvalidValueError as error:
        code = "unsupported_parameter" if error.is_unknown else None
        raise RequestError(str(error), param=error.path or None, code=code) from None


def openapi_body(
    model: type[RequestModel], example: dict[str, Any], answer: Any = None, *, required: bool = True
) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route with the body ``model`` and the response type ``answer`` (None: any)."""
    schema = described_schema(model) | {"additionalProperties": False}
    content = {"application/json": {"schema": schema, "example": example}}
    extra: dict[str, Any] = {"requestBody": {"required": required, "content": content}}
    return extra if answer is None else extra | openapi_answer(answer)


def openapi_answer(answer: Any) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route with the response type ``answer``."""
    return {"responses": {"200": {"content": {"application/json": {"schema": described_schema(answer)}}}}}


def described_schema(model: Any) -> dict[str, Any]:
    """Return the JSON schema of ``model`` with references inlined and field docstrings as descriptions.

    A body field without a docstring gets the description of the sampling parameter of the same name.
    """
    (schema,), definitions = msgspec.json.schema_components([model], ref_template="{name}")
    for cls in set(_structs(model)) or {model}:
        docs = field_docs(SamplingParams) if issubclass(cls, RequestModel) else {}
        docs |= field_docs(cls)
        for name, field in definitions[cls.__name__]["properties"].items():
            if name in docs:
                field["description"] = re.sub(r"\bNone\b", "null", docs[name]).replace("``", "`")
    described: dict[str, Any] = _inlined(schema, definitions)
    return described


def _structs(annotation: Any) -> Iterator[type]:
    """Yield every Struct class in an annotation, recursively including the fields of each Struct."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
        parts: Iterable[Any] = get_type_hints(annotation, include_extras=True).values()
    else:
        parts = get_args(annotation)
    for part in parts:
        yield from _structs(part)


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Return ``schema`` with all references replaced by their definitions."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        own = {name: value for name, value in schema.items() if name != "$ref"}
        return _inlined(definitions[schema["$ref"]], definitions) | own
    return {name: _inlined(item, definitions) for name, item in schema.items() if name != "discriminator"}
