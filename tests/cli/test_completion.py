"""Shell completion through the protocol of the shell hooks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tapscope.cli import VERBS, main


def complete(line: str, folder: Path) -> list[str]:
    """Return the completions that the shell hook receives for ``line``, with the cursor at its end."""
    answer = folder / "answer"
    answer.unlink(missing_ok=True)
    variables = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'@><=;|&(:",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tapscope"], env=os.environ | variables, cwd=folder, capture_output=True, timeout=60
    )
    assert done.stdout == b""
    answer.touch()
    return [word.strip() for word in answer.read_text().split("\n") if word]


def test_completion_completes_commands(tmp_path: Path) -> None:
    assert set(complete("tapscope ", tmp_path)) == {*VERBS}
    assert complete("tapscope di", tmp_path) == ["diff"]
    assert complete("tapscope --v", tmp_path) == ["--version"]


def test_completion_completes_options_values_and_files(tmp_path: Path) -> None:
    (tmp_path / "baseline").mkdir()
    assert complete("tapscope diff --shift", tmp_path) == ["--shift-steps"]
    assert complete("tapscope diff baseline target --color n", tmp_path) == ["never"]
    assert complete("tapscope diff base", tmp_path) == ["baseline/"]
    assert complete("tapscope nonsense --s", tmp_path) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_code_of_every_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    code = capsys.readouterr().out
    assert "tapscope" in code
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)


def test_completion_refuses_another_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bsh"]) == 2
    assert "(did you mean bash?)" in capsys.readouterr().err


def test_completion_prints_a_man_page_of_every_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "man"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(".TH TAPSCOPE 1")
    for name in VERBS:
        section = name.upper().replace("-", r"\-")
        assert f"\n.SH {section}\n" in page
    assert r"\fB\-\-fail\-on" in page
    assert "==SUPPRESS==" not in page
    if shutil.which("man") is None and shutil.which("groff") is None:
        return
    (tmp_path / "tapscope.1").write_text(page)
    words = ["groff", "-man", "-Tutf8", "-ww"] if shutil.which("groff") else ["man", "--warnings", "-l"]
    done = subprocess.run([*words, str(tmp_path / "tapscope.1")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr == ""
