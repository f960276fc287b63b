"""A ResNet, whose layers are named as in torchvision: `layer4.0.conv1` is in layer 4."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tapscope import Dumper, compare
from tapscope.cli import main
from tapscope.dashboard.model.grid import CODES, Grid, GridColumn, GridRow, layer_grid


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Block(8, 8, 1), Block(8, 8, 1))
        self.layer2 = nn.Sequential(Block(8, 16, 2), Block(16, 16, 1))
        self.layer3 = nn.Sequential(Block(16, 24, 2), Block(24, 24, 1))
        self.layer4 = nn.Sequential(Block(24, 32, 2), Block(32, 32, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.bn1(self.conv1(x))))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """One as it is, and one with another weight in layer 4."""
    folder = tmp_path_factory.mktemp("resnet")
    torch.manual_seed(0)
    model, images = ResNet().eval(), torch.randn(2, 3, 64, 64)
    changed = copy.deepcopy(model)
    changed.get_parameter("layer4.0.conv1.weight").data.mul_(1.05)
    for name, each in (("base", model), ("target", changed)):
        with torch.no_grad(), Dumper(each, folder / name, keep="full") as dumper, dumper.step():
            each(images)
    return str(folder / "base"), str(folder / "target")


def test_diff_names_the_layer(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *runs]) == 1
    said = capsys.readouterr().out
    assert "what      layer4.0.conv1 (out) differs" in said
    assert "where     step 0, layer 4;" in said
    assert main(["diff", *runs, "--layers", "1-3"]) == 0
    assert main(["diff", *runs, "--layers", "4"]) == 1


def test_sites_are_selected_by_layer(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", runs[0]]) == 0
    assert "layers 1-4" in capsys.readouterr().out
    assert main(["ls", runs[0], "--layers", "3", "--limit", "1000"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) > 30
    assert all(" layer3" in line for line in lines)
    assert main(["ls", runs[0], "--layers", "5"]) != 0
    assert "layers are 1-4" in capsys.readouterr().err


def test_grid_has_a_row_for_each_layer(runs: tuple[str, str]) -> None:
    findings = compare(*runs).findings
    codes = np.array([[CODES[each.verdict]] for each in findings], np.uint8)
    rows = tuple(GridRow(each.site, each.site, each.verdict, (i,)) for i, each in enumerate(findings))
    grid = layer_grid(Grid(rows, (GridColumn(0, 0),), codes * 1.0, codes))
    labels = ["(root)", "conv1", "bn1", "layer 1", "layer 2", "layer 3", "layer 4", "avgpool", "fc"]
    assert [row.label for row in grid.rows] == labels
    assert [row.label for row in grid.rows if row.verdict.is_bad] == ["(root)", "layer 4", "avgpool", "fc"]


def test_golden_file_names_the_block(runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["golden", "record", runs[0], "-o", str(tmp_path / "golden")]) == 0
    assert main(["golden", "check", str(tmp_path / "golden"), runs[1]]) == 1
    assert "what      layer4.0 (out) differs" in capsys.readouterr().out
