"""Names in untrusted files never reach a terminal as control characters.

Every string of a run is made hostile in turn, for every command, and both screens run in a real terminal.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comparator_toy import Toy, prompts, weights
from hypothesis import given
from hypothesis import strategies as st
from soak_cases import mostly_soak
from terminal_driver import drain_until_exit, read_until, terminal  # noqa: F401 - a fixture

from tapscope.cli import main
from tapscope.core.formatting import json_line, printable

HOSTILE = "EVIL\x1b]0;OWNED\x07\x1b[31m\x1b[2J\x9b31m\x08\r\x7f\u202e\u2066\nforged    line"
"""Window title, color, clear, 8-bit CSI, backspace, bidirectional override, and a forged line of output."""
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
SGR = re.compile(r"\x1b\[[0-9;]*m")
BRIEF = "E\x1b]0;P\x07\x9b1m\u202e"
"""A shorter hostile string that fits into a table column."""
VERBS = (
    ("info", "{}"),
    ("info", "{}", "--verify"),
    ("info", "{}", "--json"),
    ("ls", "{}"),
    ("ls", "{}", "--json"),
    ("show", "{}", "*"),
    ("show", "{}", "*", "--json"),
    ("verify", "{}"),
    ("verify", "{}", "--json"),
    ("repair", "{}", "--dry-run"),
    ("diff", "base", "{}"),
    ("diff", "{}", "base", "--all"),
    ("diff", "base", "{}", "--json"),
)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Toy(weights(layers=1)).write(tmp_path / "base", prompts((6, 4))).close()
    return Path("base")


def leaves(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all strings, including object keys (as a path that ends in None)."""
    if isinstance(item, dict):
        for key, value in item.items():
            yield (*path, key, None)
            yield from leaves(value, (*path, key))
    elif isinstance(item, list):
        for place, value in enumerate(item):
            yield from leaves(value, (*path, place))
    elif isinstance(item, str):
        yield path


def poisoned(item: Any, path: tuple[Any, ...]) -> Any:
    """Return the JSON value with a hostile string appended to the string or key at ``path``."""
    copied = json.loads(json.dumps(item))
    *way, last = path[:-1] if path[-1] is None else path
    holder = copied
    for step in way:
        holder = holder[step]
    if path[-1] is None:
        holder[last + HOSTILE] = holder.pop(last)
    else:
        holder[last] += HOSTILE
    return copied


def mutants(base: Path) -> Iterator[tuple[str, Path, bytes]]:
    """Yield (description, file, hostile content); each kind of line once."""
    manifest = json.loads((base / "run.json").read_bytes())
    for path in leaves(manifest):
        yield f"run.json {path}", Path("run.json"), json.dumps(poisoned(manifest, path)).encode()
    index = Path("rank-00000/records.jsonl")
    lines = [json.loads(line) for line in (base / index).read_bytes().splitlines()]
    seen: set[tuple[Any, ...]] = set()
    for number, line in enumerate(lines):
        for path in leaves(line):
            if (kind := (line["type"], line.get("kind"), line.get("at"), *path)) not in seen:
                seen.add(kind)
                changed = [poisoned(line, path) if i == number else each for i, each in enumerate(lines)]
                yield f"line {kind}", index, b"".join(json.dumps(each).encode() + b"\n" for each in changed)
    extra = {"type": "event", "kind": "rebase", "time": HOSTILE, "reason": HOSTILE}
    metric = {"type": "metric", "step": 0, "name": f"loss{HOSTILE}", "value": 1.0}
    value = {"type": "record", "seq": 99, "site": f"a{HOSTILE}:tap[note]", "step": 0, "value": {f"k{HOSTILE}": HOSTILE}}
    added = (*lines[:-1], extra, metric, value, lines[-1])
    yield "extra lines", index, b"".join(json.dumps(each).encode() + b"\n" for each in added)


def check(capsys: pytest.CaptureFixture[str], command: list[str], what: str) -> None:
    code = main(command)
    out, err = capsys.readouterr()
    assert code in (0, 1, 2, 3), (what, command, code)
    for text in (SGR.sub("", out) if "always" in command else out, err):
        assert not OBEYED.search(text), (what, command, text)
        assert "\nforged" not in text, (what, command, text)
    assert "\x1b]" not in out
    assert "Traceback" not in err


@pytest.mark.parametrize("every", mostly_soak([1, 4], default=[4]))
def test_verbs_escape_control_characters_of_recorded_strings(
    base: Path, capsys: pytest.CaptureFixture[str], every: int
) -> None:
    shown, hostile = 0, list(mutants(base))
    for what, name, data in hostile[::-every]:
        shutil.rmtree("target", ignore_errors=True)
        shutil.copytree(base, "target")
        Path("target", name).write_bytes(data)
        for verb in VERBS:
            check(capsys, [word.format("target") for word in verb], what)
        for verb in (("show", "target", "*", "--color", "always"), ("diff", "base", "target", "--color", "always")):
            check(capsys, list(verb), what)
        main(["info", "target"])
        shown += "EVIL␛]0;OWNED␇" in capsys.readouterr().out
    assert len(hostile) > 30
    assert shown >= (3 if every == 1 else 1)


def test_messages_escape_control_characters_of_arguments(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["info", HOSTILE], ["show", "base", HOSTILE], ["ls", "base", HOSTILE], ["diff", "base", HOSTILE]):
        check(capsys, command, "a word")


def hostile_run(base: Path, target: Path) -> None:
    """Write a run with a hostile model name and module."""
    shutil.copytree(base, target)
    manifest = json.loads((base / "run.json").read_bytes()) | {"model": HOSTILE}
    (target / "run.json").write_text(json.dumps(manifest))
    index = target / "rank-00000/records.jsonl"
    index.write_text(index.read_text().replace("model.embed_tokens:", f"{json.dumps(BRIEF)[1:-1]}:"))


@pytest.mark.parametrize("verb", [("view", "target"), ("view", "target", "target")])
def test_view_escapes_control_characters_of_names(base: Path, terminal: Any, verb: tuple[str, ...]) -> None:  # noqa: F811
    fd, start = terminal
    hostile_run(base, Path("target"))
    process = start(*verb)
    seen = read_until(fd, "E␛]0;P".encode(), process)
    os.write(fd, b"j\tj")
    seen += read_until(fd, b"E", process)
    os.write(fd, b"q")
    assert drain_until_exit(fd, process) == 0
    assert b"\x1b]0;P" not in seen
    assert b"\xc2\x9b" not in seen
    assert "\u202e".encode() not in seen


@given(st.text())
def test_printable_keeps_length_and_visible_characters(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert not OBEYED.search(shown)
    assert "\n" not in shown
    assert all(new == old for new, old in zip(shown, text, strict=True) if old.isprintable())
    line = json_line({"a": text})
    assert json.loads(line) == {"a": text}
    assert not OBEYED.search(line)
    line.encode()
