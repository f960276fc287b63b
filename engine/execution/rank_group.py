"""RankGroup: all ranks of one engine, which load, compute and end together; losing one rank loses the group."""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tapscope.core.errors import RankLostError, TapscopeError, UsageError
from tapscope.core.observe import ObserverFactory
from tapscope.core.wire import Message
from tapscope.engine.distributed.heartbeat import Heartbeat
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution.draft_runner import DraftRunner, load_runners
from tapscope.engine.execution.launched_step import LaunchedStep
from tapscope.engine.execution.model_runner import ModelRunner
from tapscope.engine.execution.num_processes import shared_cores
from tapscope.engine.execution.rank_worker import COMMANDS, answer_of
from tapscope.engine.execution.resolved_settings import resolve_device
from tapscope.engine.execution.spawned_ranks import SpawnedRanks
from tapscope.engine.execution.torchrun_ranks import TorchrunRanks, run_worker_rank
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.requests.step_plan import StepPlan

_log = logging.getLogger(__name__)


class RankGroup:
    """Model runner of rank 0, in this process, and the processes of the other ranks."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, observer: ObserverFactory | None, heartbeat: Heartbeat
    ) -> None:
        """Load the model on every rank; ``heartbeat`` is that of this process.

        Raises ConfigError, CheckpointError, RankLostError.
        """
        self._lost: RankLostError | None = None
        self._ranks: SpawnedRanks | None = None
        num_threads = torch.get_num_threads()
        if config.dp_rank == 0:
            _warn(config)
        if config.dp > 1:  # replicas share the cores
            torch.set_num_threads(max(1, num_threads // config.dp))
        if config.launch == "external":
            run_worker_rank(config, model_config, observer)
        if config.tp == 1:
            alone = TensorParallel()
            alone.heartbeat = heartbeat
            self.runner, self.draft_runner = load_runners(config, model_config, alone, observer)
        else:
            self._ranks, self.runner, self.draft_runner = _start(config, model_config, observer, heartbeat)
        threads_before = num_threads if config.tp > 1 or config.dp > 1 else None
        # Also runs when the engine is garbage-collected or the program ends without close().
        runners = [self.runner, *([] if self.draft_runner is None else [self.draft_runner])]
        self._finalizer = weakref.finalize(self, _close, runners, self._ranks, threads_before)

    @property
    def pids(self) -> dict[int, int | None]:
        """Process ids of ranks 1 and up."""
        return self._ranks.pids if self._ranks is not None else {}

    @property
    def sentinels(self) -> list[int]:
        """File descriptors that become readable when a rank has ended."""
        return self._ranks.sentinels if self._ranks is not None else []

    def require_usable(self) -> None:
        """Raise RankLostError once a rank is lost, UsageError once the engine is closed."""
        if self._lost is not None:
            raise RankLostError(f"the engine stopped: {self._lost}") from self._lost
        if not self._finalizer.alive:
            raise UsageError("the engine is closed; create a new LLM")

    def check(self) -> None:
        """Raise RankLostError if a rank has failed or ended; the group is unusable from then on."""
        if self._ranks is None or self._lost is not None:
            return
        try:
            self._ranks.check()
        except RankLostError as error:
            self._abandon(error)
            raise

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the engine, this one included."""
        return self.runner.model.tp.size

    def launch(self, plan: StepPlan, sample: Callable[[Tensor], Tensor]) -> LaunchedStep:
        """Launch ``plan`` on every rank; a step that fails on one of several ranks loses the group.

        ``sample`` maps logits to tokens, see :meth:`ModelRunner.launch`.
        """
        if self._ranks is None:
            return self._runner_of(plan).launch(plan, sample)
        with self._in_step(plan):
            self._ranks.send(plan)
            return self._runner_of(plan).launch(plan, sample)

    def collect(self, launched: LaunchedStep) -> list[int]:
        """Wait for a launched step and return one token per scheduled request that samples."""
        runner = self._runner_of(launched.plan)
        if self._ranks is None:
            return runner.collect(launched)
        with self._in_step(launched.plan):
            return runner.collect(launched)

    def _runner_of(self, plan: StepPlan) -> ModelRunner:
        return self.runner if self.draft_runner is None or plan.model != "draft" else self.draft_runner

    @contextmanager
    def _in_step(self, plan: StepPlan) -> Iterator[None]:
        try:
            try:
                yield
            except RankLostError as error:
                assert self._ranks is not None
                self._ranks.raise_lost(error)
        except BaseException as error:
            left = RankLostError(f"rank 0 failed in step {plan.step}: {error!r}")
            self._abandon(error if isinstance(error, RankLostError) else left)
            raise

    def run_command(self, message: Message, error: type[TapscopeError]) -> None:
        """Execute a command of :data:`.COMMANDS` on all ranks in parallel, between two steps; raises ``error``."""
        if self._ranks is not None:
            self._ranks.ask(message)
        problems = {0: COMMANDS[message.kind](self.runner, message)}
        if self._ranks is not None:
            problems |= self._ranks.answers()
        _raise_first(problems, error)

    def query(self, message: Message) -> list[Any]:
        """Return each rank's answer to a query of :data:`.QUERIES`, in rank order; raises UsageError."""
        if self._ranks is not None:
            self._ranks.ask(message)
        problem, value = answer_of(self.runner, message)
        problems, values = {0: problem}, {0: value}
        if self._ranks is not None:
            problems |= self._ranks.answers()
            values |= self._ranks.values
        _raise_first(problems, UsageError)
        return [values[rank] for rank in sorted(values)]

    def run_command_rank_0_first(self, message: Message, error: type[TapscopeError]) -> None:
        """Run :meth:`run_command` on this rank first; if it fails, the other ranks do not execute the command."""
        _raise_first({0: COMMANDS[message.kind](self.runner, message)}, error)
        if self._ranks is not None:
            self._ranks.ask(message)
            _raise_first(self._ranks.answers(), error)

    def mark_lost(self, error: RankLostError) -> RankLostError:
        """Mark the group as unusable because of ``error``, and return ``error``."""
        self._abandon(error)
        return error

    def close(self) -> None:
        """Close the observers and end the other ranks; safe to call twice."""
        self._finalizer()

    def _abandon(self, error: RankLostError) -> None:
        """Disconnect from the other ranks, which are out of step or lost, because of ``error``."""
        if self._ranks is not None:
            self._ranks.abandon()
            self.runner.model.tp.disconnect()
        self._lost = error


