"""Triggers: actions, limits on reports, and no cost for other sites."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jobs import Job, wait_until
from rank_worker import build

from tapscope.core.errors import RuleError
from tapscope.dumper import Dumper
from tapscope.dumper.retention.trigger_actions import MAX_COMMANDS, TriggerCommands
from tapscope.dumper.rules.trigger import parse_trigger
from tapscope.dumper.selection.site_decision import RuleContext
from tapscope.dumper.selection.site_triggers import SiteTriggers
from tapscope.kernels.native import summary
from tapscope.run_format.ledger import encode_line
from tapscope.run_format.run import Run
from tapscope.run_format.stats import Stats
from tapscope.sources import open_run

NAN = float("nan")


def forward(model: torch.nn.Module, dumper: Dumper, *values: float) -> None:
    with torch.no_grad(), dumper.step(phase="toy"):
        for value in values:
            model(torch.full((2, 8), value))


def kept(run: Run) -> list[tuple[int, str, bool]]:
    return [(rec.key.step, rec.key.site, rec.entry is not None) for rec in run.records]


def fields_of(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event.fields for event in run.events() if event.kind == kind]


def num_events(run: Path, kind: str) -> int:
    with open_run(run) as found:
        return len(fields_of(found, kind))


# ---- the condition

COUNTS = st.integers(0, 3)
NUMBERS = st.floats(-1e6, 1e6)
CONDITIONS = [
    "nan",
    "inf or nan",
    "nonfinite > 1",
    "nan == 0",
    "posinf - neginf > 0",
    "absmax > 10",
    "mean < 0",
    "std > 3 and step > 4",
    "rms > 1 or layer == 3",
    "zeros / count > 0.5",
    "numel > 4 and nan",
]


@given(
    condition=st.sampled_from(CONDITIONS),
    counts=st.tuples(COUNTS, COUNTS, COUNTS, COUNTS),
    numbers=st.lists(NUMBERS, min_size=1, max_size=4),
    step=st.integers(0, 8),
)
def test_trigger_actions_quick_answer_is_the_answer(
    condition: str, counts: tuple[int, int, int, int], numbers: list[float], step: int
) -> None:
    nan, posinf, neginf, zeros = counts
    total, squares = math.fsum(numbers), math.fsum(x * x for x in numbers)
    low, high = min(numbers), max(numbers)
    amount = len(numbers) + nan + posinf + neginf
    stats = Stats(amount, nan, posinf, neginf, zeros, 0, low, high, max(map(abs, numbers)), total, squares)
    trigger = parse_trigger(f"layers.*: {condition} -> keep")
    sentinel = SiteTriggers([trigger], {"layer": 3, "rank": 0})
    moment = RuleContext(step=step, shape=(5, 2))
    text = b'"hash":"0","bag":"0","stats":' + encode_line(stats.to_json())
    values = {"layer": 3, "rank": 0, "step": step, "numel": 10}
    assert bool(sentinel.fired(text, lambda: moment)) == trigger.fires(stats, values)
    assert sentinel.problem is None


def test_trigger_actions_text_of_a_captured_value_has_what_a_trigger_reads() -> None:
    sentinel = SiteTriggers([parse_trigger("*: nan or absmax > 5 -> keep"), parse_trigger("*: nan -> stop")], {})
    for values, actions in (([1.0, 2.0], []), ([1.0, 9.0], ["keep"]), ([1.0, NAN], ["keep", "stop"]), ([], [])):
        tensor = torch.tensor(values)
        text, _ = summary.take(tensor.data_ptr(), tensor.numel(), "float32")
        assert [trigger.action for trigger, _ in sentinel.fired(text, RuleContext)] == actions


def test_trigger_actions_report_an_undecidable_condition_once(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", triggers=["*:out: 1 / zeros > 1 -> keep"]) as dumper:
        for _ in range(3):
            forward(model, dumper, 1.0)
    with open_run(tmp_path / "run") as run:
        assert len(run.records) == 18
        reasons = [fields["reason"] for fields in fields_of(run, "failed")]
        assert len(reasons) == 3  # one per site
        assert all("1 / zeros" in reason for reason in reasons)


# ---- keep


def test_trigger_actions_write_an_unselected_site_only_when_its_trigger_fires(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="off", triggers=["layers.0:out: nan -> keep"]) as dumper:
        assert dumper.armed
        assert not model.layers["1"]._forward_hooks
        for step in range(6):
            forward(model, dumper, NAN if step == 3 else 1.0)
    with open_run(tmp_path / "run") as run:
        assert kept(run) == [(3, "layers.0:out", True)]
        assert run.array(run.records[0]).shape == (2, 8)
        assert list(run.sites) == ["layers.0:out"]
        assert run.ledger().complete, run.ledger().sentences()


def test_trigger_actions_from_the_value_that_fires_on_the_step_is_kept_in_full(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="stats", triggers=["layers.0:out: nan -> keep"]) as dumper:
        for step in range(4):
            forward(model, dumper, 1.0, NAN if step == 2 else 1.0)
    with open_run(tmp_path / "run") as run:
        full = [(rec.key.step, rec.key.occurrence, rec.key.site) for rec in run.records if rec.entry]
        sites = ["layers.0:out", "layers.1:in[input]", "layers.1:out", ":out"]
        assert full == [(2, 1, site) for site in sites]
        assert len(run.records) == 4 * 2 * 6
        assert run.ledger().complete


def test_trigger_actions_size_cap_holds_for_the_value_that_fires_too(tmp_path: Path) -> None:
    model = build()
    settings = {"keep": "off", "rules": ["layers.0:out=full cap=8"], "triggers": ["layers.0:out: nan -> keep"]}
    with Dumper(model, tmp_path / "run", **settings) as dumper:
        forward(model, dumper, NAN)
    with open_run(tmp_path / "run") as run:
        assert [(rec.cap, rec.entry) for rec in run.records] == [(8, None)]


def test_trigger_actions_triggers_see_gradients_that_they_name(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="off", triggers=["layers.0:out.grad: absmax > 0 -> keep"]) as dumper:
        for step in range(2):
            with dumper.step():
                (model(torch.ones(2, 8)) * step).sum().backward()
    with open_run(tmp_path / "run") as run:
        assert [(rec.key.step, rec.key.site, rec.key.pass_) for rec in run.records] == [
            (1, "layers.0:out.grad", "backward")
        ]


def test_trigger_actions_explicit_values_set_triggers_off_as_well(tmp_path: Path) -> None:
    with Dumper(None, tmp_path / "run", keep="off", triggers=["*tap[loss]: nan -> keep"]) as dumper:
        for value in (1.0, NAN, 2.0):
            with dumper.step():
                dumper.dump("loss", torch.tensor(value))
    with open_run(tmp_path / "run") as run:
        assert [rec.key.step for rec in run.records] == [1]


def test_trigger_that_matches_no_site_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"layers\.7:out: nan -> keep.*layers are 0-1"):
        Dumper(build(), tmp_path / "run", triggers=["layers.7:out: nan -> keep"]).open()


# ---- stop


def test_trigger_actions_stop_ends_the_capture_with_the_step_and_takes_the_hooks_away(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="full", triggers=["layers.0:out: nan -> stop"]) as dumper:
        for step in range(6):
            forward(model, dumper, NAN if step == 2 else 1.0)
            assert bool(model.layers["0"]._forward_hooks) == (step < 2)
        assert not dumper.armed
        dumper.configure(keep="stats")
        assert dumper.armed
        forward(model, dumper, 1.0)
    with open_run(tmp_path / "run") as run:
        assert Counter(rec.key.step for rec in run.records) == {0: 6, 1: 6, 2: 6, 6: 6}
        (stop,) = fields_of(run, "stop")
        assert stop["step"] == 2
        assert "layers.0:out" in stop["reason"]


def test_trigger_actions_stop_reaches_the_other_ranks_and_the_state_states_why(tmp_path: Path) -> None:
    trigger = "layers.0:out: rank == 1 and step == 8 -> stop"
    with Job(tmp_path / "run", 2, pause_s=0.02, control="127.0.0.1:0", triggers=[trigger]) as job:
        wait_until(lambda: all(rank["stopped"] for rank in job.ask("state")[1]["ranks"]), "both ranks have stopped")
        for rank in job.ask("state")[1]["ranks"]:
            assert "step 8, rank 1" in rank["stopped"]
        status, answer = job.ask("configure", {"triggers": []})
        assert status == 200, answer
        wait_until(lambda: not any(r["stopped"] for r in job.ask("state")[1]["ranks"]), "both ranks go on")
    with open_run(tmp_path / "run") as run:
        assert max(rec.key.step for rec in run.records if rec.key.rank == 1) > 8


def test_trigger_actions_rank_that_joins_after_a_stop_does_not_capture(tmp_path: Path) -> None:
    trigger = "layers.0:out: rank == 0 and step == 2 -> stop"
    with Job(tmp_path / "run", 2, late=[1], pause_s=0.02, control="127.0.0.1:0", triggers=[trigger]) as job:
        wait_until(lambda: all(rank["stopped"] for rank in job.ask("state")[1]["ranks"]), "rank 0 has stopped")
        job.join(1)
        wait_until(lambda: [bool(r["stopped"]) for r in job.ask("state")[1]["ranks"]] == [True, True], "rank 1 has too")
        assert job.ask("configure", {"triggers": []})[0] == 200
        wait_until(lambda: not any(r["stopped"] for r in job.ask("state")[1]["ranks"]), "both ranks go on")


# ---- limits on reports


def test_trigger_actions_every_firing_counts_and_the_first_are_reported_one_by_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", triggers=["layers.*:out: nan -> keep"]) as dumper:
        for _ in range(5):
            forward(model, dumper, *[NAN] * 5)
        for _ in range(20):
            forward(model, dumper, NAN)
    with open_run(tmp_path / "run") as run:
        events = fields_of(run, "trigger")
        for site in ("layers.0:out", "layers.1:out"):
            mine = [fields for fields in events if fields["site"] == site]
            assert len(mine) == 4
            assert [fields["found"] for fields in mine[:3]] == [{"nan": 16}] * 3
            assert mine[3]["num_more"] == 5 * 5 + 20 - 3
    lines = [text for text in caplog.messages if "layers.0:out: nan (nan=16)" in text]
    assert len(lines) == 10
    assert any("fired 90 times" in text for text in caplog.messages)


# ---- commands


def test_trigger_actions_command_runs_once_a_step_without_a_shell(tmp_path: Path) -> None:
    log = tmp_path / "log of it"
    script = tmp_path / "tell.sh"
    script.write_text('#!/bin/sh\necho "$@" >> "$0.log"\n')
    script.chmod(0o755)
    log = tmp_path / "tell.sh.log"
    trigger = f"layers.*:out: nan -> run '{script} {{site}} {{step}} {{rank}} {{run}} $HOME;'"
    model = build()
    with Dumper(model, tmp_path / "run", keep="off", triggers=[trigger]) as dumper:
        for step in range(5):
            forward(model, dumper, NAN if step in (1, 3) else 1.0)
        wait_until(lambda: dumper.flush() and num_events(tmp_path / "run", "command") == 2, "both are reported")
    assert sorted(log.read_text().splitlines()) == [f"layers.0:out {n} 0 {tmp_path / 'run'} $HOME;" for n in (1, 3)]
    with open_run(tmp_path / "run") as run:
        assert run.records == []
        assert [fields["exit"] for fields in fields_of(run, "command")] == [0, 0]


def test_trigger_actions_report_failed_and_slow_commands_and_bound_their_number(tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []
    short, commands = (
        TriggerCommands(lambda **fields: said.append(fields), time_limit_s=limit) for limit in (0.3, 600.0)
    )
    short.start(["sh", "-c", "sleep 600 & sleep 600"])
    commands.start([str(tmp_path / "missing")])
    commands.start(["sh", "-c", "exit 7"])
    wait_until(lambda: len(said) == 3, "all three have ended")
    outcomes = {fields["argv"][-1]: fields.get("exit", fields.get("problem")) for fields in said}
    assert outcomes["exit 7"] == 7
    assert outcomes["sleep 600 & sleep 600"] == "ended after 0.3 s"
    assert "No such file" in str(outcomes[str(tmp_path / "missing")])
    for _ in range(MAX_COMMANDS):
        commands.start(["true"])
    assert commands.num_refused == 2
    wait_until(lambda: len(said) == MAX_COMMANDS + 1, "the others have ended")


def test_trigger_actions_command_never_comes_over_http(tmp_path: Path) -> None:
    with Job(tmp_path / "run", 1, control="127.0.0.1:0") as job:
        status, answer = job.ask("configure", {"triggers": ["*: nan -> run 'true'"]})
        assert status == 400
        assert "cannot be set over HTTP" in answer["error"]
        status, answer = job.ask("configure", {"triggers": ["layers.*:out: nan -> keep"], "flight_recorder_steps": 2})
        assert status == 200, answer


def test_trigger_actions_keep_and_stop_go_together(tmp_path: Path) -> None:
    model = build()
    triggers = ["layers.0:out: nan -> keep", "layers.0:out: nan -> stop"]
    with Dumper(model, tmp_path / "run", keep="full", flight_recorder_steps=3, triggers=triggers) as dumper:
        for step in range(9):
            forward(model, dumper, NAN if step == 5 else 1.0)
        assert not dumper.armed
    with open_run(tmp_path / "run") as run:
        assert sorted({rec.key.step for rec in run.records}) == sorted(run.steps) == [3, 4, 5]
        assert run.ledger().complete, run.ledger().sentences()
