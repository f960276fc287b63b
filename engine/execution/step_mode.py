"""StepMode: how a step may run, given its observer and hooks."""

from enum import StrEnum

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from tapscope.core.observe import StepObserver


class StepMode(StrEnum):
    """Execution mode, chosen for each step after the observer has applied the plan's epoch."""

    CLEAN = "clean"
    """The step is not observed: a captured graph without taps may run."""
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
        self._bare_since = -1  # the process's next hook id when no module had hooks

    def has_foreign(self, tap_state: str = "") -> bool:
        """Return whether any hook, on a module or global, is not an observer's; only a call of the module runs it.

        An observer's hooks have the attribute ``tapscope_tap``. Hooks are checked again if a hook was registered in
        this process, if ``tap_state`` has changed, or if the last check found a foreign hook.
        """
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return True
        seen = tap_state, RemovableHandle.next_id
        if seen != self._seen or self._has_foreign:
            self._seen = seen
            hooks = (hook for hooks in self._hooks for hook in hooks.values())
            self._has_foreign = not all(hasattr(hook, "tapscope_tap") for hook in hooks)
        return self._has_foreign

    def choose(self, observer: StepObserver | None) -> StepMode:
        """Return the mode of a step now.

        An armed observer's step is TAPPED even with other hooks, which :meth:`has_foreign` detects.
        """
        if observer is not None and observer.armed:
            return StepMode.TAPPED
        global_hooks = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
        if global_hooks:
            return StepMode.EAGER
        if self._bare_since != RemovableHandle.next_id:  # hooks were registered since the last check without hooks
            if any(self._hooks):
                return StepMode.EAGER
            self._bare_since = RemovableHandle.next_id
        return StepMode.CLEAN
