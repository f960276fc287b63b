"""Whatever stands in run.json: the run opens and can be looked at, or one sentence says what is wrong with it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import RunFactory
from hypothesis import example, given
from hypothesis import strategies as st

from tapscope import cli
from tapscope.core.errors import RunCorruptError, RunVersionError
from tapscope.sources import open_run

_MEMBERS = ["version", "hash_version", "world_size", "mesh", "framework", "model", "dtype", "created", "tapscope"]
_MEMBERS += ["command", "seeds", "config", "something else"]
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["2", -1, 0, 1, 2, 10**30]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("manifest") / "run"
    with RunFactory(path, mesh={"tp": 2}) as made:
        made.step()
        made.put("layers.0:out", {0: np.ones(4, np.float32), 1: np.ones(4, np.float32)}, dims="h[tp]")
    return path


def _rewrite(run: Path, members: dict[str, Any]) -> None:
    original = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(original | members))


def _problem(run: Path) -> str:
    try:
        with open_run(run) as opened:
            assert opened.world_size >= 1
            assert opened.hash_version >= 1
            assert all(size >= 1 for size in opened.mesh.values())
            opened.ledger()
    except (RunCorruptError, RunVersionError) as error:
        return str(error)
    return ""


@given(st.dictionaries(st.sampled_from(_MEMBERS), _json, max_size=4))
@example({"hash_version": "2"})
@example({"world_size": 10**30})
@example({"mesh": [1]})
@example({"mesh": {"tp": "two"}})
@example({"mesh": None, "world_size": None, "hash_version": None})
@example({"model": "\ud800"})
@example({"dtype": [1]})
@example({"version": True})
def test_manifest_hostile_content_is_one_sentence_or_a_run(run: Path, members: dict[str, Any]) -> None:
    text = (run / "run.json").read_text()
    try:
        _rewrite(run, members)
        problem = _problem(run)
        assert "\n" not in problem
        assert cli.main(["info", str(run)]) in ((3,) if problem else (0, 1))
        assert cli.main(["ls", str(run)]) == (3 if problem else 0)
    finally:
        (run / "run.json").write_text(text)


@pytest.mark.parametrize(
    ("member", "value", "sentence"),
    [
        ("hash_version", "two", "hash_version is 'two'; it must be an integer ≥ 1"),
        ("world_size", -3, "world_size is -3; it must be an integer from 1 to 1,000,000"),
        ("mesh", {"tp": None}, "mesh is {'tp': None}; it must be an object of axis and size"),
        ("dtype", 32, "dtype is 32; it must be a string"),
        ("version", 1.5, "expected an integer ≥ 1, not 1.5"),
    ],
)
def test_manifest_error_names_member_value_and_rule(run: Path, member: str, value: object, sentence: str) -> None:
    text = (run / "run.json").read_text()
    try:
        _rewrite(run, {member: value})
        with pytest.raises(RunCorruptError) as caught:
            open_run(run)
    finally:
        (run / "run.json").write_text(text)
    assert sentence in str(caught.value)
    assert "run.json" in str(caught.value)


def test_manifest_too_deeply_nested_is_corrupt(run: Path, tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    deep.mkdir()
    (deep / "run.json").write_text("[" * 200_000)
    with pytest.raises(RunCorruptError, match="cannot be read"):
        open_run(deep)


def test_manifest_invalid_mesh_line_is_reported_and_skipped(run: Path) -> None:
    index = run / "rank-00000/records.jsonl"
    before = index.read_bytes()
    try:
        index.write_bytes(before + b'{"type":"event","kind":"mesh","mesh":[3],"coords":{}}\n')
        with open_run(run) as opened:
            assert opened.mesh == {"tp": 2}
            assert any("both must be objects" in problem for problem in opened.problems)
    finally:
        index.write_bytes(before)
