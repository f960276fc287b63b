"""A rank on another host whose connection breaks goes on where it was: nothing is lost, nothing is written twice."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Job, wait_until
from tcp_proxy import Proxy
from torch import nn

from tapscope.core.observe import RankInfo
from tapscope.dumper import Dumper
from tapscope.sources import open_run

STEPS = 12


class Joined:
    """Rank 0 as a process of its own; this process is rank 1, behind a proxy."""

    def __init__(self, job: Job, proxy: Proxy, run: Path) -> None:
        self.job = job
        self.proxy = proxy
        self.run = run
        """What rank 1 sees of the run's directory."""
        self.model = nn.Linear(256, 256).requires_grad_(False)

    def dumper(self, **settings: Any) -> Dumper:
        """Rank 1's, whose payloads come inside messages."""
        info = RankInfo(rank=1, world_size=2)
        return Dumper(self.model, self.run, info=info, keep="full", shm_bytes=0, **settings)

    def step(self, dumper: Dumper, number: int) -> None:
        """Half a megabyte of values that tell the step."""
        with dumper.step(phase="toy"):
            self.model(torch.full((256, 256), float(number)))


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[Joined]:
    with Job(tmp_path / "run", 1, keep="full", network="127.0.0.1", control="127.0.0.1:0", pause_s=0.05) as job:
        found = json.loads((job.run / "recorder.json").read_text())
        with contextlib.closing(Proxy(int(found["network"]["address"].rpartition(":")[2]))) as proxy:
            found["host"] = "elsewhere"
            found["network"]["address"] = f"tcp://127.0.0.1:{proxy.port}"
            copy = tmp_path / "copy"
            copy.mkdir()
            (copy / "recorder.json").write_text(json.dumps(found))
            yield Joined(job, proxy, copy)


def _check_whole(joined: Joined, num_steps: int) -> None:
    run = open_run(joined.job.run)
    inputs = {r.key.step: r for r in run.records if r.key.rank == 1 and r.key.site.endswith("in[input]")}
    assert len([r for r in run.records if r.key.rank == 1]) == 2 * num_steps
    for number in range(num_steps):
        assert (run.array(inputs[number]) == number).all()
    assert sorted(r.seq for r in run.records if r.key.rank == 1) == list(range(2 * num_steps))
    kinds = [event.kind for event in run.events(1)]
    assert kinds[0] == "open"
    assert kinds[-1] == "close"
    assert not {"lost", "dropped", "failed"} & set(kinds)


def test_recorder_rank_whose_connection_is_cut_again_and_again_loses_nothing(joined: Joined) -> None:
    proxy = joined.proxy
    with joined.dumper(block_timeout_s=30.0, queue_bytes="4MiB") as dumper:
        for number in range(STEPS):
            joined.step(dumper, number)
            if number % 3 == 1:
                before, connected = proxy.num_bytes, proxy.num_connections
                wait_until(lambda before=before: proxy.num_bytes > before, "something is on its way")
                proxy.cut(down_s=0.1)
                wait_until(lambda connected=connected: proxy.num_connections > connected, "it connects again")
    assert proxy.num_connections > STEPS // 3
    wait_until(lambda: joined.job.ask("state")[1]["ranks"][1]["status"] == "closed", "rank 1 has left")
    joined.job.end()
    _check_whole(joined, STEPS)


def test_recorder_change_made_while_the_connection_is_down_is_applied_by_every_rank(joined: Joined) -> None:
    job = joined.job
    with joined.dumper() as dumper:
        joined.step(dumper, 0)
        wait_until(lambda: job.steps()[1] == 0, "rank 1 has said its step")
        answers: list[tuple[int, dict[str, Any]]] = []
        asking = threading.Thread(target=lambda: answers.append(job.ask("configure", {"keep": "stats"})))
        cutting = threading.Thread(target=joined.proxy.cut, kwargs={"down_s": 1.0})
        cutting.start()
        wait_until(lambda: not joined.proxy._open.is_set(), "the connection is cut")
        asking.start()
        cutting.join()
        asking.join()
        assert answers[0][0] == 200, answers
        wait_until(lambda: dumper.next_step > 0, "it goes on")
        number = 1
        while job.ask("state")[1]["ranks"][1]["epoch"] != 1:
            joined.step(dumper, number)
            number += 1
            time.sleep(0.1)
            assert number < 200
    job.end()
    last = [r for r in open_run(job.run).records if r.key.rank == 1][-1]
    assert last.entry is None


def test_recorder_end_of_a_run_is_heard_though_the_connection_is_down(
    joined: Joined, caplog: pytest.LogCaptureFixture
) -> None:
    with joined.dumper() as dumper:
        for number in range(3):
            joined.step(dumper, number)
        threading.Thread(target=joined.proxy.cut, kwargs={"down_s": 1.5}).start()
        wait_until(lambda: not joined.proxy._open.is_set(), "the connection is cut")
    assert not [r for r in caplog.records if "not everything" in r.message]
    wait_until(lambda: joined.job.ask("state")[1]["ranks"][1]["status"] == "closed", "rank 1 has left")
    joined.job.end()
    _check_whole(joined, 3)
