"""Deprecated flag names work for one release, each with one warning."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from factories import RunFactory

from tapscope.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunFactory(tmp_path / "run") as made:
        made.step()
        made.put("m:out", np.array([np.nan, 1.0], np.float32))
        made.put("n:out", np.ones(2, np.float32))
    return tmp_path / "run"


def test_ls_odd_warns_and_lists_anomalies(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(run), "--anomalies"]) == 0
    expected = capsys.readouterr().out
    assert "m:out" in expected
    assert "n:out" not in expected
    with pytest.warns(FutureWarning, match="--odd is deprecated, use --anomalies"):
        assert main(["ls", str(run), "--odd"]) == 0
    assert capsys.readouterr().out == expected


def test_deprecated_flag_prints_one_warning_line(run: Path) -> None:
    command = [sys.executable, "-m", "tapscope", "ls", str(run), "--odd"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "tapscope: warning: --odd is deprecated, use --anomalies\n"


def test_ctl_past_warns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(FutureWarning, match="--past is deprecated, use --flight-recorder"):
        assert main(["ctl", "127.0.0.1:1", "capture", "--past", "2"]) == 4
