"""Faults: too much, too large, too slow."""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
from fault_checks import check_damaged, check_values, check_whole, verify
from fault_jobs import Ranks
from fault_list import CannotTry, fault
from jobs import wait_until

from tapscope.sources import open_run


@fault("recorder stopped for a while", 1, 20)
def recorder_stopped(place: Path, rng: random.Random) -> None:
    settings = {
        "queue_bytes": 2_200_000,
        "block_timeout_s": 0.3,
        "backpressure": rng.choice(["block", "drop", "strict"]),
    }
    settings |= {"shm_bytes": rng.choice([0, 4 << 20])}
    with Ranks(place / "run", 1, rows=256, pause_s=0.01, settings=settings) as ranks:  # 8 steps fill the queue
        ranks.opened().acked(5)
        for _ in range(rng.randrange(1, 3)):
            recorder = ranks.recorder
            os.kill(recorder, signal.SIGSTOP)
            time.sleep(rng.uniform(0.5, 1.5))
            if settings["backpressure"] == "block":
                wait_until(lambda: "tapscope drops values" in ranks.log(), "the queue is full", 8.0)
            computed = ranks.mark("at")
            wait_until(
                lambda at=computed: ranks.mark("at") >= at + 3, "the model goes on while the recorder stands", 8.0
            )
            os.kill(recorder, signal.SIGCONT)
            last = ranks.mark("acked") or 0
            ranks.acked(last + 10)  # it goes on
        ranks.end()
        with open_run(ranks.run) as run:
            account = run.ledger()
            assert (account.lost, account.failed, account.unfinished_steps, run.problems) == (0, 0, [], [])
            assert account.seen == account.recorded + account.dropped
        if account.dropped:
            check_damaged(ranks, f"{account.dropped:,} values dropped")
            assert "tapscope drops values" in ranks.log()
        else:
            check_whole(ranks)


@fault("recorder stopped for good", 0, 5)
def recorder_stopped_for_good(place: Path, rng: random.Random) -> None:
    settings = {
        "queue_bytes": 2_200_000,
        "block_timeout_s": 0.3,
        "backpressure": rng.choice(["block", "drop", "strict"]),
    }
    with Ranks(place / "run", 1, rows=256, pause_s=0.01, settings=settings) as ranks:
        ranks.opened().acked(5)
        recorder = ranks.recorder
        os.kill(recorder, signal.SIGSTOP)
        wait_until(lambda: "has sent nothing for" in ranks.log(), "the rank gives the recorder up", 40.0)
        if rng.random() < 0.5:
            os.kill(recorder, signal.SIGCONT)  # too late
        computed = ranks.mark("at")
        wait_until(lambda: ranks.mark("at") >= computed + 3, "the model goes on", 8.0)
        ranks.ask_to_end()
        ranks.finished()
        os.kill(recorder, signal.SIGCONT)
        ranks.end()
        check_damaged(ranks, "died while recording: rank 0")


@fault("shared memory too small", 1, 10)
def small_shared_memory(place: Path, rng: random.Random) -> None:
    if os.geteuid() != 0:
        raise CannotTry("needs the right to mount")
    nbytes = rng.choice([256 << 10, 3 << 20])  # room for no ring, or for a small one
    with Ranks(place / "run", max_steps=100, rows=256, shared_bytes=nbytes) as ranks:
        ranks.opened().finished().end()
        assert "bytes of shared memory in /dev/shm: No space left on device" in ranks.log()
        check_whole(ranks)


@fault("tensors beyond ring and queue", 1, 5)
def huge_tensors(place: Path, rng: random.Random) -> None:
    settings = {"queue_bytes": 4 << 20, "shm_bytes": rng.choice([0, 2 << 20]), "block_timeout_s": 30.0}
    with Ranks(place / "run", rows=1024, width=rng.randrange(1100, 3000), max_steps=3, settings=settings) as ranks:
        ranks.opened().finished().end()
        check_whole(ranks)


@fault("100,000 tiny records", 1, 3)
def tiny_records(place: Path, rng: random.Random) -> None:
    layers = 99
    settings = {"queue_bytes": rng.choice([1 << 20, 256 << 20]), "block_timeout_s": 30.0}
    shape = {"rows": 1, "width": 1, "layers": layers, "pause_s": 0.0, "max_steps": 500}
    with Ranks(place / "run", mark_every=100, settings=settings, **shape) as ranks:
        ranks.opened().finished().end()
        code, summary = verify(ranks.run)  # reads every byte
        assert code == 0, summary
        with open_run(ranks.run) as run:
            assert len(run.records) == 500 * 2 * (layers + 1)
            run.records = run.records.take(np.array(rng.sample(range(len(run.records)), 2000)))
            check_values(run, ranks.specs[0])
