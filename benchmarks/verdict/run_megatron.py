"""Runs of Megatron-core over a workload, captured in full, on ranks that are reused across cases."""

import sys
from pathlib import Path
from typing import Any

from benchmarks.verdict.setup import Setup
from benchmarks.verdict.workload import requests
from tapscope.core.errors import ConfigError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Teams:
    """One group of ranks per tensor-parallel size, started on first use."""

    def __init__(self) -> None:
        self._teams: dict[int, Any] = {}

    def run(self, checkpoint: Path, setup: Setup, out: Path, case: Path | None) -> None:
        """Capture one run to ``out``; ``case`` is a file whose ``patch`` every rank calls with its model."""
        if setup.schedule != "whole" or setup.batch != "right":
            raise ConfigError("Megatron runs schedule='whole', batch='right' only")
        if setup.tp not in self._teams:
            self._teams[setup.tp] = _team(setup.tp).__enter__()
        from megatron_team import Job

        job = Job(
            checkpoint=str(checkpoint),
            out=str(out),
            prompts={r.name: r.tokens for r in requests(setup.workload, setup.seed, setup.order)},
            dtype=setup.dtype,
            backward=setup.train,
            sequence_parallel=setup.sequence_parallel,
            patch=None if case is None else f"{case}:patch",
        )
        try:
            self._teams[setup.tp].capture(job)
        except RuntimeError:
            self._teams.pop(setup.tp).__exit__()  # the ranks may be out of sync: the next case starts new ones
            raise

    def close(self) -> None:
        """Stop all ranks."""
        for team in self._teams.values():
            team.__exit__()
        self._teams.clear()


def _team(tp: int) -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    from megatron_team import Team

    return Team(tp)
