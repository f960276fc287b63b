"""convert(): typed values from plain data, and errors that name the field, the value and the valid range."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct

from tapscope.core.convert import (
    CUSTOM,
    Count,
    Finite,
    InvalidValueError,
    NonEmptyStr,
    Positive,
    PositiveInt,
    convert,
    convert_fields,
    describe,
)
from tapscope.core.errors import ConfigError


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]] | None = None


class Body(Struct, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    stop: NonEmptyStr | list[NonEmptyStr] | None = None
    ids: list[Count | list[Count]] | None = None
    bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None


MESSAGES = [{"role": "user"}]


@pytest.mark.parametrize(
    ("value", "path", "message"),
    [
        ([], "", "must be a JSON object, not []"),
        ({}, "messages", "messages is missing: must be a non-empty list of JSON objects"),
        ({"messages": []}, "messages", "messages=[]: must be a non-empty list of JSON objects"),
        ({"messages": [{"role": "x"}]}, "messages[0].role", "messages[0].role='x': must be one of user, assistant"),
        ({"messages": [{}]}, "messages[0].role", "messages[0].role is missing: must be one of user, assistant"),
        (
            {"messages": [{"role": "user", "x": 1}]},
            "messages[0].x",
            "messages[0].x is not supported; supported: role, content",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content",
            "messages[0].content=5: must be a string or a list of JSON objects or null",
        ),
        ({"messages": MESSAGES, "n": 0}, "n", "n=0: must be an integer from 1 to 128"),
        ({"messages": MESSAGES, "n": True}, "n", "n=True: must be an integer from 1 to 128"),
        ({"messages": MESSAGES, "n": 1.5}, "n", "n=1.5: must be an integer from 1 to 128"),
        ({"messages": MESSAGES, "top_p": 0}, "top_p", "top_p=0: must be a number > 0 and ≤ 1"),
        ({"messages": MESSAGES, "stop": ["a", ""]}, "stop[1]", "stop[1]='': must be a non-empty string"),
        ({"messages": MESSAGES, "ids": [1, [2, "x"]]}, "ids[1][1]", "ids[1][1]='x': must be an integer ≥ 0"),
        (
            {"messages": MESSAGES, "bias": {"5": 101}},
            "bias",
            "bias={'5': 101}: must be a JSON object of numbers from -100 to 100 or null",
        ),
    ],
)
def test_convert_names_field_value_and_rule(value: Any, path: str, message: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        convert(value, Body)
    assert (caught.value.path, str(caught.value)) == (path, message)
    assert caught.value.is_unknown == message.startswith("messages[0].x is not supported")


def test_convert_takes_integral_floats_for_integers() -> None:
    assert convert({"messages": MESSAGES, "n": 2.0}, Body).n == 2


def test_convert_shows_long_values_cut_and_quickly() -> None:
    with pytest.raises(InvalidValueError) as caught:
        convert({"messages": [5] * 1_000_000}, Body)
    assert str(caught.value) == "messages[0]=5: must be a JSON object"
    with pytest.raises(InvalidValueError, match="…: must be an integer from 1 to 128"):
        convert({"messages": MESSAGES, "n": "x" * 1_000_000}, Body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    count: PositiveInt = 1
    timeout_s: Positive | None = None
    weight: Finite = 0.0
    names: tuple[str, ...] = ()
    level: Literal["off", "stats"] = "off"
    token: str | None = None
    custom: Mapping[str, int] = field(default_factory=dict, metadata=CUSTOM)

    def __post_init__(self) -> None:
        convert_fields(self, ConfigError, secret=("token",))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "count=0: must be an integer ≥ 1"),
        ({"timeout_s": float("inf")}, "timeout_s=inf: must be a finite number > 0 or null"),
        ({"weight": float("nan")}, "weight=nan: must be a finite number"),
        ({"names": "a"}, "names='a': must be a list of strings"),
        ({"level": "x"}, "level='x': must be one of off, stats"),
        ({"token": 5}, "token=...: must be a string or null"),
    ],
)
def test_convert_fields_names_setting_value_and_rule(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**settings)
    assert str(caught.value) == message


def test_convert_fields_converts_in_place_and_leaves_custom_fields() -> None:
    made = Settings(weight=1, names=["a"], custom={"x": 1})  # type: ignore[arg-type]
    assert (made.weight, type(made.weight), made.names, made.custom) == (1.0, float, ("a",), {"x": 1})


def test_describe_words_annotations() -> None:
    assert describe(list[str] | None) == "a list of strings or null"
    assert describe(Annotated[str, Meta(extra={"must be": "a path"})]) == "a path"
    assert describe(dict[str, Any]) == "a JSON object"
    assert describe(Any) == "a JSON value"
