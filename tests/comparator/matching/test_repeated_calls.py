"""Modules that are called several times in a step, functions with a kink, and gradients that a clip ties together."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare_runs import diff
from factories import RunFactory
from torch import Tensor, nn
from torch.nn import functional

from tapscope import Dumper
from tapscope.cli import main
from tapscope.comparator import compare
from tapscope.comparator.report.next_command import next_command

Damage = Callable[[Any], object]


class Stack(nn.Module):
    """As T5's: one dropout for what goes in and what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        found: Tensor = self.dropout(x)
        return found


class Loop(nn.Module):
    """One cell for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(24, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 32)
        for token in x.unbind(1):
            state = self.cell(token, state)
        found: Tensor = self.head(state)
        return found


class Kinked(nn.Module):
    """ReLU as a function, which no hook sees."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 96), nn.Linear(96, 24)
        self.convolve, self.head = nn.Conv1d(24, 24, 3, padding=1), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(functional.relu(self.up(x)))
        x = functional.relu(self.convolve(x.transpose(1, 2)).transpose(1, 2))
        found: Tensor = self.head(x)
        return found


def run(path: Path, model: nn.Module, dtype: torch.dtype = torch.float32, train: str = "", damage: Damage = id) -> Path:
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    inputs, weights = torch.randn(6, 7, 24), torch.randn(64)
    damage(model)
    model.to(dtype)
    with Dumper(model, path, keep="full", grads=bool(train), params=bool(train)) as dumper, dumper.step():
        found = model(inputs.to(dtype)).float().flatten()
        if train:
            (found * weights.repeat(len(found) // 64 + 1)[: len(found)]).sum().backward()
        if train == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return path


def doubled(parameter: nn.Parameter) -> None:
    parameter.data *= 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [0, 2])
def test_repeated_calls_later_inputs_of_a_shared_module_are_downstream(
    tmp_path: Path, dtype: torch.dtype, at: int
) -> None:
    base = run(tmp_path / "b", Stack())
    report = diff(base, run(tmp_path / "t", Stack(), dtype, damage=lambda m: doubled(m.blocks[at].weight)))
    assert report.first_divergence is not None
    assert report.first_divergence.module == f"blocks.{at}"
    roles = {f.site: f.role for f in report.findings}
    assert roles["dropout:in[input]"] == ""
    assert roles["dropout:in[input]#1"] == "downstream"


@pytest.mark.parametrize("model", [Stack, Loop, Kinked])
@pytest.mark.parametrize("train", ["", "whole"])
def test_repeated_calls_rounding_is_not_a_divergence(tmp_path: Path, model: type[nn.Module], train: str) -> None:
    report = diff(run(tmp_path / "b", model(), train=train), run(tmp_path / "t", model(), torch.bfloat16, train))
    assert report.first_divergence is None
    assert report.exit_code == 0


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(list(words))
    return capsys.readouterr().out


def test_repeated_calls_wrong_cell_is_named_despite_wrong_later_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def swapped(model: Loop) -> None:
        reset, update, new = model.cell.weight_hh.data.chunk(3)
        model.cell.weight_hh.data = torch.cat([update, reset, new])

    report = diff(run(tmp_path / "b", Loop()), run(tmp_path / "t", Loop(), damage=swapped))
    assert report.first_divergence is not None
    assert report.first_divergence.site == "cell:out#1"  # the first state is zeros: nothing is reset there
    command = next_command(report)
    assert command == f"tapscope show {tmp_path / 't'} cell:out --step 0 --occurrence 1"
    shown = printed(capsys, *shlex.split(command)[1:], "--json")
    assert json.loads(shown)["occurrence"] == 1
    assert printed(capsys, "show", str(tmp_path / "t"), "cell:out#1", "--json") == shown
    one_site = printed(capsys, "diff", str(tmp_path / "b"), str(tmp_path / "t"), "--site", "cell:out#1", "--json")
    found = [json.loads(line) for line in one_site.splitlines()]
    assert [line["site"] for line in found if line["type"] == "finding"] == [
        "cell:out",
        *(f"cell:out#{i}" for i in range(1, 7)),
    ]


def test_repeated_calls_clipping_spreads_one_wrong_gradient_without_blaming_others(tmp_path: Path) -> None:
    def halved(model: Any) -> None:
        model.blocks[1].weight.register_hook(lambda gradient: gradient / 2)

    base = run(tmp_path / "b", Stack(), train="clipped")
    report = diff(base, run(tmp_path / "t", Stack(), train="clipped", damage=halved))
    assert [d.site for d in report.divergences] == ["blocks.1:param[weight].grad"]
    others = [
        f for f in report.findings if f.site.endswith("].grad") and "param" in f.site and "blocks.1" not in f.site
    ]
    assert {f.verdict.value for f in others} == {"differs"}


def test_repeated_calls_missing_clip_affects_every_gradient(tmp_path: Path) -> None:
    report = diff(run(tmp_path / "b", Stack(), train="clipped"), run(tmp_path / "t", Stack(), train="whole"))
    assert report.first_divergence is not None
    assert report.first_divergence.finding.test in ("scale", "median_row")


class Resnet(nn.Module):
    """As diffusers' ResnetBlock2D: one activation for the image, the embedding of its time, and the image again."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.emb = nn.SiLU(), nn.Linear(24, 8)
        self.conv1, self.conv2 = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        image = x.reshape(-1, 8, 6, 7)[:3]
        time = x[:3, 0]
        hidden = self.conv1(self.act(image))
        hidden = hidden + self.emb(self.act(time))[:, :, None, None]
        found: Tensor = image + self.conv2(self.act(hidden))
        return found


def scaled(parameter: nn.Parameter) -> None:
    parameter.data *= 1.2


def test_repeated_calls_of_different_shapes_are_separate_sites(tmp_path: Path) -> None:
    base = run(tmp_path / "b", Resnet())
    report = diff(base, run(tmp_path / "t", Resnet(), damage=lambda m: scaled(m.conv1.weight)))
    first = report.first_divergence
    assert first is not None
    assert (first.module, first.site, first.is_certain) == ("conv1", "conv1:out", True)
    roles = {f.site: f.role for f in report.findings}
    assert [roles[f"act:in[input]{call}"] for call in ("", "#1", "#2")] == ["", "", "downstream"]
    assert diff(base, run(tmp_path / "s", Resnet())).exit_code == 0


def test_repeated_calls_next_command_shows_the_first_unequal_call(tmp_path: Path) -> None:
    base, other = (tmp_path / name for name in ("b", "t"))
    for path, harm, more in ((base, 0.0, 0), (other, 1.0, 1)):
        with RunFactory(path) as made:
            for _ in range(2):
                made.step()
                for width in (4, 6, 8):
                    made.put("act:out", np.ones((3, width), np.float32) + np.float32(harm * (width == 6)))
                if more:
                    made.put("act:out", np.ones((5, 4), np.float32))
    report = compare(base, other)
    assert report.first_divergence is not None
    assert not report.first_divergence.is_certain
    assert next_command(report).endswith("act:out --step 0 --occurrence 1")
