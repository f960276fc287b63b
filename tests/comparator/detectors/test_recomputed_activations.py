"""Activations recomputed for the backward must equal those of the forward in the same run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compare_runs import diff
from sglang_dumps import SglangDump

from tapscope import Dumper
from tapscope.sources import open_run


def dumped(folder: Path, again: float, *, dtype: torch.dtype = torch.float32, noise: float = 0.0) -> str:
    torch.manual_seed(5)
    dump = SglangDump(folder)
    for step in range(2):
        dump.step(input_ids=[1, 2, 3], positions=[0, 1, 2], seq_lens=[3], rids=[f"r{step}"])
        values = [torch.randn(3, 16).to(dtype) for _ in range(3)]
        for layer, value in enumerate(values):
            dump.dump("x", value, dims="t h", layer_id=layer, recompute_status="original")
        for layer, value in enumerate(values):
            changed = value * again if (step, layer) == (1, 1) else value * (1 + noise)
            dump.dump("x", changed, dims="t h", layer_id=layer, recompute_status="recompute")
    return str(folder)


@pytest.mark.parametrize("side", [0, 1])
def test_recomputed_activations_that_differ_from_the_forward_are_named(tmp_path: Path, side: int) -> None:
    paths = [dumped(tmp_path / name, 1.5 if i == side else 1.0) for i, name in enumerate(("base", "target"))]
    report = diff(*paths)
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.module == "layers.1"
    said = (
        f"{('base', 'target')[side]}: the activation recomputed for the backward is not that of the forward, at step 1"
    )
    assert any(note.startswith(said) for note in report.first_divergence.finding.notes)


def test_recomputed_activations_of_one_run_are_checked(tmp_path: Path) -> None:
    base, target = dumped(tmp_path / "base", 1.0), dumped(tmp_path / "target", 1.5)
    for file in (tmp_path / "base").glob("*recompute_status=recompute*"):
        file.unlink()
    report = diff(base, target)
    bad = [finding for finding in report.findings if finding.test == "recompute"]
    assert [(f.site, f.notes[0].partition(":")[0]) for f in bad] == [("layers.1:tap[x]", "target")]
    assert report.exit_code == 1


@pytest.mark.parametrize("noise", [0.0, 2e-7])
def test_recomputed_activations_within_rounding_agree(tmp_path: Path, noise: float) -> None:
    base = dumped(tmp_path / "base", 1.0)
    report = diff(base, dumped(tmp_path / "target", 1.0, noise=noise))
    assert report.exit_code == 0


def test_recomputed_activations_without_the_rng_state_are_named(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    class Net(torch.nn.Module):
        def __init__(self, preserve: bool) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.drop, self.preserve = torch.nn.Dropout(0.5), preserve

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.drop(self.one(x)))

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=self.preserve)

    for name, preserve in (("base", True), ("target", False)):
        torch.manual_seed(3)
        net = Net(preserve)
        with Dumper(net, tmp_path / name, keep="full"):
            torch.manual_seed(4)
            net(torch.ones(4, 8, requires_grad=True)).sum().backward()
    with open_run(tmp_path / "target") as run:
        assert {record.key.pass_ for record in run.records} >= {"forward", "recompute"}
    report = diff(str(tmp_path / "base"), str(tmp_path / "target"))
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.module == "drop"
