"""Fields of a JSON schema in an OpenAPI description."""

from collections.abc import Iterator
from typing import Any


def fields_of(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, description) of every field at any depth."""
    for name, each in schema.get("properties", {}).items():
        yield f"{path}.{name}", each.get("description", "")
        yield from fields_of(each, f"{path}.{name}")
    for part in (*schema.get("anyOf", ()), *filter(None, [schema.get("items")])):
        yield from fields_of(part, path)
