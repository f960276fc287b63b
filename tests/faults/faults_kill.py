"""Faults: processes that are killed at random moments."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from fault_checks import check_damaged, check_recorded, check_whole, verify
from fault_jobs import Ranks
from fault_list import fault
from jobs import wait_until

from tapscope.sources import open_run


def _settings(rng: random.Random) -> dict[str, Any]:
    """Of the recording: small segments, so that kills also hit the moment one is sealed."""
    return {
        "backpressure": rng.choice(["block", "strict"]),
        "segment_bytes": rng.choice([150_000, 1_000_000]),
        "fsync": rng.choice(["never", "segment", "batch"]),
        "shm_bytes": rng.choice([0, 4 << 20]),
        "block_timeout_s": 0.5,
    }


def _job(place: Path, rng: random.Random, world: int) -> Ranks:
    pace = {"mark_every": rng.choice([1, 1, 5]), "pause_s": rng.choice([0.0, 0.005, 0.02])}
    return Ranks(place / "run", world, rows=rng.choice([1, 16, 64]), settings=_settings(rng), **pace)


def _some_time(rng: random.Random) -> None:
    time.sleep(rng.uniform(0.0, 0.6))


@fault("recorder killed", 1, 50)
def recorder_killed(place: Path, rng: random.Random) -> None:
    with _job(place, rng, rng.choice([1, 2])) as ranks:
        ranks.opened()
        _some_time(rng)
        ranks.kill_recorder()
        time.sleep(rng.uniform(0.0, 0.3))
        ranks.end()
        check_damaged(ranks, "recorder was killed")


@fault("a rank killed", 1, 50)
def rank_killed(place: Path, rng: random.Random) -> None:
    with _job(place, rng, 2) as ranks:
        ranks.opened()
        _some_time(rng)
        ranks.kill(1)
        _survivor_goes_on(ranks, 0)
        ranks.end(1)
        check_damaged(ranks, "died while recording: rank 1")


@fault("rank 0 killed", 1, 50)
def first_rank_killed(place: Path, rng: random.Random) -> None:
    with _job(place, rng, 2) as ranks:
        ranks.opened()
        _some_time(rng)
        ranks.kill(0)
        _survivor_goes_on(ranks, 1)
        ranks.end(0)
        check_damaged(ranks, "died while recording: rank 0")


def _survivor_goes_on(ranks: Ranks, rank: int) -> None:
    """The other rank's steps are recorded after the death, and the recorder says who died."""
    ranks.acked((ranks.mark("acked", rank) or -1) + 2, rank)

    def is_said() -> bool:
        with open_run(ranks.run) as run:
            return any(event.kind == "lost" and event.rank == 1 - rank for event in run.events())

    wait_until(is_said, "the recorder says that the rank died")


@fault("everything killed at once", 1, 20)
def everything_killed(place: Path, rng: random.Random) -> None:
    with _job(place, rng, 2) as ranks:
        ranks.opened()
        _some_time(rng)
        recorder = ranks.recorder
        for each in rng.sample([*(process.pid for process in ranks.processes), recorder], 3):
            os.kill(each, signal.SIGKILL)
        ranks.end(0, 1)
        check_damaged(ranks, "recorder was killed")


@fault("recorder killed while it starts", 1, 20)
def recorder_killed_at_birth(place: Path, rng: random.Random) -> None:
    with _job(place, rng, 1) as ranks:
        wait_until(lambda: ranks.find_recorder() is not None, "a recorder starts")
        time.sleep(rng.uniform(0.0, 0.4))
        ranks.kill_recorder()
        wait_until(lambda: bool(ranks.marks()), "the rank knows")
        time.sleep(0.1)
        ranks.end()
        refused = ranks.mark("refused")
        if refused is not None:  # one clear error, and the model computes without a recording
            assert refused.startswith("RecorderError: "), refused
        elif ranks.lost is None:  # it died before the rank had said hello, and another one was started
            check_whole(ranks)
        else:
            check_damaged(ranks, "recorder was killed")


@fault("a rank killed while it opens", 1, 20)
def rank_killed_at_birth(place: Path, rng: random.Random) -> None:
    with _job(place, rng, 2) as ranks:
        time.sleep(rng.uniform(0.0, 0.8))
        ranks.kill(1)
        wait_until(lambda: ranks.mark("open") is not None, "rank 0 opens")
        ranks.acked(2)
        ranks.end(1)
        code, _ = verify(ranks.run)
        assert code == 1
        check_recorded(ranks, repair=True)
    left = list(Path("/dev/shm").glob(f"tapscope-{ranks.processes[1].pid}-*"))
    for file in left:
        file.unlink()
    assert not left, f"shared memory is left behind: {left}"


@fault("recorder asked to end", 1, 10)
def recorder_terminated(place: Path, rng: random.Random) -> None:
    with _job(place, rng, 2) as ranks:
        ranks.opened()
        _some_time(rng)
        os.kill(ranks.recorder, signal.SIGTERM)  # as by a scheduler that ends a whole job: it outlasts the ranks
        time.sleep(0.2)
        ranks.end()
        with open_run(ranks.run) as run:
            account = run.ledger()
        assert (account.lost_ranks, account.open_ranks) == ([], [])
        check_recorded(ranks, repair=False)
