"""Budgets: a capture that reaches its limit stops there, is reported, and has no further cost."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jobs import Job, wait_until
from rank_worker import build

from tapscope.core.errors import ConfigError
from tapscope.core.observe import StepInfo
from tapscope.dumper import Dumper
from tapscope.dumper.config import DumperConfig
from tapscope.dumper.retention.capture_stop import Budget
from tapscope.run_format.run import Run
from tapscope.sources import open_run

VALUE = 2 * 8 * 4  # bytes per value of the toy model
PER_STEP = 6


def forward(model: torch.nn.Module, dumper: Dumper, value: float) -> None:
    with torch.no_grad(), dumper.step(phase="toy"):
        model(torch.full((2, 8), value))


def fields_of(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event.fields for event in run.events() if event.kind == kind]


@given(
    values=st.lists(st.integers(0, 50), max_size=40),
    max_bytes=st.none() | st.integers(1, 300),
    max_records=st.none() | st.integers(1, 30),
)
def test_budget_limit_is_reached_by_the_value_that_meets_it(
    values: list[int], max_bytes: int | None, max_records: int | None
) -> None:
    budget = Budget()
    budget.limit(DumperConfig(max_bytes=max_bytes, max_records=max_records))
    kept = 0
    for number, nbytes in enumerate(values):
        if budget.reached() is not None:
            break
        budget.charge(num_records=1, nbytes=nbytes)
        kept = number + 1
    full = [n for n in range(len(values) + 1) if max_bytes is not None and sum(values[:n]) >= max_bytes]
    most = min([len(values), *full[:1], *([max_records] if max_records is not None else [])])
    assert kept == most


@pytest.mark.parametrize(
    ("setting", "num_records"),
    [({"max_records": 10}, 10), ({"max_bytes": "640"}, None), ({"max_steps": 3}, 3 * PER_STEP)],
)
def test_budget_reaching_a_limit_stops_there_and_nothing_is_silent(
    tmp_path: Path, setting: dict[str, Any], num_records: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="full", **setting) as dumper:
        for step in range(8):
            forward(model, dumper, float(step))
        assert not dumper.armed
        assert not model.layers["0"]._forward_hooks
    with open_run(tmp_path / "run") as run:
        (limit,) = setting
        nbytes = sum(entry.nbytes for entry in {rec.entry for rec in run.records if rec.entry})
        if num_records is not None:
            assert len(run.records) == num_records
        else:
            assert 640 <= nbytes < 640 + VALUE
        (budget,) = fields_of(run, "budget")
        account = run.ledger()
        assert budget["limit"] == limit
        assert not account.complete
        assert account.lost == account.dropped == account.failed == 0
        assert any(limit in sentence for sentence in account.sentences())
        last = max(run.steps)
        assert budget["step"] == last
        on_disk = sum(rec.key.step == last for rec in run.records)
        assert account.left_out == PER_STEP - on_disk
        assert on_disk + sum(rec.key.step < last for rec in run.records) == last * PER_STEP + on_disk
    assert any(f"tapscope stops capturing at step {last}: {limit}" in text for text in caplog.messages)


def test_budget_larger_budget_continues_and_the_same_one_does_not(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="stats", max_records=10) as dumper:
        for step in range(3):
            forward(model, dumper, float(step))
        dumper.configure(keep="full")
        forward(model, dumper, 3.0)
        assert not dumper.armed
        dumper.configure(max_records=20)
        assert dumper.armed
        for step in range(4, 8):
            forward(model, dumper, float(step))
    with open_run(tmp_path / "run") as run:
        assert len(run.records) == 20
        assert sorted({rec.key.step for rec in run.records}) == [0, 1, 4, 5]


def test_budget_new_run_has_a_budget_of_its_own(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="stats", max_records=10) as dumper:
        for step in range(3):
            forward(model, dumper, float(step))
        dumper.reset("next")
        for step in range(3):
            forward(model, dumper, float(step))
    for name in ("run", "next"):
        with open_run(tmp_path / name) as run:
            assert len(run.records) == 10


def test_budget_what_is_held_in_memory_costs_no_budget_and_a_release_does(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="full", flight_recorder_steps=2, max_records=15) as dumper:
        for step in range(6):
            forward(model, dumper, float(step))
        assert dumper.release(2).num_values == 12
        for step in range(6, 8):
            forward(model, dumper, float(step))
        assert dumper.release(2).num_values == 12
        assert not model.layers["0"]._forward_hooks or dumper.armed
        with pytest.raises(ConfigError, match="max_records=15 is reached"):
            dumper.release(1)
        forward(model, dumper, 8.0)
        assert not dumper.armed
    with open_run(tmp_path / "run") as run:
        assert sorted({rec.key.step for rec in run.records}) == [4, 5, 6, 7]


def test_budget_disk_with_too_little_room_stops_every_rank_and_the_state_states_so(tmp_path: Path) -> None:
    with Job(tmp_path / "run", 2, keep="full", control="127.0.0.1:0", min_free_bytes=1 << 60) as job:
        wait_until(lambda: all(rank["stopped"] for rank in job.ask("state")[1]["ranks"]), "both ranks have stopped")
        before = job.steps()
        assert all("min_free_bytes" in rank["stopped"] for rank in job.ask("state")[1]["ranks"])
        wait_until(lambda: min(job.steps()) > max(before) + 5, "the model goes on")
        status, answer = job.ask("configure", {"min_free_bytes": 0})
        assert status == 200, answer
        wait_until(lambda: not any(r["stopped"] for r in job.ask("state")[1]["ranks"]), "both ranks go on")
        step = max(job.steps())
        wait_until(lambda: min(job.steps()) > step + 2, "more steps are taken")
    with open_run(tmp_path / "run") as run:
        for rank in (0, 1):
            (budget,) = [event.fields for event in run.events(rank) if event.kind == "budget"]
            assert budget["limit"] == "min_free_bytes"
            assert budget["step"] is None
            assert min(rec.key.step for rec in run.records if rec.key.rank == rank) >= max(before)
        assert not run.ledger().complete


def test_budget_warm_up_steps_cost_nothing_unless_asked_for(tmp_path: Path) -> None:
    for skip in (True, False):
        model = build()
        path = tmp_path / f"run-{skip}"
        with Dumper(model, path, keep="stats", max_steps=2, skip_dummy=skip) as dumper, torch.no_grad():
            for step in range(5):
                with dumper.step_of(StepInfo(step=step, kind="warmup" if step < 2 else None)):
                    model(torch.ones(2, 8))
        with open_run(path) as run:
            assert sorted({rec.key.step for rec in run.records}) == ([2, 3] if skip else [0, 1])


def test_budget_disk_that_is_still_full_stops_the_capture_again(tmp_path: Path) -> None:
    model = build()
    with Dumper(model, tmp_path / "run", keep="full", min_free_bytes=1 << 60) as dumper:
        assert not dumper.armed, "the disk is looked at before anything is written"
        forward(model, dumper, 1.0)

        def stops() -> bool:
            forward(model, dumper, 1.0)
            return not dumper.armed

        dumper.configure(keep="stats")
        assert dumper.armed
        wait_until(stops, "it stops again")
        dumper.configure(min_free_bytes=0)
        for _ in range(50):
            forward(model, dumper, 1.0)
        assert dumper.armed
    with open_run(tmp_path / "run") as run:
        first, second = fields_of(run, "budget")
        assert first["limit"] == second["limit"] == "min_free_bytes"
        assert first["step"] is None
        assert second["step"] is not None
        assert "min_free_bytes 1152921504606846976 was reached before the first step" in run.ledger().budgets[0]
        assert run.records
        assert min(rec.key.step for rec in run.records) >= 1
