"""Capture by several processes, the ranks of a job that meet at a file; no test in here."""

import os
import subprocess
from pathlib import Path

import forkserver_pool as warm


def capture_by_ranks(folder: Path, worker: str, how: str, world: int, *, bug: str = "") -> Path:
    """The run that ``world`` processes make of the program ``worker``, called with: how, run, file to meet at, bug."""
    script, out = folder / "worker.py", folder / (how + bug)
    script.write_text(worker)
    ranks = [
        warm.start(
            *(script, how, out, folder / f"rendezvous-{out.name}", bug),
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    said = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, said
    return out
