"""Known issues of SGLang's dumper that tapscope must not have; sglang_known_issues.md lists them with their tests."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tapscope import open_run
from tapscope.core.errors import RuleError, StepError
from tapscope.dumper import Dumper
from tapscope.dumper.steps.tag_context import ctx, current

ROOT = Path(__file__).resolve().parents[2]
_NEVER = {"eval", "exec", "__import__"}


class Layer(nn.Module):
    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id, self.proj = layer_id, nn.Linear(4, 4)

    @ctx(lambda self: {"layer_id": self.layer_id})
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).relu()


@pytest.mark.parametrize("reentrant", [False, True])
def test_sglang_issue_tags_do_not_leak_out_of_a_checkpoint(tmp_path: Path, reentrant: bool) -> None:
    layers = nn.ModuleList([Layer(3), Layer(7)])
    before = dict(current())
    with Dumper(layers, tmp_path / "run", keep="stats") as dumper, dumper.step(phase="train"):
        x = torch.ones(2, 4, requires_grad=True)
        for layer in layers:
            # A non-reentrant checkpoint ends the recomputation by an exception inside the decorated forward.
            x = checkpoint(layer, x, use_reentrant=reentrant)
        x.sum().backward()
        assert dict(current()) == before
    records = [r for r in open_run(tmp_path / "run").records if r.key.site.endswith("proj:out")]
    told = {(r.key.site, r.key.pass_, (r.tags or {}).get("layer_id")) for r in records}
    expected = {("0.proj:out", 3), ("1.proj:out", 7)}
    assert told == {(site, pass_, layer) for site, layer in expected for pass_ in ("forward", "recompute")}


def _calls(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def _imports(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def test_sglang_issue_nothing_that_captures_or_reads_unpickles_or_evaluates() -> None:
    folders = [ROOT / name for name in ("dumper", "comparator", "dashboard", "kernels")]
    files = [file for folder in folders for file in folder.rglob("*.py")] + list((ROOT / "src/tapscope").glob("*.py"))
    assert len(files) > 100
    for file in files:
        tree = ast.parse(file.read_text())
        assert not _imports(tree) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, file
        assert not _calls(tree) & (_NEVER | {"torch.load", "torch.save", "np.load", "numpy.load"}), file


def test_sglang_issue_dumper_calls_no_collective() -> None:
    """Ranks synchronize only through the recorder: a call that only one rank makes does not hang the others."""
    collectives = {
        "barrier",
        "broadcast",
        "all_gather",
        "all_reduce",
        "gather",
        "scatter",
        "all_to_all",
        "monitored_barrier",
    }
    collectives |= {f"{name}_object" for name in collectives} | {f"{name}_object_list" for name in collectives}
    for file in (ROOT / "dumper").rglob("*.py"):
        called = {name for call in _calls(ast.parse(file.read_text())) if (name := call.rpartition(".")[2])}
        assert not called & collectives, file


def test_sglang_issue_step_of_an_unknown_kind_is_refused_and_a_warm_up_is_skipped(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="stats") as dumper:
        with pytest.raises(StepError, match="kind='wrmup': must be warmup or dummy"):
            dumper.step(kind="wrmup")
        for kind in ("warmup", None, "dummy"):
            with dumper.step(kind=kind):
                model(torch.ones(1, 2))
    run = open_run(tmp_path / "run")
    assert {r.key.step for r in run.records} == {1}
    assert [run.steps[step][0].skipped for step in sorted(run.steps)] == [True, False, True]
    assert run.ledger().complete
    assert run.ledger().skipped_steps


def test_sglang_issue_rule_with_a_wrong_port_is_reported_the_ports_that_are_there(tmp_path: Path) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)])})
    with pytest.raises(RuleError, match=r"ports of layers.0 are in\[input\], out, param\[weight\], param\[bias\]"):
        Dumper(model, tmp_path / "run", rules=["layers.0:output=full"]).open()
    with pytest.raises(RuleError, match="layers are 0"):
        Dumper(model, tmp_path / "run", rules=["layers.7:out=full"]).open()


def test_sglang_issue_firings_outside_a_step_are_reported_by_the_run(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="stats"):
        model(torch.ones(1, 2))
        model[0](torch.ones(1, 2))  # two firings: input and output
    assert open_run(tmp_path / "run").ledger().sentences() == ["2 firings outside a step were not kept"]
