"""Gradient hooks: hooks on tensors that capture the gradient of a value if the rules select it.

A gradient belongs to the step, microbatch and occurrence of its forward, with the pass ``backward``, whenever and in
whatever thread it comes. One that comes again for the same value (``retain_graph``, several losses) is numbered after
the occurrences that the site has by then. A leaf that goes through several forwards (a soft prompt, say) has one
gradient for all of them, which belongs to the last.

A module may overwrite its input in place (masked scores). If that is a view, autograd connects what follows to the
view's base, and a hook on the view never fires: its gradient is read as a part of the base's.
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
"""Operations in place on one input in one call, of which the first is looked for."""


class GradientHooks:
    """The gradients that one rank waits for."""

    def __init__(self, capturer: Capturer, counters: StepCounters) -> None:
        """``capturer`` records them; it is held weakly, because hooks may outlive it."""
        self._capturer = weakref.ref(capturer)
        self._counters = counters
        self._run = 0
        self._pid = os.getpid()
        self._leaves: Any = WeakIdKeyDictionary()  # leaf -> {port: its hook}; on other tensors hooks die with the graph
        self._views: dict[tuple[str, str], list[_View]] = {}  # (model, path) -> inputs of a call that has not returned

    def watch(
        self, port: "SitePort", tensor: torch.Tensor, firing: Firing, *, claim: bool = True, is_input: bool = False
    ) -> None:
        """Take the gradient of ``tensor`` at ``port`` (a ``.grad`` port) when it comes; never raises.

        Does nothing where there will be none: the tensor requires no gradient, or autograd is off. Without ``claim``
        the occurrence is settled only when the gradient comes: it may never. A recomputation that is handed the very
        tensor of its forward (a non-reentrant checkpoint's input) adds nothing: there is one gradient. The value of an
        input is that before the call, see :meth:`returned`.
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
        """The module of ``tap`` returned: watch the gradients of inputs that it overwrote; never raises."""
        for view in self._views.pop((tap.model, tap.site_path), ()):
            try:
                view.follow()
            except Exception as error:  # noqa: BLE001 - the model must go on
                self.failed(view.hook, error)

    def end_step(self) -> None:
        """Forget the inputs of calls that have not returned."""
        self._views.clear()

    def forget(self) -> None:
        """Hooks that are left do nothing from now on: a new run, or none."""
        self._run += 1
        for hooks in list(self._leaves.values()):
            for hook in hooks.values():
                hook.remove()
        self._leaves.clear()
        self._views.clear()

    def record(self, hook: "_Hook", gradient: torch.Tensor) -> None:
        """A hook fired."""
        capturer = self._capturer()
        if capturer is None or hook.run != self._run or os.getpid() != self._pid:
            return
        capturer.capture(hook.port, gradient, hook.next_firing())

    def failed(self, hook: "_Hook", error: Exception) -> None:
        """A gradient will be missing."""
        self._counters.fail(hook.step, hook.port.site, error)

    def _has_hook(self, tensor: torch.Tensor, port: "SitePort") -> bool:
        """Whether the forward waits for the gradient of this very tensor at that port."""
        hooks = tensor._backward_hooks or {}
        return any(type(each) is _Hook and each.port is port and each.run == self._run for each in hooks.values())

    def _watch_leaf(self, leaf: torch.Tensor, hook: "_Hook") -> None:
        """A leaf outlives the step: hooks of earlier forwards must not stay on it."""
        hooks = self._leaves.setdefault(leaf, {})
        before = hooks.get(hook.port.site)
        if before is not None:
            before.remove()
        hook.handle = leaf.register_hook(hook)  # type: ignore[no-untyped-call]
        hooks[hook.port.site] = hook


class _Hook:
    """Waits on one tensor; holds neither the model nor the collector, and becomes nothing in a copy of the tensor."""

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
        """The gradient came and cannot be read."""
        owner = self._owner()
        if owner is not None:
            owner.failed(self, error)

    def claim(self) -> None:
        """Settle the occurrence: the forward's, where no gradient has taken it."""
        firing = self._firing
        number = firing.step.claim_occurrence(self._occurrence_key, firing.occurrence)
        self._firing = firing._replace(occurrence=number)
        self._is_claimed = True

    @property
    def step(self) -> "OpenStep":
        """The step of its forward."""
        return self._firing.step

    @property
    def _occurrence_key(self) -> tuple[str, str, int, str]:
        return self.port.model, self.port.site, self._firing.micro, BACKWARD

    def next_firing(self) -> Firing:
        """The firing of the gradient that came now."""
        self._num_fired += 1
        firing = self._firing
        if not self._is_claimed:
            self.claim()
        elif self._num_fired > 1:
            return firing._replace(occurrence=firing.step.claim_occurrence(self._occurrence_key))
        return self._firing

    def remove(self) -> None:
        """Leave the tensor."""
        if self.handle is not None:
            self.handle.remove()

    def __deepcopy__(self, dedup: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_nothing, ()


class _View:
    """An input that is a view, while its module runs; ``base`` is what it is a view of.

    Once it was overwritten: a hook of the first node that was made from the base's old value. That node hands the
    gradient of the old value on, of which the input's is a part. Uses of the input before it was overwritten are not
    in it; the hook on the tensor has theirs.
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
        """Wait for the gradient of the base if the input was overwritten."""
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
            node, num_writes = operands[0] if operands else None, num_writes + 1  # what is overwritten comes first

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
    """(model, path) of the module whose input the gradient port belongs to."""
    return port.model, port.site.rpartition(":")[0]


def _nothing(gradient: torch.Tensor) -> None:
    """Replaces a hook in a copy of its tensor."""


def _get_nothing() -> Any:
    return _nothing
