"""Workers: run groups of generated cases in several processes and yield their outcomes in order."""

import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from benchmarks.verdict.generator.cases import Group, run_group
from benchmarks.verdict.generator.outcome import GeneratedOutcome
from benchmarks.verdict.run_megatron import Teams

_MEGATRON_GROUPS = 8
"""Megatron groups per task: starting its ranks costs more than a dozen cases."""


def run_groups(groups: Sequence[Group], jobs: int, keep: Path | None = None) -> Iterator[GeneratedOutcome]:
    """Yield outcomes in the order of the groups, each as soon as all earlier ones are complete."""
    tasks = _tasks(groups)
    if jobs == 1:
        found = (_run_task(task, keep) for task in tasks)
        yield from _in_order(groups, found)
        return
    with ProcessPoolExecutor(min(jobs, len(tasks)), multiprocessing.get_context("spawn"), _prepare) as pool:
        pending: set[Future[dict[int, list[GeneratedOutcome]]]] = {pool.submit(_run_task, task, keep) for task in tasks}
        yield from _in_order(groups, _completed(pending))


def _completed(
    pending: "set[Future[dict[int, list[GeneratedOutcome]]]]",
) -> Iterator[dict[int, list[GeneratedOutcome]]]:
    while pending:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        yield from (future.result() for future in done)


def _in_order(
    groups: Sequence[Group], found: Iterator[dict[int, list[GeneratedOutcome]]]
) -> Iterator[GeneratedOutcome]:
    waiting: dict[int, list[GeneratedOutcome]] = {}
    order = iter([group.number for group in groups])
    following = next(order, None)
    for outcomes in found:
        waiting |= outcomes
        while following in waiting:
            yield from waiting.pop(following)
            following = next(order, None)


def _tasks(groups: Sequence[Group]) -> list[list[Group]]:
    """Partition the groups into tasks, longest tasks first."""
    megatron = [group for group in groups if group.needs_megatron]
    parts = [megatron[i : i + _MEGATRON_GROUPS] for i in range(0, len(megatron), _MEGATRON_GROUPS)]
    return parts + [[group] for group in groups if not group.needs_megatron]


def _prepare() -> None:
    """Use one thread per worker, and suppress warnings of taps that never fired."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    logging.getLogger("tapscope").setLevel(logging.ERROR)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - gloo and transformers write there; open for the process's lifetime


def _run_task(task: Sequence[Group], keep: Path | None) -> dict[int, list[GeneratedOutcome]]:
    teams = Teams()
    try:
        return {group.number: run_group(group, teams, keep) for group in task}
    finally:
        teams.close()
