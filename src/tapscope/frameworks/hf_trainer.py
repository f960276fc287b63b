"""TapscopeCallback: records each update of a transformers Trainer as one step of a run."""

import contextlib
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tapscope.dumper.dumper import Dumper


class TapscopeCallback(TrainerCallback):  # type: ignore[misc]
    """Captures the training of a :class:`transformers.Trainer`.

    ::

        trainer.add_callback(TapscopeCallback("run", keep="stats", grads=True, params=True))

    A step covers forward, backward and optimizer of one update; with gradient accumulation, each forward is a
    microbatch. Parameters are recorded after the update, gradients as used by the optimizer. A model call between two
    updates, e.g. for evaluation, is a separate step. ``settings`` are those of :class:`Dumper`.
    """

    def __init__(self, out: str | Path, *, force: bool = False, **settings: Any) -> None:
        self._out, self._force, self._settings = out, force, settings
        self.dumper: Dumper | None = None
        """The open dumper during training, otherwise None."""
        self._stack = contextlib.ExitStack()
        self._micro = contextlib.ExitStack()
        self._number = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Open the run; raises like :meth:`Dumper.open`."""
        self.on_train_end(args, state, control)  # close a previous training that raised
        self.dumper = Dumper(model, self._out, force=self._force, **self._settings).open()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a step for the next update."""
        if self.dumper is not None:
            self._end()
            self._stack.enter_context(self.dumper.step(phase="train"))
            self._begin_micro(0)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the next microbatch of a gradient accumulation."""
        if self.dumper is not None:
            self._begin_micro(self._number + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step of the update."""
        self._end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the run; with ``strict`` backpressure, raises RecorderError if any record was lost."""
        self._end()
        dumper, self.dumper = self.dumper, None
        if dumper is not None:
            dumper.close()

    def _begin_micro(self, number: int) -> None:
        assert self.dumper is not None
        self._micro.close()
        self._number = number
        self._micro.enter_context(self.dumper.micro(number))

    def _end(self) -> None:
        try:
            self._micro.close()
        finally:
            self._stack.close()
