"""Gradient hooks: tensor hooks that capture the gradient of a value if the rules select the gradient.

A gradient is recorded under the step, microbatch and occurrence of its forward, with the pass ``backward``. The time
and thread in which autograd computes the gradient do not matter. Further gradients of the same value
(``retain_graph``, several losses) get the next free occurrence of the site. A leaf tensor used by several forwards (for
example a soft prompt) has one accumulated gradient, recorded under the last forward.

A module may overwrite its input in place (masked scores). If the input is a view, autograd connects later operations
to the view's base, and a hook on the view never fires. Its gradient is then read as a slice of the base's gradient.
"""

import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tapscope.dumper.capture.capturer import Capturer
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.retention.step_counters import StepCounters
from tapscope.run_format.record import BACKWARD

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from tapscope.dumper.records.site_port import SitePort
    from tapscope.dumper.steps.open_step import OpenStep
    from tapscope.dumper.taps.taps import Tap


_MAX_WRITES = 64
"""Maximum in-place operations on one input in one call to walk back through when searching for the first one."""


class GradientHooks:
    """Hooks for the gradients that one rank still expects."""

    def __init__(self, capturer: Capturer, counters: StepCounters) -> None:
        """Record gradients with ``capturer``, which is held weakly because hooks may outlive it."""
        self._capturer = weakref.ref(capturer)
        self._counters = counters
        self._run = 0
        self._pid = os.getpid()
        self._leaves: Any = WeakIdKeyDictionary()  # leaf -> {site: hook}; hooks on other tensors die with the graph
        self._views: dict[tuple[str, str], list[_View]] = {}  # (model, path) -> view inputs of calls in progress

    def watch(
        self, port: "SitePort", tensor: torch.Tensor, firing: Firing, *, claim: bool = True, is_input: bool = False
    ) -> None:
        """Register a hook that captures the gradient of ``tensor`` at ``port`` (a ``.grad`` port); never raises.

        Does nothing if ``tensor`` requires no gradient or autograd is off. With ``claim=False`` (a recomputation) the
        occurrence is assigned only when the gradient arrives, because it may never arrive. A recomputation that
        receives the same tensor object as its forward (input of a non-reentrant checkpoint) adds no second hook. For
        an input, the gradient is that of its value before the call, see :meth:`returned`.
        """
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return
        if not claim and self._has_hook(tensor, port):
            return
        try:
            hook = _Hook(self, self._run, port, firing)
            if claim:
                hook.claim()
            if tensor.is_leaf:
                self._watch_leaf(tensor, hook)
            else:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
                if is_input and tensor._is_view() and tensor._base is not None:
                    self._views.setdefault(_module_of(port), []).append(_View(tensor, tensor._base, hook))
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._counters.fail(firing.step, port.site, error)

    def returned(self, tap: "Tap") -> None:
        """Handle the return of the module of ``tap``: follow inputs that it overwrote in place; never raises."""
        for view in self._views.pop((tap.model, tap.site_path), ()):
            try:
                view.follow()
            except Exception as error:  # noqa: BLE001 - the model must go on
                self.failed(view.hook, error)

    def end_step(self) -> None:
        """Drop the view inputs of calls that did not return."""
        self._views.clear()

    def forget(self) -> None:
        """Disable all remaining hooks, because the run has ended."""
        self._run += 1
        for hooks in list(self._leaves.values()):
            for hook in hooks.values():
                hook.remove()
        self._leaves.clear()
        self._views.clear()

    def record(self, hook: "_Hook", gradient: torch.Tensor) -> None:
        """Capture the gradient that ``hook`` received, unless the run has changed or the process was forked."""
        capturer = self._capturer()
        if capturer is None or hook.run != self._run or os.getpid() != self._pid:
            return
        capturer.capture(hook.port, gradient, hook.next_firing())

    def failed(self, hook: "_Hook", error: Exception) -> None:
        """Count the gradient of ``hook`` as failed with ``error``."""
        self._counters.fail(hook.step, hook.port.site, error)

    def _has_hook(self, tensor: torch.Tensor, port: "SitePort") -> bool:
        """Return whether a hook of the forward is already registered on this tensor object for ``port``."""
        hooks = tensor._backward_hooks or {}
        return any(type(each) is _Hook and each.port is port and each.run == self._run for each in hooks.values())

    def _watch_leaf(self, leaf: torch.Tensor, hook: "_Hook") -> None:
        """Register ``hook`` on a leaf tensor and remove the hook of an earlier forward, as a leaf outlives its step."""
        hooks = self._leaves.setdefault(leaf, {})
        before = hooks.get(hook.port.site)
        if before is not None:
            before.remove()
        hook.handle = leaf.register_hook(hook)  # type: ignore[no-untyped-call]
        hooks[hook.port.site] = hook


