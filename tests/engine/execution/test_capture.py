"""A request that asks for capture is recorded completely: all of its own rows and none of other requests."""

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_llama
from engine_http import Served

from tapscope.comparator import Verdict, compare
from tapscope.core.errors import RecorderError, UsageError
from tapscope.core.observe import StepInfo
from tapscope.dumper import Dumper, make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM
from tapscope.run_format.run import Run
from tapscope.sources import open_run

PROMPTS = [[3, 4, 5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
NEW = 4

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "llama", num_hidden_layers=2)


def observed(llama: Path, out: Path, config: DumperConfig, **settings: Any) -> LLM:
    observer = partial(make_observer, out=str(out), config=config)
    return LLM(llama, observer=observer, page_size=2, check_invariants=True, **settings)


def answered(llm: LLM, captures: dict[int, str]) -> None:
    for index, prompt in enumerate(PROMPTS):
        llm.submit(prompt, max_new_tokens=NEW, request_id=f"r{index}", capture=captures.get(index, ""))
    while llm.has_work:
        llm.step()


def rows_of(run: Run, request: str, site: str) -> dict[int, Any]:
    """Return the row of the site's values by position."""
    found: dict[int, Any] = {}
    for record in run.records:
        if record.key.site == site and record.entry:
            slots = [s for first, count in record.rows for s in range(first, first + count)] if record.rows else None
            info = run.steps[record.key.step][record.key.rank].info
            at = {
                row.slot + i: row.position + i for row in info.rows if row.request == request for i in range(row.count)
            }
            values = run.array(record)
            slots = list(range(len(values))) if slots is None else slots
            found |= {at[slot]: values[i] for i, slot in enumerate(slots) if slot in at}
    return found


@pytest.fixture(scope="module")
def everything(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "everything"
    with observed(llama, path, DumperConfig(keep="full")) as llm:
        answered(llm, {})
    return open_run(path)


@pytest.mark.parametrize(
    ("tp", "config"), [(1, DumperConfig(keep="off")), (1, DumperConfig(enabled=False)), (2, DumperConfig(keep="off"))]
)
def test_capture_records_the_whole_request_only(
    llama: Path, everything: Run, tmp_path: Path, tp: int, config: DumperConfig
) -> None:
    with observed(llama, tmp_path / "run", config, tp=tp) as llm:
        llm.generate(PROMPTS, max_new_tokens=1)  # fills the prefix cache
        answered(llm, {0: "full"})
    run = open_run(tmp_path / "run")
    assert run.ledger().complete, run.ledger().sentences()
    site = "model.layers.1:out"
    expected, found = rows_of(everything, "r0", site), rows_of(run, "r0", site)
    assert sorted(found) == list(range(len(PROMPTS[0]) + NEW - 1))
    for position, values in found.items():
        np.testing.assert_allclose(values, expected[position], rtol=2e-5, atol=2e-5)
    for other in ("r1", "r2", "0", "1", "2"):
        assert not rows_of(run, other, site)
    sites = {record.key.site for record in everything.records}
    assert {record.key.site for record in run.records} >= {name for name in sites if name.startswith("model.layers.0")}
    asked = [event.fields["requests"] for event in run.events() if event.kind == "asked" and event.rank == 0]
    assert asked == [{"r0": "full"}] or asked == [{"r0": "full"}, {}]


def test_capture_does_not_change_other_captures(llama: Path, everything: Run, tmp_path: Path) -> None:
    config = DumperConfig(keep="stats", rules=["model.layers.0:out=full"])
    with observed(llama, tmp_path / "run", config) as llm:
        answered(llm, {1: "full", 2: "stats"})
    run = open_run(tmp_path / "run")
    assert run.ledger().complete
    for request in ("r0", "r1", "r2"):  # full capture of every request
        expected = rows_of(everything, request, "model.layers.0:out")
        assert sorted(rows_of(run, request, "model.layers.0:out")) == sorted(expected)
    assert sorted(rows_of(run, "r1", "model.layers.1:out")) == list(range(len(PROMPTS[1]) + NEW - 1))
    assert not rows_of(run, "r0", "model.layers.1:out")
    last = max(record.key.step for record in run.records)
    later = [r for r in run.records if r.key.step == last and r.key.site == "model.layers.1:out"]
    assert [record.stats is not None for record in later] == [True]


def test_capture_rejects_invalid_levels(llama: Path, tmp_path: Path) -> None:
    with LLM(llama) as llm, pytest.raises(UsageError, match="this engine has no observer"):
        llm.submit([1, 2], capture="full")
    with (
        observed(llama, tmp_path / "run", DumperConfig(keep="off")) as llm,
        pytest.raises(UsageError, match="'stats' or 'full'"),
    ):
        llm.submit([1, 2], capture="everything")


@pytest.fixture
def served(llama: Path, tmp_path: Path) -> Iterator[Served]:
    with observed(llama, tmp_path / "run", DumperConfig(enabled=False)) as llm:
        served = Served(llm, [])
        yield served
        served.close()


def test_capture_over_http_by_field_or_header(served: Served, tmp_path: Path) -> None:
    params = {"max_new_tokens": NEW, "ignore_eos": True}
    assert served.generate(input_ids=PROMPTS[0], rid="field", sampling_params=params, capture="full").status_code == 200
    assert served.generate(input_ids=PROMPTS[1], rid="none", sampling_params=params).status_code == 200
    body = {"model": served.llm.config.model, "prompt": PROMPTS[2], "max_tokens": NEW, "temperature": 0}
    answer = served.client.post("/v1/completions", json=body, headers={"x-tapscope-capture": "stats"})
    assert answer.status_code == 200, answer.text
    wrong = served.client.post("/v1/completions", json=body, headers={"x-tapscope-capture": "all"})
    assert wrong.status_code == 400
    assert "must be 'stats' or 'full'" in wrong.text
    assert served.generate(input_ids=[1], capture="all").status_code == 400
    served.close()
    served.llm.close()
    run = open_run(tmp_path / "run")
    assert run.ledger().complete
    assert sorted(rows_of(run, "field", "model.layers.1:out")) == list(range(len(PROMPTS[0]) + NEW - 1))
    requests = {row.request for steps in run.steps.values() for row in steps[0].info.rows}
    assert requests == {"field", answer.json()["id"]}  # the run identifies a request by the id of its response
    assert any(record.stats and not record.entry for record in run.records)


def test_logits_observed_computes_every_row_only_while_armed(llama: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    with observed(llama, tmp_path / "run", DumperConfig(keep="off"), logits="observed") as llm:
        llm.model.register_forward_hook(lambda _module, _args, out: seen.append(len(out.logits)))
        answered(llm, {})
        assert seen[0] == len(PROMPTS)
        seen.clear()
        answered(llm, {1: "stats"})
        assert seen[0] > len(PROMPTS)
        llm.generate([[1, 2]], max_new_tokens=1)  # the taps are removed before the next step
        seen.clear()
        answered(llm, {})
        assert seen[0] == len(PROMPTS)


def test_capture_stats_of_shards_differ_from_the_whole(llama: Path, tmp_path: Path) -> None:
    config = DumperConfig(keep="stats")
    for tp in (1, 2):
        with observed(llama, tmp_path / f"tp{tp}", config, tp=tp) as llm:
            answered(llm, {})
    with open_run(tmp_path / "tp1") as one, open_run(tmp_path / "tp2") as two:
        report = compare(one, two)
    verdicts = {finding.verdict for finding in report.findings}
    assert Verdict.DIFFERS not in verdicts, [f.site for f in report.findings if f.verdict is Verdict.DIFFERS]
    assert Verdict.CLOSE in verdicts


def test_capture_reports_unsupported_hosts(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    step = StepInfo(step=0, asked={"mine": "everything"})
    with Dumper(model, tmp_path / "run", keep="stats") as dumper, dumper.step_of(step):
        model(torch.zeros(1, 2))
    with open_run(tmp_path / "run") as run:
        reasons = [event.fields["reason"] for event in run.events() if event.kind == "failed"]
    assert reasons == ["asked['mine']='everything': must be 'stats' or 'full'; not captured"]


def test_reopen_continues_all_ranks_at_one_step(llama: Path, everything: Run, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with observed(llama, first, DumperConfig(keep="full"), tp=2) as llm:
        llm.generate(PROMPTS, max_new_tokens=NEW, request_ids=["a", "b", "c"])
        os.kill(json.loads((first / "recorder.json").read_text())["pid"], signal.SIGKILL)
        steps = llm.engine.state()["num_steps"]
        with pytest.raises(RecorderError, match=f"{first} already holds a run"):
            llm.engine.reopen(first)
        llm.generate(PROMPTS[:1], max_new_tokens=1)  # the model keeps running, without recording
        llm.engine.reopen(second)
        llm.engine.scheduler.flush()
        answered(llm, {})
    with open_run(first) as run:
        assert run.ledger().killed_ranks == [0, 1]
    with open_run(second) as run:
        assert run.ledger().complete, run.ledger().sentences()
        assert min(run.steps) == steps + 1
        assert all(lines.keys() == {0, 1} for lines in run.steps.values())
        report = compare(everything, run)
    verdicts = {finding.verdict for finding in report.findings}
    assert Verdict.CLOSE in verdicts
    assert Verdict.DIFFERS not in verdicts


def test_reopen_needs_a_recorder(llama: Path, tmp_path: Path) -> None:
    with LLM(llama) as llm, pytest.raises(RecorderError, match="this engine has no recorder"):
        llm.engine.reopen(tmp_path / "run")