def _warn(config: EngineConfig) -> None:
    """Log settings that have no effect, or that make an engine on the CPU slow."""
    if config.custom_all_reduce and config.tp == 1:
        _log.warning("custom_all_reduce has no effect with tp=1: there is nothing to reduce")
    if config.dp * config.tp > 1 and resolve_device(config, 0).type == "cpu" and (sentence := shared_cores(config)):
        _log.warning("%s", sentence)


def _raise_first(problems: dict[int, str | None], error: type[TapscopeError]) -> None:
    """Raise ``error`` with the problem of the lowest rank that has one."""
    for rank, problem in sorted(problems.items()):
        if problem is not None:
            raise error(problem if rank == 0 else f"rank {rank}: {problem}")


def _start(
    config: EngineConfig, model_config: ModelConfig, observer: ObserverFactory | None, heartbeat: Heartbeat
) -> tuple[SpawnedRanks, ModelRunner, DraftRunner | None]:
    """Spawn the other ranks and load the model on all ranks in parallel."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # ranks share the cores: oversubscribed OpenMP threads make them slower
    make = TorchrunRanks if config.launch == "external" else SpawnedRanks
    ranks, tp = make(config, model_config, observer, heartbeat), None
    try:
        try:
            tp = ranks.connect()
            runner, draft_runner = load_runners(config, model_config, tp, observer)
            ranks.wait_for_all("ready")
        except RankLostError as error:
            ranks.raise_lost(error)
    except BaseException:
        torch.set_num_threads(num_threads)
        ranks.abandon()
        if tp is not None:
            tp.disconnect()  # also destroys CUDA graphs, which the error's traceback refers to
        ranks.close()
        raise
    return ranks, runner, draft_runner


def _close(runners: Sequence[ModelRunner], ranks: SpawnedRanks | None, num_threads: int | None) -> None:
    try:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        if ranks is not None:
            ranks.request_close()  # observers of all ranks close at the same time: they may share a recorder
        for runner in runners:
            runner.close()
    finally:
        if ranks is not None:
            ranks.close()
