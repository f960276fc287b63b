"""Unusual properties of a record (pass, microbatch, slice, cap, tags) in `ls`, `show` and `view`, on a real run."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tapscope import cli
from tapscope.dashboard.browse_source import Query, RunSource
from tapscope.dashboard.widgets.record_table import RecordTable
from tapscope.dumper import Dumper
from tapscope.run_format.records import Records
from tapscope.sources import open_run

Cli = Callable[..., tuple[int, str, str]]


class Net(nn.Module):
    """A model with a recomputed layer followed by an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.second(x)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, model = tmp_path_factory.mktemp("notes") / "run", Net()
    rules = ["first:out=full rows=2:6:2", "second:out=full cap=1KiB"]
    with Dumper(model, path, keep="full", rules=rules, grads=True) as dumper, dumper.step(phase="train"):
        for micro in range(2):
            with dumper.micro(micro):
                out = model(torch.ones(16, 8, requires_grad=True) + micro)
                dumper.dump("probe", out[:2], user="anna", turn=micro)
                out.sum().backward()
    return path


@pytest.fixture
def look(run: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(verb: str, *words: str) -> tuple[int, str, str]:
        code = cli.main([verb, str(run), *words])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def _lines(out: str, site: str) -> list[str]:
    return [line for line in out.splitlines() if f" {site} " in f"{line} "]


def test_ls_notes_name_unusual_records(look: Cli) -> None:
    code, out, _ = look("ls")
    assert code == 0
    assert out.splitlines()[0].split()[-1] == "notes"
    inputs = [line.split(" fp32 ")[0].split(maxsplit=2)[2].strip() for line in _lines(out, "first:in[input]")]
    assert inputs == [
        "first:in[input]",
        "first:in[input] recompute",
        "first:in[input] micro 1",
        "first:in[input] micro 1 recompute",
    ]
    sliced = _lines(out, "first:out")
    assert len(sliced) == 2
    assert all(line.endswith("slice rows 2:6:2 of 16×8") for line in sliced)
    capped = _lines(out, "second:out")
    assert len(capped) == 2
    assert all(line.endswith("cap 1.0 kB: larger, so statistics only") for line in capped)
    gradients = _lines(out, "second:out.grad")
    assert len(gradients) == 2
    assert not any("backward" in line for line in gradients)
    for line, turn in zip(_lines(out, ":tap[probe]"), range(2), strict=True):
        assert line.endswith(f'tags user="anna" turn={turn}')


def test_ls_of_ordinary_records_has_no_notes(look: Cli) -> None:
    out = look("ls", "--site", "second:out.grad")[1]
    assert "notes" not in out


def test_show_prints_part_pass_hash_and_multiset_hash(look: Cli, run: Path) -> None:
    code, out, err = look("show", "first:out", "--micro", "1")
    assert (code, err) == (0, "")
    assert "rank 0 · micro 1\n" in out
    assert "slice rows 2:6:2 of 16×8" in out
    with open_run(run) as opened:
        record = next(r for r in opened.select(["first:out"]) if r.key.micro == 1)
    assert f"hash {record.hash}" in out
    assert f"bag {record.bag}" in out
    assert "cap 1.0 kB" in look("show", "second:out", "--micro", "0")[1]
    assert "larger than the cap of its rule, 1.0 kB" in look("show", "second:out", "--micro", "0")[1]
    assert 'tags user="anna" turn=1' in look("show", ":tap[probe]", "--micro", "1")[1]
    assert "step 0 train · rank 0 · backward\n" in look("show", "second:out.grad", "--micro", "0")[1]


def test_show_names_the_options_that_choose_another_pass(look: Cli) -> None:
    _, out, err = look("show", "first:in[input]")
    assert "4 records match; shown: first:in[input] --step 0 --rank 0 --occurrence 0 --micro 0 --pass forward" in err
    assert "micros 0-1, pass forward or recompute" in err
    _, out, err = look("show", "first:in[input]", "--micro", "1", "--pass", "recompute")
    assert (err, "rank 0 · micro 1 · recompute\n" in out) == ("", True)
    code, _, err = look("show", "first:in[input]", "--pass", "backward")
    assert code == 2
    assert "no record with --pass backward" in err
    assert "pass forward or recompute" in err


def test_view_agrees_with_show_and_its_command_shows_the_same_record(look: Cli, run: Path) -> None:
    source = RunSource(open_run(run))
    for record in source.run.records:
        words = source.command(record, Query(0, 0)).split(maxsplit=3)
        code, out, err = look("show", *shlex.split(words[3]), "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["seq"] == record.seq
    table = RecordTable()
    table.set_records(Records(r for r in source.run.records if r.key.pass_ == "recompute" and r.key.micro == 1), "", 0)
    assert "first:in[input] micro 1 recompute " in str(table.format_row(0, 120))
    source.close()
