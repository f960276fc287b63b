"""Observers for the engine's tests; a separate module so that spawned ranks need not import transformers."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tapscope.core.observe import RankInfo, StepInfo


class Memory:
    """A StepObserver that stores everything it receives, and the root's logits of each step."""

    def __init__(self, model: torch.nn.Module, info: RankInfo) -> None:
        self.info = info
        self.epoch = 7
        self.armed = True
        self.steps: list[StepInfo] = []
        self.metrics: list[Mapping[str, float]] = []
        self.logits: list[Tensor] = []
        self.closed = 0
        model.register_forward_hook(lambda _, args, output: self.logits.append(output.logits))

    def before_step(self, info: StepInfo) -> None:
        assert len(self.steps) == len(self.metrics), "the step before was never ended"
        self.steps.append(info)

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self.metrics.append(metrics)

    def close(self) -> None:
        self.closed += 1

    def logits_of(self, request: str) -> Tensor:
        """Return the logits of a request, [positions, vocab] on the host, in order of position; needs logits="all"."""
        rows = [
            logits[run.slot : run.slot + run.count]
            for info, logits in zip(self.steps, self.logits, strict=True)
            for run in info.rows
            if run.request == request
        ]
        return torch.cat(rows).cpu()


class Journal(Memory):
    """Writes everything that this rank receives to FOLDER/rank-N, for another process to read."""

    folder: Path

    def before_step(self, info: StepInfo) -> None:
        super().before_step(info)
        with (self.folder / f"rank-{self.info.rank}").open("a") as file:
            file.write(f"{info.step} {info.epoch} {info.phase} {info.rows}\n")

    def close(self) -> None:
        super().close()
        (self.folder / f"closed-{self.info.rank}").touch()


class Exploding(Journal):
    """Raises at the end of its last step."""

    last_step: int

    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        if self.steps[-1].step == self.last_step:
            raise ValueError("the observer of this rank gave up")


class JournalIn:
    """A picklable factory of Journals; ``explode`` is a rank and the step at whose end it raises."""

    def __init__(self, folder: Path, explode: tuple[int, int] | None = None) -> None:
        self.folder = folder
        self.explode = explode

    def __call__(self, model: Any, info: RankInfo) -> Journal:
        journal = (Exploding if self.explode and info.rank == self.explode[0] else Journal)(model, info)
        journal.folder = self.folder
        journal.last_step = self.explode[1] if self.explode else -1
        return journal


def unmakeable_on_rank_1(model: Any, info: RankInfo) -> Memory:
    """A factory that fails in another process than the caller's."""
    if info.rank == 1:
        raise OSError("no room on rank 1")
    return Memory(model, info)


class Hanging(Memory):
    """Hangs at the beginning of its first step."""

    def before_step(self, info: StepInfo) -> None:
        threading.Event().wait()


class HangingOn:
    """A picklable factory in which the observer of one rank hangs."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, model: Any, info: RankInfo) -> Memory:
        return (Hanging if info.rank == self.rank else Memory)(model, info)
