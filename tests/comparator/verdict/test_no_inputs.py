"""A module that is called without tensors returns values of the host: no error upstream explains a difference."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_runs import diff
from torch import nn

from tapscope.comparator import Report
from tapscope.dumper import Dumper
from tapscope.sources import open_run


class Table(nn.Module):
    """The noise levels of a schedule, as set by the host."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, count: int = 8, *, cache: Any = None, start: torch.Tensor | None = None) -> torch.Tensor:
        table = self.factor * torch.linspace(1.0, 4.0, count)
        return table if start is None else table + start


class Denoiser(nn.Module):
    """Module that encodes, then scales by the levels of a table."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 8))
        self.table = Table(how.pop("factor", 1.0))
        self.head = nn.Linear(8, 8)
        self.how: Mapping[str, Any] = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(x)
        return self.head(encoded * self.table(**self.how).to(encoded.dtype))


def run(path: Path, dtype: torch.dtype, *, calls: int = 1, **how: Any) -> Path:
    model = Denoiser(**how).to(dtype)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad(), Dumper(model, path, keep="full"):
        for _ in range(calls):
            model(x)
    return path


def compared(tmp_path: Path, **how: Any) -> Report:
    baseline = run(tmp_path / "fp32", torch.float32)
    return diff(baseline, run(tmp_path / "bf16", torch.bfloat16, **how))


@pytest.mark.parametrize(
    ("how", "says_so"),
    [
        ({}, True),
        ({"count": 8}, True),
        ({"cache": torch.bfloat16}, True),  # described by its name
        ({"cache": object()}, False),  # which may hold tensors
        ({"start": torch.ones(8)}, False),
    ],
)
def test_run_says_of_which_modules_no_call_had_tensors(tmp_path: Path, how: dict[str, Any], says_so: bool) -> None:
    sites = open_run(run(tmp_path / "run", torch.float32, calls=3, **how)).sites
    assert {name for name, site in sites.items() if site.no_inputs} == ({"table:out"} if says_so else set())


def test_table_that_the_host_passed_is_named_in_bfloat16(tmp_path: Path) -> None:
    report = compared(tmp_path, factor=1.02)
    divergence = report.first_divergence
    assert divergence is not None
    assert (divergence.module, divergence.inputs, divergence.is_certain) == ("table", "none", True)
    assert divergence.finding.ratio > 100.0  # relative to the float32 floor, although the model computes in bfloat16
    assert "its module has no tensor inputs: the host passed other values" in str(report)


def test_equal_table_agrees_in_bfloat16(tmp_path: Path) -> None:
    assert compared(tmp_path).exit_code == 0


def test_run_that_does_not_say_so_is_judged_by_what_came_before(tmp_path: Path) -> None:
    baseline, target = run(tmp_path / "fp32", torch.float32), run(tmp_path / "bf16", torch.bfloat16, factor=1.02)
    lines = baseline / "rank-00000" / "records.jsonl"
    lines.write_text(lines.read_text().replace(',"no_inputs":true', ""))  # as an older version wrote it
    found = {finding.site: finding for finding in diff(baseline, target).findings}["table:out"]
    assert found.inputs == "enclosing_module"
    assert found.ratio < 10.0
