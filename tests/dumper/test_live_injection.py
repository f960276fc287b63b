"""Setting `inject`: values of a stored run overwrite those of a live model, and the run reports it."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forkserver_pool as warm
import pytest
import torch
from checkpoints import make_llama
from torch import nn

from tapscope.cli import main
from tapscope.core.errors import ConfigError, RuleError
from tapscope.core.observe import RowSpan, StepInfo
from tapscope.dumper import Dumper
from tapscope.dumper.rules.injection_rule import InjectionRule
from tapscope.sources import open_run


def build(bug: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    if bug:
        model[0].weight.data *= 2
    return model


X = torch.arange(24, dtype=torch.float32).reshape(6, 4) / 10


def forward(
    model: nn.Module, dumper: Dumper, steps: list[list[tuple[str, int, int]]], first: int = 0
) -> list[torch.Tensor]:
    """Run one step per list of (request, first position, count).

    The token id is the position; for the requests x and y, the position plus one.
    """
    outputs = []
    for number, parts in enumerate(steps, first):
        spans, ids, at = [], [], 0
        for request, position, count in parts:
            spans.append(RowSpan(request, position, count, 0, at))
            ids += [(position + i + (request in "xy")) % 6 for i in range(count)]
            at += count
        info = StepInfo(step=number, grid=(at,), rows=tuple(spans), token_ids=ids)
        with torch.no_grad(), dumper.step_of(info):
            outputs.append(model(X[ids]))
    return outputs


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    model = build()
    with Dumper(model, tmp_path / "stored", keep="full") as dumper:
        forward(model, dumper, [[("r", 0, 4)], [("r", 4, 2)]])
    return tmp_path / "stored"


def steps_of(run: Path) -> list[dict[str, int]]:
    with open_run(run) as opened:
        return [dict(lines[0].counts.injected) for _, lines in sorted(opened.steps.items())]


def events_of(run: Path) -> list[tuple[str, str]]:
    with open_run(run) as opened:
        return [(e.fields["where"], e.fields["reason"]) for e in opened.events() if e.kind == "injection"]


def test_injection_heals_what_follows_and_every_step_tells_it(stored: Path, tmp_path: Path) -> None:
    model, out = build(bug=True), tmp_path / "live"
    with Dumper(model, out, keep="full", inject=["0:out"], inject_from=str(stored)) as dumper:
        # a different chunking: rows are matched by request and position
        forward(model, dumper, [[("r", 0, 3)], [("r", 3, 3)]])
    assert steps_of(out) == [{"0:out": 1}, {"0:out": 1}]
    with open_run(stored) as one, open_run(out) as two:
        for site in ("0:out", "2:out"):
            values = [torch.cat([torch.tensor(run.array(r)) for r in run.select([site])]) for run in (one, two)]
            assert torch.allclose(*values, rtol=1e-6), site
        assert two.ledger().complete
        assert "2 tensors overwritten by injection: 0:out" in two.ledger().sentences()


def test_injection_overwrites_only_rows_of_requests_that_were_stored(stored: Path, tmp_path: Path) -> None:
    model, out = build(bug=True), tmp_path / "live"
    with Dumper(model, out, keep="off", inject=["0:out"], inject_from=str(stored)) as dumper:
        (mixed, other) = forward(model, dumper, [[("renamed", 0, 2), ("x", 5, 1)], [("y", 5, 1)]])
    with torch.no_grad():
        assert torch.allclose(mixed[:2], build()(X[:2]), rtol=1e-6)
        assert torch.equal(mixed[2:], model(X[:1]))
        assert torch.equal(other, model(X[:1]))
    assert steps_of(out) == [{"0:out": 1}, {}]


def test_injection_is_limited_to_steps_and_requests(stored: Path, tmp_path: Path) -> None:
    model, out = build(bug=True), tmp_path / "live"
    rules = ["0:out steps=1-", "2:in[input]=2:in[input] request=nobody"]
    with Dumper(model, out, inject=rules, inject_from=str(stored)) as dumper:
        forward(model, dumper, [[("r", 0, 4)], [("r", 4, 2)]])
    assert steps_of(out) == [{}, {"0:out": 1}]
    assert events_of(out) == [
        (f"inject {rules[1]}", "nothing was overwritten: none of its rows or modules came"),
    ]


def test_injection_that_does_not_fit_is_reported_and_the_model_goes_on(stored: Path, tmp_path: Path) -> None:
    model, out = nn.Sequential(nn.Linear(4, 3)), tmp_path / "live"
    with Dumper(model, out, inject=["0:out"], inject_from=str(stored)) as dumper:
        (output,) = forward(model, dumper, [[("r", 0, 4)]])
    with torch.no_grad():
        assert torch.equal(output, model(X[:4]))
    assert steps_of(out) == [{}]
    assert events_of(out) == [
        ("0:out", "not overwritten: shape 4×3, recorded 4×4"),
        ("inject 0:out", "nothing was overwritten: shape 4×3, recorded 4×4"),
    ]


def test_injection_ends_with_the_setting_and_leaves_no_hook(stored: Path, tmp_path: Path) -> None:
    model, out = build(bug=True), tmp_path / "live"
    with Dumper(model, out, inject=["0:out"], inject_from=str(stored)) as dumper:
        forward(model, dumper, [[("r", 0, 4)]])
        dumper.configure(inject=[], keep="off")
        assert not dumper.armed
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        dumper.configure(inject=["1:out"])
        assert dumper.armed
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("9:out", "stored has no values of an input or output 9:out"),
        (":out", "the model's own inputs and outputs cannot be overwritten"),
        ("7:out=0:out", "7:out is not an input or output of a module of this model"),
        ("0:param[weight]", "no values of an input or output"),
    ],
)
def test_injection_that_can_match_nothing_is_refused(stored: Path, tmp_path: Path, rule: str, text: str) -> None:
    model = build()
    with pytest.raises(RuleError, match=text.replace("[", r"\[")):
        Dumper(model, tmp_path / "live", inject=[rule], inject_from=str(stored)).open()


def test_injection_needs_a_run_with_values(stored: Path, tmp_path: Path) -> None:
    model = build()
    with pytest.raises(ConfigError, match="start with inject_from=RUN"):
        Dumper(model, tmp_path / "live", inject=["0:out"])
    with Dumper(model, tmp_path / "stats", keep="stats") as dumper:
        forward(model, dumper, [[("r", 0, 1)]])
    with pytest.raises(ConfigError, match="has no values; capture it again with keep=full"):
        Dumper(model, tmp_path / "live", inject_from=str(tmp_path / "stats")).open()


@pytest.mark.parametrize("text", ["a.b:out", "*.mlp:in[x] steps=0-3,7", "a:out=b:out steps=4- request=r,s"])
def test_rule_round_trips(text: str) -> None:
    assert str(InjectionRule.parse(text)) == text


@pytest.mark.parametrize("text", ["", "a:out when=1", "a:out steps=x", "*:out=b:out", "a=b", "a:out steps=1 steps=2"])
def test_rule_rejects_what_is_none(text: str) -> None:
    with pytest.raises(RuleError, match="^inject: "):
        InjectionRule.parse(text)


def test_injection_is_switched_over_the_control_address(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = build(bug=True), tmp_path / "live"
    with Dumper(model, out, control="127.0.0.1:0", inject_from=str(stored)) as dumper:
        forward(model, dumper, [[("r", 0, 4)]])
        assert main(["ctl", str(dumper.http), "inject", "9:out"]) == 2
        assert "has no values of an input or output 9:out" in capsys.readouterr().err
        assert main(["ctl", str(dumper.http), "configure", f"inject_from={tmp_path}"]) == 2
        assert "'inject_from' is fixed when the dumper starts" in capsys.readouterr().err
        assert main(["ctl", str(dumper.http), "inject", "0:out"]) == 0
        assert json.loads(capsys.readouterr().out)["config"]["inject"] == ["0:out"]
        number = dumper.next_step
        with (
            torch.no_grad(),
            dumper.step_of(StepInfo(step=number, grid=(2,), rows=(RowSpan("r", 0, 2, 0, 0),), token_ids=[0, 1])),
        ):
            healed = model(X[:2])
        assert main(["ctl", str(out), "inject", "none"]) == 0
    with torch.no_grad():
        assert torch.allclose(healed, build()(X[:2]), rtol=1e-6)
    assert steps_of(out) == [{}, {"0:out": 1}]


def test_injection_in_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    model = make_llama(tmp_path / "model")
    base = ["-q", "--dtype", "float32"]
    assert (
        main(["dump", str(model), "-o", str(tmp_path / "base"), *base, "--prompt", "ab", "--max-new-tokens", "3"]) == 0
    )
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.gate_proj.weight"] *= 3
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    words = ["dump", str(model), *base, "--tokens-from", str(tmp_path / "base"), "-o"]
    assert main([*words, str(tmp_path / "wrong")]) == 0
    inject = ["--inject", "model.layers.1.mlp:out", "--inject-from", str(tmp_path / "base")]
    assert main([*words, str(tmp_path / "healed"), *inject]) == 0
    capsys.readouterr()
    only = ["--site", "lm_head:out", "-q"]
    assert main(["diff", str(tmp_path / "base"), str(tmp_path / "wrong"), *only]) == 1
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "base"), str(tmp_path / "healed"), *only]) == 0
    assert "overwritten by injection: model.layers.1.mlp:out" in capsys.readouterr().out
    assert steps_of(tmp_path / "healed") == [{"model.layers.1.mlp:out": 1}] * 3


SERVER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import test_live_injection as t
from tapscope.dumper import Dumper
model = t.build()
with Dumper(model, sys.argv[2], keep="full") as dumper:
    for number, line in enumerate(sys.stdin):
        t.forward(model, dumper, [json.loads(line)], number)
        dumper.flush()
        print("done", flush=True)
    if sys.argv[3] == "killed":
        import os
        os.kill(os.getpid(), 9)
"""


