"""Job: the ranks of one engine as a whole. They load, compute and end together, and one that is lost loses all."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tapscope.core.errors import RankLostError, TapscopeError, UsageError
from tapscope.core.observe import ObserverFactory
from tapscope.core.wire import Message
from tapscope.engine.distributed.heartbeat import Pulse
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution.model_runner import Launched, Runner
from tapscope.engine.execution.rank_worker import DEEDS
from tapscope.engine.execution.spawned_ranks import Ranks
from tapscope.engine.execution.torchrun_ranks import ExternalRanks, obey_if_launched
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.requests.step_plan import StepPlan
from tapscope.engine.sampling.sampled_step import SampledStep


class Job:
    """Rank 0's runner, which is this process's, and the other ranks."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, observer: ObserverFactory | None, pulse: Pulse
    ) -> None:
        """Load on every rank; ``pulse`` is this process's. Raises ConfigError, CheckpointError, RankLostError."""
        self._lost: RankLostError | None = None
        self._ranks: Ranks | None = None
        num_threads = torch.get_num_threads()
        if config.dp > 1:  # replicas share the cores
            torch.set_num_threads(max(1, num_threads // config.dp))
        if config.launch == "external":
            obey_if_launched(config, model_config, observer)
        if config.tp == 1:
            alone = TensorParallel()
            alone.pulse = pulse
            self.runner = Runner(config, model_config, alone, observer)
        else:
            self._ranks, self.runner = _start(config, model_config, observer, pulse)
        threads_before = num_threads if config.tp > 1 or config.dp > 1 else None
        # Also runs when the engine is dropped, or the program ends, without close().
        self._finalizer = weakref.finalize(self, _close, self.runner, self._ranks, threads_before)

    @property
    def pids(self) -> dict[int, int | None]:
        """Process ids of ranks 1 and up."""
        return self._ranks.pids if self._ranks is not None else {}

    @property
    def sentinels(self) -> list[int]:
        """Descriptors that become readable when a rank has ended."""
        return self._ranks.sentinels if self._ranks is not None else []

    def require_usable(self) -> None:
        """Raise RankLostError once a rank was lost, UsageError once it is closed."""
        if self._lost is not None:
            raise RankLostError(f"the engine stopped: {self._lost}") from self._lost
        if not self._finalizer.alive:
            raise UsageError("the engine is closed; make a new LLM")

    def check(self) -> None:
        """Raise RankLostError, from now on always, when a rank has failed or ended."""
        if self._ranks is None or self._lost is not None:
            return
        try:
            self._ranks.check()
        except RankLostError as error:
            self._leave(error)
            raise

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine, this one included."""
        return self.runner.model.tp.size

    def launch(self, plan: StepPlan, sampled: SampledStep) -> Launched:
        """Have every rank start ``plan``; a step that fails on one of several ranks leaves them out of step."""
        if self._ranks is None:
            return self.runner.launch(plan, sampled)
        with self._together(plan):
            self._ranks.send(plan)
            return self.runner.launch(plan, sampled)

    def land(self, launched: Launched) -> list[int]:
        """Wait for a step that was started: one token per share that samples."""
        if self._ranks is None:
            return self.runner.land(launched)
        with self._together(launched.plan):
            return self.runner.land(launched)

    @contextmanager
    def _together(self, plan: StepPlan) -> Iterator[None]:
        try:
            try:
                yield
            except RankLostError as error:
                assert self._ranks is not None
                self._ranks.explain(error)
        except BaseException as error:
            left = RankLostError(f"rank 0 left step {plan.step} by {error!r}")
            self._leave(error if isinstance(error, RankLostError) else left)
            raise

    def do(self, message: Message, error: type[TapscopeError]) -> None:
        """Have all ranks at once do what ``message`` says (of DEEDS), between two steps; raises ``error``."""
        if self._ranks is not None:
            self._ranks.ask(message)
        problems = {0: DEEDS[message.kind](self.runner, message)}
        if self._ranks is not None:
            problems |= self._ranks.answers()
        _raise_first(problems, error)

    def lead(self, message: Message, error: type[TapscopeError]) -> None:
        """As :meth:`do`, but this rank goes first, and the others are not asked when it cannot."""
        _raise_first({0: DEEDS[message.kind](self.runner, message)}, error)
        if self._ranks is not None:
            self._ranks.ask(message)
            _raise_first(self._ranks.answers(), error)

    def give_up(self, error: RankLostError) -> RankLostError:
        """Nothing can be computed any more, because of ``error``."""
        self._leave(error)
        return error

    def close(self) -> None:
        """Close the observers and end the other ranks; safe to call twice."""
        self._finalizer()

    def _leave(self, error: RankLostError) -> None:
        """The ranks are out of step, or gone."""
        if self._ranks is not None:
            self._ranks.abandon()
            self.runner.model.tp.disconnect()
        self._lost = error


def _raise_first(problems: dict[int, str | None], error: type[TapscopeError]) -> None:
    """Raise ``error`` with what the first rank says that could not."""
    for rank, problem in sorted(problems.items()):
        if problem is not None:
            raise error(problem if rank == 0 else f"rank {rank}: {problem}")


def _start(
    config: EngineConfig, model_config: ModelConfig, observer: ObserverFactory | None, pulse: Pulse
) -> tuple[Ranks, Runner]:
    """Spawn the other ranks and load on all of them at once."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # ranks share the cores: contended OpenMP threads cost more than they give
    make = ExternalRanks if config.launch == "external" else Ranks
    ranks = make(config, model_config, observer, pulse)
    try:
        runner = Runner(config, model_config, ranks.connect(), observer)
        ranks.await_all("ready")
    except BaseException:
        torch.set_num_threads(num_threads)
        ranks.abandon()
        ranks.close()
        raise
    return ranks, runner


def _close(runner: Runner, ranks: Ranks | None, num_threads: int | None) -> None:
    try:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        if ranks is not None:
            ranks.dismiss()  # observers of all ranks close at the same time: they may share a recorder
        runner.close()
    finally:
        if ranks is not None:
            ranks.close()
