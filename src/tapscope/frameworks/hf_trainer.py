"""TapscopeCallback: one step of a transformers Trainer is one step of a run."""

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
    microbatch. Values of the parameters are those after the update, gradients those that the optimizer used. A call of
    the model between two updates, as for evaluation, is a step of its own. ``settings`` are those of :class:`Dumper`.
    """

    def __init__(self, out: str | Path, *, force: bool = False, **settings: Any) -> None:
        self._out, self._force, self._settings = out, force, settings
        self.dumper: Dumper | None = None
        """Open while the training runs."""
        self._stack = contextlib.ExitStack()
        self._micro = contextlib.ExitStack()
        self._number = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Open the run; raises as :meth:`Dumper.open`."""
        self.on_train_end(args, state, control)  # of a training that raised
        self.dumper = Dumper(model, self._out, force=self._force, **self._settings).open()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An update begins."""
        if self.dumper is not None:
            self._end()
            self._stack.enter_context(self.dumper.step(phase="train"))
            self._begin_micro(0)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One forward and backward of several."""
        if self.dumper is not None:
            self._begin_micro(self._number + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The update is over."""
        self._end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the run; with ``strict`` backpressure, raises RecorderError when anything was lost."""
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