class _Hook:
    """Hook on one tensor. Does not keep the model or the collector alive; does nothing in a copy of the tensor."""

    __slots__ = ("_firing", "_is_claimed", "_num_fired", "_owner", "handle", "port", "run")

    def __init__(self, owner: GradientHooks, run: int, port: "SitePort", firing: Firing) -> None:
        self._owner = weakref.ref(owner)
        self._firing = firing._replace(pass_=BACKWARD)
        self._is_claimed = False
        self._num_fired = 0
        self.run = run
        self.port = port
        self.handle: RemovableHandle | None = None

    def __call__(self, gradient: torch.Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.record(self, gradient)

    def fail(self, error: Exception) -> None:
        """Report that the gradient arrived but cannot be read."""
        owner = self._owner()
        if owner is not None:
            owner.failed(self, error)

    def claim(self) -> None:
        """Assign the occurrence: that of the forward if it is free, otherwise the next free one."""
        firing = self._firing
        number = firing.step.claim_occurrence(self._occurrence_key, firing.occurrence)
        self._firing = firing._replace(occurrence=number)
        self._is_claimed = True

    @property
    def step(self) -> "OpenStep":
        """The step of the tensor's forward."""
        return self._firing.step

    @property
    def _occurrence_key(self) -> tuple[str, str, int, str]:
        return self.port.model, self.port.site, self._firing.micro, BACKWARD

    def next_firing(self) -> Firing:
        """Return the firing for the gradient that just arrived; repeated gradients get further occurrences."""
        self._num_fired += 1
        firing = self._firing
        if not self._is_claimed:
            self.claim()
        elif self._num_fired > 1:
            return firing._replace(occurrence=firing.step.claim_occurrence(self._occurrence_key))
        return self._firing

    def remove(self) -> None:
        """Unregister the hook from its tensor."""
        if self.handle is not None:
            self.handle.remove()

    def __deepcopy__(self, dedup: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_nothing, ()


class _View:
    """A module input that is a view of ``base``, tracked while the module runs.

    If the module overwrites the input in place, this object becomes a hook on the first autograd node that consumed
    the base's old value. That node computes the gradient of the old base, and the input's gradient is a strided slice
    of it. Uses of the input before the overwrite do not contribute there; the hook on the tensor captures those.
    """

    def __init__(self, tensor: torch.Tensor, base: torch.Tensor, hook: _Hook) -> None:
        self.hook = hook
        self._tensor = weakref.ref(tensor)
        self._version = tensor._version
        self._node = base.grad_fn
        self._operand = 0
        self._base_place = base.shape, base.stride()
        self._place = tensor.shape, tensor.stride(), tensor.storage_offset() - base.storage_offset()

    def follow(self) -> None:
        """Register a node hook for the base's gradient, if the input was overwritten in place since construction."""
        tensor, old, self._node = self._tensor(), self._node, None
        if tensor is None or tensor._version == self._version or tensor._base is None or old is None:
            return
        node, num_writes = tensor._base.grad_fn, 0
        while node is not None and node is not old and num_writes < _MAX_WRITES:
            operands = [each for each, _ in node.next_functions]
            if old in operands:
                self._operand = operands.index(old)
                node.register_hook(self)
                return
            node, num_writes = operands[0] if operands else None, num_writes + 1  # operand 0 is the overwritten tensor

    def __call__(self, gradients: Sequence[torch.Tensor | None], _: object) -> None:
        whole = gradients[self._operand]
        if whole is None:
            return
        try:
            if (whole.shape, whole.stride()) != self._base_place:
                whole = torch.empty_strided(*self._base_place, dtype=whole.dtype, device=whole.device).copy_(whole)
            part = whole.as_strided(*self._place)
        except Exception as error:  # noqa: BLE001 - the backward pass must go on
            self.hook.fail(error)
        else:
            self.hook(part)


def _module_of(port: "SitePort") -> tuple[str, str]:
    """Return (model, path) of the module that the port belongs to."""
    return port.model, port.site.rpartition(":")[0]


def _nothing(gradient: torch.Tensor) -> None:
    """Do nothing; replaces a hook in a copy of its tensor."""


def _get_nothing() -> Any:
    return _nothing
