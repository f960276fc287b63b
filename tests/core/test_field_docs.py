from dataclasses import dataclass
from types import SimpleNamespace

from tapscope.core.field_docs import field_docs


@dataclass
class Base:
    """Not a field."""

    first: int = 0
    """Of the base."""
    plain: int = 0
    second: int = 0
    """Of the base,
    on two lines."""


class Derived(Base):
    second: int = 1
    """Overridden."""

    def method(self) -> None:
        """Not a field either."""


def test_field_docs_reads_the_strings_below_fields_and_inherits_them() -> None:
    assert field_docs(Base) == {"first": "Of the base.", "second": "Of the base,\non two lines."}
    assert field_docs(Derived) == {"first": "Of the base.", "second": "Overridden."}


def test_field_docs_are_empty_without_source() -> None:
    assert field_docs(SimpleNamespace) == {}
    namespace: dict[str, object] = {"__name__": "generated"}
    exec("class Made:\n    field: int = 0\n", namespace)
    made = namespace["Made"]
    assert isinstance(made, type)
    assert field_docs(made) == {}
