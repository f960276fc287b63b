"""Steps whose host provides the token ids only after the launch."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tapscope.core.observe import RowSpan, StepInfo
from tapscope.dumper import Dumper
from tapscope.dumper.pipeline.record_batch import RecordBatch
from tapscope.dumper.steps import deferred_line
from tapscope.dumper.steps.deferred_line import DeferredLine, LateInfo
from tapscope.run_format.ledger import encode_line, metric_line
from tapscope.sources import open_run

ROWS = (RowSpan("a", 4, 1, 0, 0), RowSpan("b", 9, 1, 0, 1))
OUTLINE = StepInfo(step=0, phase="decode", grid=(2,), rows=ROWS)
WHOLE = StepInfo(step=0, phase="decode", grid=(2,), rows=ROWS[:1], token_ids=(7,))


def test_step_ahead_gets_the_rows_that_its_host_learns_later(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with Dumper(model, tmp_path / "run", keep="stats") as dumper:
        complete = dumper.before_step_ahead(OUTLINE)
        model(torch.ones(2, 4))
        dumper.after_step({})
        complete(WHOLE)
    run = open_run(tmp_path / "run")
    info = run.steps[0][0].info
    assert (tuple(info.token_ids), info.rows, info.grid) == ((7,), ROWS[:1], (2,))
    assert run.ledger().complete


def test_step_ahead_whose_tokens_never_come_keeps_its_outline(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with Dumper(model, tmp_path / "run", keep="stats") as dumper:
        dumper.before_step_ahead(OUTLINE)
        model(torch.ones(2, 4))
        dumper.after_step({})
    run = open_run(tmp_path / "run")
    assert run.steps[0][0].info.rows == ROWS
    assert run.ledger().complete


def test_late_info_does_not_hold_a_run_back_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateInfo(OUTLINE)
    assert not late.is_ready
    monkeypatch.setattr(deferred_line, "_PATIENCE_S", -1.0)
    assert LateInfo(OUTLINE).is_ready
    assert LateInfo(OUTLINE).info is OUTLINE
    late.complete(WHOLE)
    late.give_up()
    assert (late.is_ready, late.info) == (True, WHOLE)


def test_lines_are_made_where_they_are_sent_and_counted_there() -> None:
    info, batch = StepInfo(step=3, grid=(2,)), RecordBatch()
    batch.add_line(DeferredLine(info, None, lambda step: b'{"step":%d}\n{"at":"end"}' % step.step))
    batch.add_line(b"{}")
    assert (batch.lines, batch.num_lines) == ([b'{"step":3}\n{"at":"end"}', b"{}"], 3)


def test_line_that_cannot_be_encoded_is_reported_and_ends_nothing() -> None:
    batch = RecordBatch()
    batch.add_line(DeferredLine(StepInfo(step=3), None, lambda step: "\ud800".encode()))
    assert batch.num_lines == 1
    assert b'"kind":"failed"' in batch.lines[0]
    assert b"UnicodeEncodeError" in batch.lines[0]


def test_metric_lines_are_those_of_the_encoder() -> None:
    for name, value, number in (("a", 3, 3.0), ('"ä\n', 1e-17, 1e-17), ("a", 1e22, 1e22), ("b", float("nan"), None)):
        assert metric_line(5, name, value) == encode_line({"type": "metric", "step": 5, "name": name, "value": number})
