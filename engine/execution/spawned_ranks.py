"""SpawnedRanks: rank 0's view of the processes of ranks 1 and up of one engine.

Rank 0 runs in the caller's process and schedules; the others execute the plans that rank 0 sends over ZMQ as JSON
(:mod:`tapscope.engine.execution.rank_worker`).
"""

import time
from typing import Any, NoReturn

from tapscope.core.errors import RankLostError
from tapscope.core.observe import ObserverFactory
from tapscope.core.wire import Message
from tapscope.engine.distributed.heartbeat import Heartbeat
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.distributed.worker_processes import FINAL_MESSAGE_S, POLL_MS, WorkerProcesses
from tapscope.engine.execution.num_processes import check_num_processes
from tapscope.engine.execution.rank_worker import rank_main
from tapscope.engine.execution.resolved_settings import resolve_device
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.requests.step_plan import StepPlan


class SpawnedRanks(WorkerProcesses):
    """Spawned ranks of one engine."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, observer: ObserverFactory | None, heartbeat: Heartbeat
    ) -> None:
        """``heartbeat`` is that of rank 0."""
        super().__init__()
        self._heartbeat = heartbeat
        self._config = config
        self._arguments = (config, model_config, observer, str(self.folder))
        self._answers: dict[int, str | None] = {}
        self.values: dict[int, Any] = {}
        """Each rank's answer to the last query."""

    def connect(self) -> TensorParallel:
        """Start the processes and connect rank 0 to them; raises ConfigError, RankLostError."""
        check_num_processes(self._config)
        device = resolve_device(self._config, 0)  # check first: a rank without a GPU would never join
        self.start(rank_main, self._arguments, self._config.tp - 1, "rank")
        self.watch(self._config.rank_timeout_s, self._heartbeat)
        self.wait_for_all("up")
        try:
            path, timeout_s = self.folder / "store", self._config.rank_timeout_s
            tp = TensorParallel.connect(
                path,
                0,
                self._config.tp,
                timeout_s,
                device,
                is_watched=True,
                custom_all_reduce=self._config.custom_all_reduce,
            )
        except RankLostError as error:
            self.raise_lost(error)
        tp.watch(self.sentinels)
        tp.heartbeat = self._heartbeat
        return tp

    def send(self, plan: StepPlan) -> None:
        """Send ``plan`` to every rank; raises RankLostError if a rank has ended."""
        self.check()
        self.broadcast(plan.to_message())

    def ask(self, message: Message) -> None:
        """Send a command to every rank; :meth:`answers` returns the results."""
        self.check()
        self._answers.clear()
        self.broadcast(message)

    def answers(self) -> dict[int, str | None]:
        """Wait for all ranks and return the error of each, None for success; raises RankLostError."""
        while len(self._answers) < self._config.tp - 1:
            self._receive(POLL_MS)
            self._heartbeat.beat()  # waiting for watched ranks is progress
            self.check()
        return dict(self._answers)

    def raise_lost(self, error: RankLostError | None) -> NoReturn:
        """Raise a RankLostError that names the rank that failed first, with its traceback if it sent one.

        Ranks that lose a peer fail as well; they are named only if no other cause is found.
        """
        deadline = time.monotonic() + FINAL_MESSAGE_S
        while not self._own_failures() and not self._ended_silently() and time.monotonic() < deadline:
            self._receive(POLL_MS)
        if not self._own_failures():
            self._receive(2 * POLL_MS)  # the last message of a rank that ended may still arrive
        self._raise(error)

    def _on_message(self, number: int, message: Message) -> None:
        if message.kind == "done":
            self._answers[number], self.values[number] = message["error"], message["value"]

    def _own_failures(self) -> dict[int, str]:
        """Return the tracebacks of ranks that failed for a reason other than a lost peer."""
        return {rank: text for rank, text in self._tracebacks().items() if "RankLostError" not in text}

    def _tracebacks(self) -> dict[int, str]:
        return {rank: str(message["traceback"]) for rank, message in self._failures.items()}

    def _raise(self, cause: RankLostError | None) -> NoReturn:
        failures = self._own_failures() or ({} if self._ended_silently() else self._tracebacks())
        if failures:
            rank = min(failures)
            raise RankLostError(f"rank {rank} of {self._config.tp} failed:\n{failures[rank].rstrip()}") from cause
        if silent := self._ended_silently():
            raise RankLostError(f"rank {silent[0]} of {self._config.tp} {self._describe_end(silent[0])}") from cause
        raise cause or RankLostError("a rank was lost")
