"""StepMode: how a step may run, given who observes it."""

from enum import StrEnum

from torch import nn
from torch.nn.modules import module as torch_module

from tapscope.core.observe import StepObserver


class StepMode(StrEnum):
    """Chosen for each step, after the observer has applied the plan's epoch."""

    CLEAN = "clean"
    """Nothing observes the step: a captured graph without taps may run."""
    TAPPED = "tapped"
    """The observer is armed: a graph captured with its taps may run."""
    EAGER = "eager"
    """Modules have Python hooks other than the observer's: every module must be called."""


class StepModes:
    """Chooses the mode of each step of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._hooks = [
            hooks
            for module in model.modules()
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        ]
        self._seen: tuple[str, int] | None = None
        self._has_foreign = False

    def has_foreign(self, tap_state: str = "") -> bool:
        """Whether anyone but an observer has a hook on a module or on all: only the call of a module runs it.

        An observer's hooks have the attribute ``tapscope_tap``. They are looked at again when their number or
        ``tap_state`` has changed.
        """
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return True
        seen = tap_state, sum(map(len, self._hooks))
        if seen != self._seen:
            self._seen = seen
            hooks = (hook for hooks in self._hooks for hook in hooks.values())
            self._has_foreign = not all(hasattr(hook, "tapscope_tap") for hook in hooks)
        return self._has_foreign

    def choose(self, observer: StepObserver | None) -> StepMode:
        """The mode of a step now; an armed observer's hooks cannot be distinguished from other hooks."""
        if observer is not None and observer.armed:
            return StepMode.TAPPED
        global_hooks = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
        return StepMode.EAGER if global_hooks or any(self._hooks) else StepMode.CLEAN
