"""Faults: the disk below the run."""

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from fault_checks import check_damaged, check_recorded, check_whole, verify
from fault_jobs import Ranks
from fault_list import CannotTry, fault
from jobs import wait_until

from tapscope.sources import open_run


def _mount(*words: str) -> bool:
    return os.geteuid() == 0 and not subprocess.run(["mount", *words], capture_output=True, check=False).returncode


@contextlib.contextmanager
def _small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    folder.mkdir()
    if not _mount("-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)):
        raise CannotTry("needs the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _says_lost(ranks: Ranks) -> bool:
    return "tapscope stops recording" in ranks.log()


@fault("disk full", 1, 20)
def disk_full(place: Path, rng: random.Random) -> None:
    nbytes = rng.randrange(2_000_000, 6_000_000)
    settings = {"segment_bytes": rng.choice([300_000, 50_000_000]), "shm_bytes": rng.choice([0, 4 << 20])}
    settings |= {"fsync": rng.choice(["never", "batch"]), "backpressure": rng.choice(["block", "strict"])}
    with (
        _small_disk(place / "disk", nbytes) as disk,
        Ranks(disk / "run", 2, side=place, rows=64, settings=settings | {"min_free_bytes": 0}) as ranks,
    ):
        ranks.opened()
        wait_until(lambda: _says_lost(ranks), "the disk is full")
        ranks.end()
        assert "No space left on device" in ranks.log()
        assert verify(ranks.run)[0] == 1
        check_recorded(ranks, repair=False)
        assert _mount("-o", f"remount,size={nbytes + 2_000_000}", str(disk))  # somebody makes room
        check_recorded(ranks, repair=True)


@fault("disk nearly full, with a floor", 1, 10)
def disk_floor(place: Path, rng: random.Random) -> None:
    nbytes = rng.randrange(16_000_000, 24_000_000)
    settings = {"min_free_bytes": 10_000_000, "shm_bytes": rng.choice([0, 4 << 20])}
    with (
        _small_disk(place / "disk", nbytes) as disk,
        Ranks(disk / "run", side=place, rows=256, settings=settings) as ranks,
    ):
        ranks.opened()
        wait_until(lambda: "tapscope stops capturing" in ranks.log(), "the floor is reached")
        ranks.end()
        assert shutil.disk_usage(disk).free > 0
        check_damaged(ranks, "a budget ended the capture: rank 0: min_free_bytes 10000000")
        with open_run(ranks.run) as run:
            assert run.problems == []
            assert run.ledger().lost == 0


@fault("files limited in size", 1, 10)
def files_limited(place: Path, rng: random.Random) -> None:
    limit = rng.randrange(300_000, 1_500_000)
    settings = {"segment_bytes": 100_000_000, "min_free_bytes": 0}
    with Ranks(place / "run", file_bytes=limit, settings=settings) as ranks:
        ranks.opened()
        wait_until(lambda: _says_lost(ranks), "the limit is reached")
        ranks.end()
        assert "File too large" in ranks.log()
        check_damaged(ranks, "recording ended before rank 0 did; what it captured later is not counted: ")


@fault("run directory removed", 1, 20)
def directory_removed(place: Path, rng: random.Random) -> None:
    settings = {"keep": rng.choice(["full", "stats"]), "shm_bytes": rng.choice([0, 4 << 20])}
    with Ranks(place / "run", settings=settings) as ranks:
        ranks.opened().acked(rng.randrange(1, 20))
        ranks.find_recorder()
        for _ in range(2):  # the second time what was made meanwhile
            shutil.rmtree(ranks.run, ignore_errors=True)
        wait_until(lambda: _says_lost(ranks), "the rank knows that nothing is recorded any more")
        ranks.end()
        assert ranks.lost is not None


@fault("run directory renamed", 1, 20)
def directory_renamed(place: Path, rng: random.Random) -> None:
    keep = rng.choice(["full", "stats"])
    with Ranks(place / "run", settings={"keep": keep, "segment_bytes": 200_000}) as ranks:
        ranks.opened().acked(rng.randrange(1, 20))
        ranks.find_recorder()
        ranks.run = ranks.run.rename(place / "moved")
        if keep == "full":  # there can be no further segment
            wait_until(lambda: _says_lost(ranks), "the rank knows that nothing is recorded any more")
        ranks.end()
        if keep == "full":
            assert ranks.lost is not None
            check_damaged(ranks, "recording ended before rank 0 did; what it captured later is not counted: ")
        else:  # its files are open: all of it goes to the new place
            assert verify(ranks.run)[0] == 0


@fault("run directory made read-only", 1, 10)
def directory_read_only(place: Path, rng: random.Random) -> None:
    settings = {"segment_bytes": 200_000, "shm_bytes": rng.choice([0, 4 << 20])}
    with Ranks(place / "run", settings=settings) as ranks:
        ranks.opened().acked(rng.randrange(1, 20))
        folder = str(ranks.run / "rank-00000")
        if os.geteuid() == 0:  # whom modes do not stop
            (view := place / "view").mkdir()  # made read-only elsewhere: where it is used, a file may be open just now
            if not (
                _mount("--bind", folder, str(view))
                and _mount("-o", "remount,ro,bind", str(view))
                and _mount("--bind", str(view), folder)
            ):
                raise CannotTry("needs the right to mount")
        else:
            os.chmod(folder, 0o555)
        try:
            wait_until(lambda: _says_lost(ranks), "the rank knows that nothing can be written")
            ranks.end()
        finally:
            if os.geteuid() == 0:
                subprocess.run(["umount", "--lazy", folder, str(view)], check=True)
            else:
                os.chmod(folder, 0o755)
        check_damaged(ranks, "recording ended before rank 0 did; what it captured later is not counted: ")


@fault("slow disk", 1, 5)
def slow_disk(place: Path, rng: random.Random) -> None:
    settings = {"fsync": "batch", "queue_bytes": 200_000, "segment_bytes": 100_000, "block_timeout_s": 20.0}
    with Ranks(place / "run", 2, max_steps=80, pause_s=0.0, settings=settings) as ranks:
        ranks.opened().finished().end()
        check_whole(ranks)