@pytest.fixture
def system(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts the healthy system, which runs a step per input line.

    A line lists (request, first position, count) tuples.
    """
    started = []

    def start(end: str = "closed") -> subprocess.Popen[str]:
        words = "-c", SERVER, Path(__file__).parent, tmp_path / "healthy", end
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = warm.start(
            *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
        )
        started.append(process)
        compute(process, [("r", 0, 2)])
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def compute(process: "subprocess.Popen[str]", parts: list[tuple[str, int, int]]) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{json.dumps(parts)}\n")


def test_injection_waits_for_a_step_that_another_system_computes_now(tmp_path: Path) -> None:
    """Two dumpers in one process: the live model reaches each step before the stored run has its values."""
    good, bad = build(), build(bug=True)
    with Dumper(good, tmp_path / "good", keep="full") as first:
        forward(good, first, [[("r", 0, 2)]])
        first.flush()
        settings: dict[str, Any] = {"inject": ["0:out"], "inject_from": str(tmp_path / "good"), "inject_wait_s": 20.0}
        with Dumper(bad, tmp_path / "bad", keep="full", **settings) as second:
            for number, part in enumerate([("renamed", 0, 2), ("renamed", 2, 2), ("next", 0, 1)]):
                now = threading.Timer(0.1, forward, (good, first, [[("r" if number < 2 else "s", *part[1:])]], number))
                if number:
                    now.start()
                forward(bad, second, [[part]], number)
                if number:
                    now.join()
    assert steps_of(tmp_path / "bad") == [{"0:out": 1}] * 3
    with open_run(tmp_path / "good") as one, open_run(tmp_path / "bad") as two:
        for theirs, mine in zip(one.select(["2:out"]), two.select(["2:out"]), strict=True):
            assert (one.array(theirs) == two.array(mine)).all()


@pytest.mark.soak
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_injection_waits_no_longer_than_the_bound_for_a_system_that_ended(
    tmp_path: Path, system: Callable[..., Any], end: str
) -> None:
    healthy, out = system(end), tmp_path / "live"
    settings = {"inject": ["0:out"], "inject_from": str(tmp_path / "healthy"), "inject_wait_s": 0.5}
    with Dumper(model := build(bug=True), out, keep="off", **settings) as dumper:
        healthy.communicate()
        begin = time.monotonic()
        forward(model, dumper, [[("r", i, 1)] for i in range(6)])
        waited = time.monotonic() - begin
    assert steps_of(out) == [{"0:out": 1}] * 2 + [{}] * 4
    assert waited < 2.0
    assert [reason for _, reason in events_of(out)] == ["not overwritten: 1 of 1 token rows were not recorded in time"]
