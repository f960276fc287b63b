"""The README's blocks run as printed, in order, in one shell; only ports are exchanged for free ones."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import free_port

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
INSTALLING = BLOCKS[0][1]
"""The one block that is not run: the tests run in what it makes."""


def _script(folder: Path) -> str:
    """One bash script of all blocks; it stops at the first command that fails."""
    lines = ["set -e"]
    for number, (language, text) in enumerate(BLOCKS[1:]):
        lines.append(f"echo '--- block {number}'")
        if language == "python":
            (folder / f"block_{number}.py").write_text(text)
            lines.append(f"python block_{number}.py")
        elif language == "sh":
            lines.append(text)
        else:
            assert language == "text"
    script = "\n".join(lines)
    for port in sorted(set(re.findall(r":(80\d\d)\b", script))):
        free = str(free_port())
        script = script.replace(port, free)
        for file in folder.glob("block_*.py"):
            file.write_text(file.read_text().replace(port, free))
    return script


def _mask(text: str) -> list[str]:
    """Words without numbers, which differ a little from machine to machine."""
    return [re.sub(r"\d[\d.e+-]*", "N", line) for line in text.strip().splitlines()]


@pytest.mark.timeout(600)
def test_every_block_runs_as_printed(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TAPSCOPE")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", _script(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    printed = dict(re.findall(r"^--- block (\d+)\n(.*?)(?=^--- block|\Z)", done.stdout, re.MULTILINE | re.DOTALL))
    for number, (language, text) in enumerate(BLOCKS[1:]):
        if language == "text":
            told = _mask(text)
            assert _mask(printed[str(number - 1)])[-len(told) :] == told
    answers = [line for line in done.stdout.splitlines() if line.startswith("what ")]
    assert len(answers) == 3
    assert "model.layers.2.mlp.gate_proj" in answers[0]
    assert answers[1].split() == ["what", "agrees"]
    assert answers[2] == answers[0]


def test_only_the_installation_is_not_run_and_its_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = [shlex.split(line, comments=True) for line in INSTALLING.splitlines()]
    assert [words[0] for words in commands] == ["git", "cd", "make", ".", "make"]
    for words in commands:
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)
    assert "…" not in "".join(text for _, text in BLOCKS)


def test_the_extras_of_the_table_are_those_that_are_declared() -> None:
    from tapscope.core.extras import EXTRAS

    assert set(re.findall(r"'\.\[(\w+)\]'", README)) == EXTRAS.keys() - {"bench"}
