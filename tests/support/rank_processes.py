"""Capture by several processes, the ranks of a job with a file rendezvous; contains no tests."""

import os
import subprocess
from pathlib import Path

import forkserver_pool as warm


def capture_by_ranks(folder: Path, worker: str, how: str, world: int, *, bug: str = "") -> Path:
    """Return the run that ``world`` processes of the program ``worker`` record.

    Each process is called with: how, run, rendezvous file, bug.
    """
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
