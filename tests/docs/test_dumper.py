"""docs/dumper.md is complete and true: its tables against the code, its Python and its output by running them."""

import re
import typing
from collections.abc import Iterable
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import Any

import forkserver_pool as warm
import pytest

from tapscope import dumper
from tapscope.dumper.config import RUNTIME_FIELDS, DumperConfig
from tapscope.dumper.control.control_app import make_app
from tapscope.dumper.control.control_client import ControlClient
from tapscope.dumper.environment import changes_of, value_of
from tapscope.dumper.rules.byte_size import parse_size
from tapscope.dumper.rules.rule import MOMENT_NAMES, SITE_NAMES, parse_rule
from tapscope.dumper.rules.rule_options import OPTIONS
from tapscope.dumper.rules.trigger import ACTIONS, PLACEHOLDERS, STATISTICS
from tapscope.expr.functions import FUNCTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/dumper.md").read_text()


def _table(heading: str) -> list[list[str]]:
    """Cells of the rows below the line that begins with ``heading``, code marks and all."""
    lines = PAGE[PAGE.index(f"\n{heading}") + 1 :].splitlines()
    rows = list(takewhile(lambda line: line.startswith("|"), lines))[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def _marked(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def _blocks(language: str) -> list[tuple[str, str]]:
    """(code, the plain block that follows at once, or nothing) of every block in a language."""
    pattern = rf"^```{language}\n(.*?)^```\n(?:```\n(.*?)^```\n)?"
    return re.findall(pattern, PAGE, re.DOTALL | re.MULTILINE)


def test_every_setting_is_in_the_table_with_its_default_and_variable() -> None:
    rows = _table("| setting | default")
    assert [_marked(row[0]) for row in rows] == [[each.name] for each in fields(DumperConfig)]
    for row, each in zip(rows, fields(DumperConfig), strict=True):
        assert row[2] == ("yes" if each.name in RUNTIME_FIELDS else ""), each.name
        assert _marked(row[3]) == [f"TAPSCOPE_{each.name.upper()}"]
        default = [] if row[1] == "none" and each.name in ("rules", "triggers") else value_of(each.name, row[1])
        shown = parse_size(default) if each.name.endswith("_bytes") and isinstance(default, str) else default
        assert getattr(DumperConfig(), each.name) == (tuple(shown) if shown == [] else shown), each.name
    choices = {name: typing.get_args(hint) for name, hint in typing.get_type_hints(DumperConfig).items()}
    for name in ("keep", "policy", "mode", "fsync"):
        (row,) = [row for row in rows if _marked(row[0]) == [name]]
        assert sorted(_marked(row[4])) == sorted(choices[name])


def test_every_option_of_a_rule_is_in_the_table_and_reads() -> None:
    examples = [example for row in _table("| option | holds for") for example in _marked(row[0])]
    named = [example.partition("=")[0] for example in examples]
    assert {*named} == {*OPTIONS, "tag.user", "when"}
    for example in examples:
        if not example.startswith("when="):
            assert parse_rule(f"*:out=full {example}").keep == "full"
    assert parse_rule('layers.3.*:out=full steps=0-99 when=search("attn", name) and numel > 4096').when


@pytest.mark.parametrize(
    "names",
    [SITE_NAMES, MOMENT_NAMES, FUNCTIONS, STATISTICS, ACTIONS, [f"{{{name}}}" for name in PLACEHOLDERS]],
    ids=["site", "moment", "function", "statistic", "action", "placeholder"],
)
def test_the_words_of_expressions_and_triggers_are_told(names: Iterable[str]) -> None:
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE).replace("\n", " ")
    words = {word for marked in _marked(prose) for word in marked.split()}
    assert [name for name in names if name not in words] == []


def test_every_call_of_the_process_dumper_is_in_the_table() -> None:
    told = " ".join(row[0] for row in _table("| call | |")) + " attach() close() register()"
    functions = [name for name in dumper.__all__ if name[0].islower() and name != "make_observer"]
    assert [name for name in functions if not re.search(rf"\b{name}\(", told)] == []


def test_every_route_is_in_the_table() -> None:
    told = {marked.split("?")[0] for row in _table("| route | |") for marked in _marked(row[0])}
    paths = make_app(ControlClient("ipc:///nowhere")).openapi()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert told == routes | {"GET /openapi.json"}


def test_every_variable_of_sglang_in_the_table_counts() -> None:
    values = {"DUMPER_SERVER_PORT": "7000", "DUMPER_FILTER": "step > 1", "DUMPER_NON_INTRUSIVE_MODE": "core"}
    for row in _table("| SGLang | here |")[:-1]:
        (variable,) = _marked(row[0])
        assert list(changes_of({variable: values.get(variable, "1")}, sglang=True)) == _marked(row[1])[:1]


def test_every_test_that_the_page_names_exists() -> None:
    rows = _table("| # | weakness | here | tests |")
    assert [row[0] for row in rows] == [str(number) for number in range(1, 22)]
    written = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)\(", written, re.MULTILINE))
    for row in rows:
        assert _marked(row[3])
        assert set(_marked(row[3])) <= there, row[0]


def _run(tmp_path: Path, *words: Any) -> str:
    done = warm.run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_python_runs_and_prints_what_the_page_shows(tmp_path: Path) -> None:
    blocks = _blocks("python")
    assert len(blocks) > 6
    program = tmp_path / "page.py"
    program.write_text("\n".join(code for code, _ in blocks))
    said = _run(tmp_path, "-W", "error", program).splitlines()
    shown = [line for _, output in blocks for line in output.splitlines()]
    assert shown
    assert [line for line in shown if line not in said] == []
    (records,) = re.findall(r"^records    .*$", PAGE, re.MULTILINE)
    assert records in _run(tmp_path, "-m", "tapscope", "info", "run").splitlines()
    assert "complete   yes" in _run(tmp_path, "-m", "tapscope", "verify", "run").splitlines()


def test_the_training_example_prints_what_the_page_shows(tmp_path: Path) -> None:
    shown = PAGE[PAGE.index("$ python examples/03_training.py") :].partition("$ tapscope")[0].splitlines()[1:]
    assert len(shown) == 12
    said = _run(tmp_path, ROOT / "examples/03_training.py", tmp_path / "run-training").splitlines()
    assert [line for line in shown if line not in said] == []
    rules = re.findall(r'^"(model\.\S+)" ', PAGE, re.MULTILINE)
    assert len(rules) == 3
    assert all(f'"{rule}"' in (ROOT / "examples/03_training.py").read_text() for rule in rules)
