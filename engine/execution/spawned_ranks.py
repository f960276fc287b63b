"""Ranks: the processes of ranks 1 and up of one engine, as rank 0 sees them.

Rank 0 lives in the caller's process and decides; the others obey plans that arrive over ZMQ as JSON (obey.py).
"""

import time
from typing import NoReturn

from tapscope.core.errors import RankLostError
from tapscope.core.observe import ObserverFactory
from tapscope.core.wire import Message
from tapscope.engine.distributed.heartbeat import Pulse
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution.rank_worker import rank_main
from tapscope.engine.execution.resolved_settings import device_of
from tapscope.engine.execution.worker_processes import LAST_WORDS_S, POLL_MS, Workers
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.requests.step_plan import StepPlan


class Ranks(Workers):
    """The spawned ranks of one engine."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, observer: ObserverFactory | None, pulse: Pulse
    ) -> None:
        """``pulse`` is rank 0's."""
        super().__init__()
        self._pulse = pulse
        self._config = config
        self._arguments = (config, model_config, observer, str(self.folder))
        self._answers: dict[int, str | None] = {}

    def connect(self) -> TensorParallel:
        """Start the processes and join rank 0 with them; raises ConfigError, RankLostError."""
        device = device_of(self._config, 0)  # before any process: a rank without a GPU would be waited for
        self.start(rank_main, self._arguments, self._config.tp - 1, "rank")
        self.watch(self._config.rank_timeout_s, self._pulse)
        self.await_all("up")
        try:
            path, timeout_s = self.folder / "store", self._config.rank_timeout_s
            tp = TensorParallel.connect(path, 0, self._config.tp, timeout_s, device, is_watched=True)
        except RankLostError as error:
            self.explain(error)
        tp.watch(self.sentinels)
        tp.pulse = self._pulse
        return tp

    def send(self, plan: StepPlan) -> None:
        """Have every rank compute ``plan``; raises RankLostError when one is dead."""
        self.check()
        self.tell(plan.to_message())

    def ask(self, message: Message) -> None:
        """Have every rank do what ``message`` says; :meth:`answers` has what came of it."""
        self.check()
        self._answers.clear()
        self.tell(message)

    def answers(self) -> dict[int, str | None]:
        """What went wrong on each rank, None where nothing did; waits for all of them, raises RankLostError."""
        while len(self._answers) < self._config.tp - 1:
            self._receive(POLL_MS)
            self._pulse.beat()  # who waits for ranks that are watched does not hang
            self.check()
        return dict(self._answers)

    def explain(self, error: RankLostError | None) -> NoReturn:
        """Raise the RankLostError that says which rank broke the collective, with its traceback if it sent one.

        Ranks whose peer vanished fail too; they are named only when no rank turns out to have begun it.
        """
        deadline = time.monotonic() + LAST_WORDS_S
        while not self._own_failures() and not self._silent() and time.monotonic() < deadline:
            self._receive(POLL_MS)
        if not self._own_failures():
            self._receive(2 * POLL_MS)  # a dead rank's last words may still be on their way
        self._raise(error)

    def _heard(self, number: int, message: Message) -> None:
        if message.kind == "done":
            self._answers[number] = message["error"]

    def _own_failures(self) -> dict[int, str]:
        """Tracebacks of the ranks that failed for a reason of their own."""
        return {rank: text for rank, text in self._tracebacks().items() if "RankLostError" not in text}

    def _tracebacks(self) -> dict[int, str]:
        return {rank: str(message["traceback"]) for rank, message in self._failures.items()}

    def _raise(self, cause: RankLostError | None) -> NoReturn:
        failures = self._own_failures() or ({} if self._silent() else self._tracebacks())
        if failures:
            rank = min(failures)
            raise RankLostError(f"rank {rank} of {self._config.tp} failed:\n{failures[rank].rstrip()}") from cause
        if silent := self._silent():
            raise RankLostError(f"rank {silent[0]} of {self._config.tp} {self._how_ended(silent[0])}") from cause
        raise cause or RankLostError("a rank was lost")
