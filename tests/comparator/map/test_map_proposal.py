"""Maps proposed for two runs of one model under other names."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tapscope.cli import main
from tapscope.comparator.propose_map import propose_map
from tapscope.dumper import Dumper
from tapscope.sources import open_run

WIDTH, LAYERS = 32, 4
NETS: dict[str, Any] = {}


class Attention(nn.Module):
    """Single-head attention with separate projections."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)
        out: torch.Tensor = self.dense(mixed)
        return out


class FusedAttention(nn.Module):
    """The same with one projection for all three."""

    def __init__(self, other: Attention) -> None:
        super().__init__()
        parts = other.query, other.key, other.value
        self.wqkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.wqkv.weight.data = torch.cat([part.weight for part in parts]).detach()
        self.wqkv.bias.data = torch.cat([part.bias for part in parts]).detach()
        self.wo = other.dense

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.wqkv(x).chunk(3, -1)
        out: torch.Tensor = self.wo(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return out


class Block(nn.Module):
    """A residual block; ``names`` are those of its four parts."""

    def __init__(self, names: tuple[str, ...], parts: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self.names = names
        for name, part in zip(names, parts, strict=True):
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attention, up, down, norm = (getattr(self, name) for name in self.names)
        x = x + attention(norm(x))
        out: torch.Tensor = x + down(torch.relu(up(x)))
        return out


class Net(nn.Module):
    """A stack of blocks under the names given."""

    def __init__(self, stack: str, embed: str, blocks: list[Block], table: nn.Module) -> None:
        super().__init__()
        self.add_module(embed, table)
        self.add_module(stack, nn.ModuleList(blocks))
        self.places = embed, stack

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = getattr(self, self.places[0])(ids)
        for block in getattr(self, self.places[1]):
            x = block(x)
        return x  # type: ignore[no-any-return]


class Wrapper(nn.Module):
    """Puts the net two levels deeper."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.outer = nn.Module()
        self.outer.add_module("inner", net)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer.get_submodule("inner")(ids)
        return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model under two sets of names: ``mine`` in fp32; ``theirs`` in bf16; ``fused`` with one projection;
    ``nested`` inside other modules."""
    torch.manual_seed(0)
    path, table = tmp_path_factory.mktemp("map"), nn.Embedding(64, WIDTH)
    parts = [
        (Attention(), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH, elementwise_affine=False))
        for _ in range(LAYERS)
    ]
    mine = Net("layers", "embed", [Block(("attn", "up", "down", "norm"), each) for each in parts], table)
    other = ("mixer", "expand", "contract", "scale")
    theirs = Net("tower", "lookup", [Block(other, each) for each in parts], table)
    fused_parts = [(FusedAttention(one), *rest) for one, *rest in parts]
    fused = Net("tower", "lookup", [Block(other, each) for each in fused_parts], table)
    models = {
        "mine": mine,
        "same": theirs,
        "theirs": copy.deepcopy(theirs).bfloat16(),
        "fused": copy.deepcopy(fused).bfloat16(),
        "nested": Wrapper(theirs),
    }
    NETS["theirs"] = theirs
    for name, model in models.items():
        with torch.no_grad(), Dumper(model, path / name, keep="full"):
            model(torch.arange(20)[None])
    return path


def proposal(runs: Path, target: str) -> Any:
    with open_run(runs / "mine") as baseline, open_run(runs / target) as other:
        return propose_map(baseline, other)


@pytest.mark.parametrize(("target", "is_equal"), [("same", True), ("theirs", False)])
def test_map_renames_modules_of_equal_structure(runs: Path, target: str, is_equal: bool) -> None:
    found = proposal(runs, target)
    names = {one.target: one.baseline for one in found.renames}
    assert names == {
        "lookup": "embed",
        "tower.*": "layers.*",
        "tower.*.scale": "layers.*.norm",
        "tower.*.mixer": "layers.*.attn",
        "tower.*.mixer.query": "layers.*.attn.query",
        "tower.*.mixer.key": "layers.*.attn.key",
        "tower.*.mixer.value": "layers.*.attn.value",
        "tower.*.mixer.dense": "layers.*.attn.dense",
        "tower.*.expand": "layers.*.up",
        "tower.*.contract": "layers.*.down",
    }
    assert all(one.is_equal for one in found.renames) == is_equal
    assert (found.ambiguous, found.unexplained) == ((), ((), ()))


def test_map_proposes_a_split_of_a_fused_projection(runs: Path) -> None:
    (split,) = proposal(runs, "fused").splits
    assert split.whole == "tower.*.mixer.wqkv"
    assert split.parts == ("layers.*.attn.query", "layers.*.attn.key", "layers.*.attn.value")


@pytest.mark.parametrize("target", ["theirs", "fused"])
def test_map_file_makes_diff_agree(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    mine, theirs, file = str(runs / "mine"), str(runs / target), str(tmp_path / "names.yaml")
    assert main(["map", mine, theirs, "-o", file]) == 0
    assert f"next: tapscope diff {mine} {theirs} --map {file}" in capsys.readouterr().err
    assert main(["diff", mine, theirs, "--map", file]) == 0
    assert main(["map", mine, theirs, "--map", file, "--list"]) == 0
    listed = capsys.readouterr().out
    assert "layers.2.attn.dense:out" in listed
    assert "tower.2.mixer.wo:out" in listed or target == "theirs"


def test_map_of_nested_names_tells_a_module_from_its_last_submodule(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {one.target: one.baseline for one in proposal(runs, "nested").renames}
    assert names["outer.inner.tower.*.mixer"] == "layers.*.attn"
    assert names["outer.inner.tower.*.mixer.dense"] == "layers.*.attn.dense"
    both = [str(runs / "mine"), str(runs / "nested")]
    assert main(["map", *both, "-o", str(tmp_path / "names.yaml")]) == 0
    assert main(["diff", *both, "--map", str(tmp_path / "names.yaml")]) == 0
    assert "may have another name" not in capsys.readouterr().out


def test_next_of_a_difference_is_the_map_where_few_names_match(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = copy.deepcopy(NETS["theirs"])
    with torch.no_grad(), Dumper(wrong, tmp_path / "wrong", keep="full"):
        wrong.tower[3].contract.weight.mul_(1.5)
        wrong(torch.arange(20)[None])
    both = [str(runs / "mine"), str(tmp_path / "wrong")]
    assert main(["diff", *both]) == 1
    printed = capsys.readouterr().out
    assert "what      (root)" in printed
    assert f"next      tapscope map {' '.join(both)} -o names.yaml" in printed


def test_diff_proposes_the_map_itself(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [str(runs / "mine"), str(runs / "theirs")]
    assert main(["diff", *both, "--json"]) == 1
    (tmp_path / "names.yaml").write_text(
        json.loads(capsys.readouterr().out.splitlines()[-1])["coverage"]["proposed_map"]
    )
    assert main(["diff", *both]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"note      \d+ unmatched modules of the target may have another name in the baseline", printed)
    assert f"next      tapscope map {' '.join(both)} -o names.yaml" in printed
    assert main(["diff", *both, "--map", str(tmp_path / "names.yaml")]) == 0


def test_map_reports_what_it_cannot_explain(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.no_grad(), Dumper(nn.Linear(8, 5), tmp_path / "other", keep="full") as dumper:
        dumper.dump("alone", torch.ones(3, 7))
    assert main(["map", str(runs / "mine"), str(tmp_path / "other")]) == 1
    printed = capsys.readouterr()
    assert "# only in the baseline: layers.*.attn" in printed.out
    assert "unmatched" in printed.err


def test_map_prints_json_and_refuses_to_replace_a_file(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [str(runs / "mine"), str(runs / "theirs")]
    assert main(["map", *both, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"from": r"^tower\.(\d+)\.expand:", "to": r"layers.\1.up:", "side": "target"}.items() <= next(
        one for one in found["renames"] if "expand" in one["from"]
    ).items()
    (tmp_path / "names.yaml").write_text("mine")
    assert main(["map", *both, "-o", str(tmp_path / "names.yaml")]) == 2
    assert "exists; choose another file" in capsys.readouterr().err
