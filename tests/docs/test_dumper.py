"""The dumper's pages match the code: rules, expressions, triggers, calls, routes, variables."""

import re
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

import pytest

from tapscope import dumper
from tapscope.dumper.control.control_app import make_app
from tapscope.dumper.control.control_client import ControlClient
from tapscope.dumper.environment import changes_of
from tapscope.dumper.rules.rule import MOMENT_NAMES, SITE_NAMES, parse_rule
from tapscope.dumper.rules.rule_options import OPTIONS
from tapscope.dumper.rules.trigger import ACTIONS, PLACEHOLDERS, STATISTICS
from tapscope.expr.functions import FUNCTIONS

ROOT = Path(__file__).resolve().parents[2]


def _page(name: str) -> str:
    return (ROOT / "docs/guide" / name).read_text()


def _table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the rows below the line that begins with ``heading``, including code marks."""
    lines = page[page.index(f"\n{heading}") + 1 :].splitlines()
    rows = list(takewhile(lambda line: line.startswith("|"), lines))[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def _marked(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_select_page_has_every_option_of_a_rule_and_its_examples_parse() -> None:
    examples = [example for row in _table(_page("select.md"), "| option | matches") for example in _marked(row[0])]
    named = [example.partition("=")[0] for example in examples]
    assert {*named} == {*OPTIONS, "tag.user", "when"}
    for example in examples:
        if not example.startswith("when="):
            assert parse_rule(f"*:out=full {example}").keep == "full"
    assert parse_rule('layers.3.*:out=full steps=0-99 when=search("attn", name) and numel > 4096').when


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("select.md", SITE_NAMES),
        ("select.md", MOMENT_NAMES),
        ("select.md", FUNCTIONS),
        ("triggers.md", STATISTICS),
        ("triggers.md", ACTIONS),
        ("triggers.md", [f"{{{name}}}" for name in PLACEHOLDERS]),
    ],
    ids=["site", "moment", "function", "statistic", "action", "placeholder"],
)
def test_page_names_every_word_of_expressions_and_triggers(page: str, names: Iterable[str]) -> None:
    prose = re.sub(r"^```.*?^```", "", _page(page), flags=re.DOTALL | re.MULTILINE).replace("\n", " ")
    words = {word for marked in _marked(prose) for word in marked.split()}
    assert [name for name in names if name not in words] == []


def test_capture_page_has_every_call_of_the_process_dumper() -> None:
    told = " ".join(row[0] for row in _table(_page("capture.md"), "| call | effect |"))
    functions = [name for name in dumper.__all__ if name[0].islower() and name != "make_observer"]
    assert [name for name in functions if not re.search(rf"\b{name}\(", told)] == []


def test_control_page_has_every_route() -> None:
    rows = _table(_page("control.md"), "| route | effect |")
    told = {marked.split("?")[0] for row in rows for marked in _marked(row[0])}
    paths = make_app(ControlClient("ipc:///nowhere")).openapi()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert told == routes | {"GET /openapi.json"}


def test_capture_page_maps_variables_of_sglang_to_settings() -> None:
    values = {"DUMPER_SERVER_PORT": "7000", "DUMPER_FILTER": "step > 1", "DUMPER_NON_INTRUSIVE_MODE": "core"}
    for row in _table(_page("capture.md"), "| SGLang | tapscope |")[:-1]:
        (variable,) = _marked(row[0])
        assert list(changes_of({variable: values.get(variable, "1")}, sglang=True)) == _marked(row[1])[:1]


def test_known_issues_of_sglang_name_tests_that_exist() -> None:
    page = (ROOT / "tests/dumper/sglang_known_issues.md").read_text()
    rows = _table(page, "| # | issue in SGLang | tapscope | tests |")
    assert [row[0] for row in rows] == [str(number) for number in range(1, 22)]
    written = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)\(", written, re.MULTILINE))
    for row in rows:
        assert _marked(row[3])
        assert set(_marked(row[3])) <= there, row[0]


def test_training_example_has_the_rules_that_the_page_shows() -> None:
    rules = re.findall(r'^"(model\.\S+)" ', _page("capture.md"), re.MULTILINE)
    assert len(rules) == 3
    assert all(f'"{rule}"' in (ROOT / "examples/03_training.py").read_text() for rule in rules)
