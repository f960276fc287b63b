"""An exception is reported in the run with its traceback; a flight recorder also writes its last steps."""

from pathlib import Path
from typing import Any

import forkserver_pool as warm
import pytest
import torch
from torch import nn

from tapscope.cli import main
from tapscope.dumper import Dumper
from tapscope.sources import open_run


class Failing(nn.Module):
    """Raises an exception in its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("shapes do not fit")
        out: torch.Tensor = self.inner(x)
        return out


def crashes(run: Path) -> list[dict[str, Any]]:
    with open_run(run) as opened:
        return [event.fields for event in opened.events() if event.kind == "crash"]


def test_crash_in_the_model_is_reported_once_with_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Failing()
    with pytest.raises(ValueError, match="shapes"), Dumper(model, tmp_path / "run", flight_recorder_steps=2):
        for _ in range(4):
            model(torch.ones(1, 4))
    (found,) = crashes(tmp_path / "run")
    assert (found["exception"], found["message"], found["step"]) == ("ValueError", "shapes do not fit", 2)
    assert "in forward" in found["where"]
    assert 'raise ValueError("shapes do not fit")' in found["traceback"]
    with open_run(tmp_path / "run") as run:
        assert {1, 2} <= set(run.steps)  # the steps held by the flight recorder
    main(["info", str(tmp_path / "run")])
    assert "crash  rank 0  step 2  ValueError: shapes do not fit" in capsys.readouterr().out


def test_exception_that_the_caller_handles_is_reported_and_capture_goes_on(tmp_path: Path) -> None:
    model = Failing()
    with Dumper(model, tmp_path / "run"):
        for _ in range(4):
            try:
                model(torch.ones(1, 4))
            except ValueError:
                continue
    assert [found["step"] for found in crashes(tmp_path / "run")] == [2]
    with open_run(tmp_path / "run") as run:
        assert set(run.steps) == {0, 1, 2, 3}


def test_uncaught_exception_of_a_process_is_reported(tmp_path: Path) -> None:
    code = (
        "import torch\nfrom tapscope.dumper import Dumper\n"
        f"model = torch.nn.Linear(2, 2)\ndumper = Dumper(model, {str(tmp_path / 'run')!r}).open()\n"
        "model(torch.ones(1, 2))\nraise KeyError('gone')\n"
    )
    done = warm.run("-c", code)
    assert "KeyError: 'gone'" in done.stderr
    (found,) = crashes(tmp_path / "run")
    assert (found["exception"], found["step"]) == ("KeyError", 0)


def test_exception_whose_text_raises_is_reported_by_its_name(tmp_path: Path) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    model = nn.Linear(2, 2)
    with pytest.raises(Odd), Dumper(model, tmp_path / "run"):
        model(torch.ones(1, 2))
        raise Odd
    assert [found["exception"] for found in crashes(tmp_path / "run")] == ["Odd"]
