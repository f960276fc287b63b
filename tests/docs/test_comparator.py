"""docs/comparator.md is true: its story by running it, its JSON and its flags against what there is."""

import json
import re
import shlex
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import forkserver_pool as warm
import numpy as np
import pytest
from comparator_toy import Toy, damaged, prompts, weights
from diff_schema import make_schema, problems

from tapscope.cli import main
from tapscope.dashboard.keymap import DIFF_KEYS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/comparator.md").read_text()
SCHEMA = ROOT / "docs/diff.schema.json"
NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]\d+)?")


def _section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def _commands(section: str) -> list[tuple[str, list[str]]]:
    """(command, the lines shown below it), line continuations joined."""
    text = "\n".join(re.findall(r"^```\n(\$ .*?)^```", section, re.DOTALL | re.MULTILINE)).replace("\\\n", " ")
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
    shown = [list(takewhile(lambda line: not line.startswith("$ "), lines[i + 1 :])) for i in starts]
    return [(lines[i][2:], output) for i, output in zip(starts, shown, strict=True)]


def _run(command: str, cwd: Path) -> tuple[int, list[str]]:
    words = re.sub(r"^tapscope ", "python -m tapscope ", command)
    words = re.sub(r"^python examples/", f"python {ROOT}/examples/", words)
    environment = {**_environment(), "COLUMNS": "118"}
    if set(words) & set("|&;<>$"):
        words = words.replace("python ", f"{sys.executable} ", 1)
        done = subprocess.run(words, shell=True, capture_output=True, text=True, cwd=cwd, check=False, env=environment)
    else:
        python, *rest = shlex.split(words)
        assert python == "python", command
        done = warm.run(*rest, cwd=cwd, env=environment)
    return done.returncode, [line.rstrip() for line in done.stdout.splitlines()]


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def _masked(line: str) -> str:
    """Without numbers that depend on the machine's arithmetic, and the blanks that depend on their lengths."""
    return re.sub(r"[\s─]+", " ", NUMBER.sub("#", line)).strip()


pytestmark = pytest.mark.timeout(900)  # eight processes, one after the other


def _pattern(line: str) -> re.Pattern[str]:
    """What a line of the page matches: three dots stand for anything."""
    return re.compile(re.escape(_masked(line)).replace("…", ".*"))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[str], int, list[str]]]:
    """(command, lines shown, exit code, lines printed) of every command of the story, run in order."""
    path = tmp_path_factory.mktemp("story")
    return [(command, shown, *_run(command, path)) for command, shown in _commands(_section("A story"))]


def test_the_story_happens_as_it_is_told(story: list[tuple[str, list[str], int, list[str]]]) -> None:
    assert sum("tapscope diff" in command for command, *_ in story) >= 3
    for command, shown, code, printed in story:
        assert code in (0, 1), command
        have = [_masked(line) for line in printed]
        told = [line for line in shown if line.strip() not in ("", "…")]
        lost = [line for line in told if not any(_pattern(line).fullmatch(one) for one in have)]
        assert lost == [], f"{command} printed\n" + "\n".join(printed)


def test_the_story_names_what_was_done(story: list[tuple[str, list[str], int, list[str]]]) -> None:
    (spoiled,) = re.findall(r'SPOILED = "(.*)"', (ROOT / "examples/07_conversion.py").read_text())
    first = next(lines for command, _, _, lines in story if command.startswith("tapscope diff"))
    assert f"what      {spoiled}.gate_proj (out) differs" in "\n".join(first)
    assert f"target = the baseline of {spoiled}.up_proj:out" in first[-2]


def test_the_schema_is_that_of_the_classes(request: pytest.FixtureRequest) -> None:
    made = json.dumps(make_schema(), indent=1, ensure_ascii=False) + "\n"
    if request.config.getoption("update_snapshots"):
        SCHEMA.write_text(made)
    assert made == SCHEMA.read_text(), "run: pytest tests/docs/test_comparator.py --snapshot-update"


def test_what_is_printed_obeys_the_schema() -> None:
    schema = json.loads(SCHEMA.read_text())
    lines = [
        json.loads(line) for line in (ROOT / "tests/comparator/golden/comparator_lines.jsonl").read_text().splitlines()
    ]
    assert [line["type"] for line in lines] == ["header", *["finding"] * (len(lines) - 2), "summary"]
    assert [found for line in lines for found in problems(line, schema, schema)] == []
    odd = [line["nonfinite"] for line in lines if line["nonfinite"]]
    assert {"ratio": "inf"} in odd
    spoiled = [
        {**lines[1], "verdict": "fine"},
        {**lines[1], "order": "1"},
        {**lines[-1], "more": 1},
        {"type": "finding"},
    ]
    assert all(problems(line, schema, schema) for line in spoiled)


def test_every_field_of_a_finding_and_of_a_summary_is_told() -> None:
    told = set(re.findall(r"`([a-z_0-9]+)`", _section("JSON")))
    schema: dict[str, Any] = json.loads(SCHEMA.read_text())
    for kind in (
        "header",
        "finding",
        "summary",
        "Divergence",
        "Explanation",
        "Place",
        "Numbers",
        "RowCounts",
        "StepResult",
    ):
        assert set(schema["$defs"][kind]["properties"]) - told == set(), kind


def test_every_flag_of_diff_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "--help"]) == 0
    flags = set(re.findall(r"(?<![\w'-])--[a-z-]+", capsys.readouterr().out)) - {"--help", "--color", "--quiet"}
    assert {flag for flag in flags if flag not in PAGE} == set()


def test_the_page_names_every_key_of_the_screen() -> None:
    told = set(" ".join(re.findall(r"`([^`]+)`", _section("On a screen"))))
    keys = {spec.id: spec.shown.split()[0] for spec in DIFF_KEYS if spec.label}
    assert {name for name, key in keys.items() if key != "esc" and not set(key) <= told} == set()


def test_every_hypothesis_is_told() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "comparator/explain").glob("*.py"))
    families = set(re.findall(r'Trial\(\s*"([a-z -]+)"', sources)) | set(
        re.findall(r'_columns\(damage, "([a-z ]+)"', sources)
    )
    told = _section("Why: hypotheses")
    assert {name for name in families if f"`{name}`" not in told} == set()


@pytest.mark.parametrize("fault", ["none", "noise", "zeroed", "nan"])
def test_runs_of_a_model_obey_the_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    tables, path = weights(layers=2), "model.layers.1.mlp.down_proj"
    spoiled = damaged(tables, path, fault) if fault in ("noise", "zeroed") else tables
    hooks = {f"{path}:out": lambda x: np.where(np.arange(x.shape[1]) == 3, np.nan, x)} if fault == "nan" else {}
    Toy(tables).write(tmp_path / "b", prompts((6, 4))).close()
    Toy(spoiled, dtype="bfloat16", tp=2, hooks=hooks).write(tmp_path / "t", prompts((6, 4))).close()
    code = main(["diff", str(tmp_path / "b"), str(tmp_path / "t"), "--json", "--detail"])
    schema = json.loads(SCHEMA.read_text())
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [found for line in lines for found in problems(line, schema, schema)] == []
    assert lines[-1]["exit_code"] == code == int(fault != "none")
