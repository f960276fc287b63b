"""The comparator's pages and docs/diff.schema.json match the code."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from comparator_toy import Toy, damaged, prompts, weights

from tapscope.cli import main
from tapscope.dashboard.keymap import DIFF_KEYS

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "docs/diff.schema.json"


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


@pytest.fixture(scope="module")
def schema() -> Any:
    """Return the validator of one line of `tapscope diff --json`."""
    return jsonschema_rs.Draft202012Validator(json.loads(SCHEMA.read_text()))


def test_json_output_satisfies_the_schema(schema: Any) -> None:
    lines = [
        json.loads(line) for line in (ROOT / "tests/comparator/golden/comparator_lines.jsonl").read_text().splitlines()
    ]
    assert [line["type"] for line in lines] == ["header", *["finding"] * (len(lines) - 2), "summary"]
    assert [error.message for line in lines for error in schema.iter_errors(line)] == []
    odd = [line["nonfinite"] for line in lines if line["nonfinite"]]
    assert any(each.get("ratio") == "inf" for each in odd)
    assert any(each.get("metrics.max_abs") == "nan" for each in odd)
    spoiled = [
        {**lines[1], "verdict": "fine"},
        {**lines[1], "order": "1"},
        {**lines[-1], "more": 1},
        {"type": "finding"},
    ]
    assert not any(schema.is_valid(line) for line in spoiled)


def test_json_page_has_every_field_of_every_line() -> None:
    schema: dict[str, Any] = json.loads(SCHEMA.read_text())
    page = _page("reference/json.md")
    for kind, definition in schema["$defs"].items():
        section = page.partition(f"\n## {kind}\n")[2].partition("\n## ")[0]
        assert {name for name in definition.get("properties", {}) if f"| `{name}` |" not in section} == set(), kind


def test_compare_page_names_every_option_of_diff(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "--help"]) == 0
    flags = set(re.findall(r"(?<![\w'-])--[a-z-]+", capsys.readouterr().out)) - {"--help", "--color", "--quiet"}
    assert {flag for flag in flags if flag not in _page("guide/compare.md")} == set()


def test_view_page_names_every_key_of_the_diff_screen() -> None:
    page = re.sub(r"```.*?```", "", _page("guide/view.md"), flags=re.DOTALL)
    told = set(" ".join(re.findall(r"`([^`]+)`", page)))
    keys = {spec.id: spec.shown.split()[0] for spec in DIFF_KEYS if spec.label}
    assert {name for name, key in keys.items() if key != "esc" and not set(key) <= told} == set()


def test_culprits_page_names_every_hypothesis() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "comparator/explain").glob("*.py"))
    families = set(re.findall(r'(?:Trial|Hypothesis|HypothesisTest)\(\s*"([a-z -]+)"', sources)) | set(
        re.findall(r'_columns\(\w+, "([a-z ]+)"', sources)
    )
    assert len(families) > 20
    told = _page("explanation/culprits.md")
    assert {name for name in families if f"`{name}`" not in told} == set()


@pytest.mark.parametrize("fault", ["none", "noise", "zeroed", "nan"])
def test_json_of_model_runs_satisfies_the_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schema: Any, fault: str
) -> None:
    tables, path = weights(layers=2), "model.layers.1.mlp.down_proj"
    spoiled = damaged(tables, path, fault) if fault in ("noise", "zeroed") else tables
    hooks = {f"{path}:out": lambda x: np.where(np.arange(x.shape[1]) == 3, np.nan, x)} if fault == "nan" else {}
    Toy(tables).write(tmp_path / "b", prompts((6, 4))).close()
    Toy(spoiled, dtype="bfloat16", tp=2, hooks=hooks).write(tmp_path / "t", prompts((6, 4))).close()
    code = main(["diff", str(tmp_path / "b"), str(tmp_path / "t"), "--json", "--detail"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [error.message for line in lines for error in schema.iter_errors(line)] == []
    assert lines[-1]["exit_code"] == code == int(fault != "none")
