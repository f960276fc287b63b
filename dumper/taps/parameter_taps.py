"""Parameter taps: capture of parameters, parameter gradients and buffers selected by the rules.

Parameters and buffers are captured at the end of a step. A gradient is captured as the optimizer will use it, after
accumulation, reduction and clipping: before each ``step()`` of a ``torch.optim.Optimizer`` that holds the parameter.
In a step that the host opened, a gradient that no optimizer used is captured at the end of the step (accumulation in
progress, or an optimizer of another kind). The gradient is ``main_grad`` if the parameter has one (Megatron). The pass
of a gradient is ``backward``; several uses in one step are numbered by occurrence.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.selection.selection import Selection
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.taps.module_tree import members
from tapscope.dumper.taps.taps import Tap, find_taps
from tapscope.run_format.record import BACKWARD, FORWARD

if TYPE_CHECKING:
    from tapscope.dumper.taps.collector import Collector


NO_GRADIENTS = (
    "no optimizer used gradients of parameters, and each call of the model was a step of its own, which ends before "
    "the backward; put forward and backward into one `with dumper.step():`"
)


class _Holder(NamedTuple):
    """A module that directly owns parameters or buffers that may be kept."""

    tap: Tap
    module: "weakref.ref[nn.Module]"
    kinds: frozenset[str]
    """Kinds that may be kept: a subset of ``param``, ``param.grad`` and ``buffer``."""


class ParameterTaps:
    """The captured parameters and buffers of a model under one configuration."""

    def __init__(self) -> None:
        self._holders: list[_Holder] = []
        self._kinds: dict[str, frozenset[str]] = {}  # key of the tap -> kinds of its holder
        self._selection = Selection.empty()
        self._collector: Any = lambda: None
        self._handle: RemovableHandle | None = None
        self._used_in = -1
        self._used: set[int] = set()  # ids of the parameters that an optimizer updated in that step
        self._awaits_gradients = False  # a step ended before its backward
        self._has_gradients = False

    def add(self, tap: Tap, module: nn.Module, selection: Selection) -> bool:
        """Register the parameters, gradients and buffers of ``module`` that ``selection`` may keep.

        Returns whether there are any.
        """
        self._selection = selection
        held = {"param": tap.params, "param.grad": tap.params, "buffer": tap.buffers}
        kinds = frozenset(kind for kind, names in held.items() if names and tap.may_keep(kind, selection))
        if kinds:
            self._holders.append(_Holder(tap, weakref.ref(module), kinds))
            self._kinds[tap.key] = kinds
        return bool(kinds)

    def watch(self, collector: "Collector") -> None:
        """Start capturing into ``collector``, which is held weakly."""
        self._collector = weakref.ref(collector)
        if any("param.grad" in holder.kinds for holder in self._holders):
            this = weakref.ref(self)

            def about_to_step(optimizer: Any, args: Any, kwargs: Any) -> None:
                if (taps := this()) is not None:
                    taps.before_optimizer(optimizer)

            self._handle = register_optimizer_step_pre_hook(about_to_step)

    def remove(self) -> None:
        """Stop capturing and forget all modules."""
        self._holders.clear()
        self._kinds.clear()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def end_step(self, step: OpenStep) -> None:
        """Capture parameters, buffers and gradients not used by an optimizer, just before ``step`` ends."""
        collector = self._collector()
        if collector is None or step.skipped or not self._holders:
            return
        used = self._used if self._used_in == step.serial else set()
        for holder, module in self._present():
            if "param" in holder.kinds:
                self._capture_all(collector, holder.tap, "param", module.named_parameters(recurse=False), step)
            if "buffer" in holder.kinds:
                self._capture_all(collector, holder.tap, "buffer", module.named_buffers(recurse=False), step)
            if "param.grad" in holder.kinds and step.by_host:
                self._capture_gradients(collector, holder.tap, module, step, without=used)
            self._awaits_gradients |= "param.grad" in holder.kinds and not step.by_host and torch.is_grad_enabled()

    def before_optimizer(self, optimizer: Any) -> None:
        """Capture the gradients that ``optimizer`` is about to use; never raises."""
        collector = self._collector()
        step = None if collector is None else collector.step or collector.last
        if collector is None or step is None or step.skipped:
            return
        try:
            if self._used_in != step.serial:
                self._used_in, self._used = step.serial, set()
            uses = {id(each) for group in optimizer.param_groups for each in group["params"]}
            for holder, module in self._present():
                if "param.grad" in holder.kinds:
                    self._capture_gradients(collector, holder.tap, module, step, only=uses)
            self._used |= uses
        except Exception as error:  # noqa: BLE001 - the training must go on
            collector.counters.fail(step, "gradients before the optimizer's step", error)

    def ports_of(self, tap: Tap) -> list[str]:
        """Return the ports of the parameters, gradients and buffers of ``tap`` that may be kept."""
        bases = [kind.partition(".") for kind in sorted(self._kinds.get(tap.key, ()))]
        return [f"{port}{dot}{grad}" for base, dot, grad in bases for port in tap.known_ports(base)]

    def missing_gradients(self) -> list[str]:
        """Return the sites of all selected gradients if every step ended before its backward; otherwise an empty list.

        That happens when each call of the model is its own step.
        """
        if not self._awaits_gradients or self._has_gradients:
            return []
        holders = [(holder.tap, module) for holder, module in self._present() if "param.grad" in holder.kinds]
        return [
            f"{tap.site_path}:param[{name}].grad"
            for tap, module in holders
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        ]

    def _present(self) -> Iterator[tuple[_Holder, nn.Module]]:
        for holder in self._holders:
            module = holder.module()
            if module is not None:
                yield holder, module

    def _capture_all(self, collector: "Collector", tap: Tap, kind: str, values: Iterable[Any], step: OpenStep) -> None:
        for name, value in values:
            tap.has_held = True
            port = tap.port(kind, name, self._selection)
            if port.may_keep:
                collector.capture_value(
                    port, value, Firing(step, step.claim_occurrence((port.model, port.site, 0, FORWARD)))
                )

    def _capture_gradients(
        self,
        collector: "Collector",
        tap: Tap,
        module: nn.Module,
        step: OpenStep,
        *,
        only: set[int] | None = None,
        without: Iterable[int] = (),
    ) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if (only is not None and id(parameter) not in only) or id(parameter) in without:
                continue
            gradient = gradient_of(parameter)
            port = tap.port("param", name, self._selection).grad
            if gradient is not None and port is not None:
                tap.has_held = self._has_gradients = True
                number = step.claim_occurrence((port.model, port.site, 0, BACKWARD))
                collector.capture_value(port, gradient, Firing(step, number, 0, BACKWARD))


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that the optimizer uses: ``main_grad`` if present (Megatron), otherwise ``grad``."""
    main = getattr(parameter, "main_grad", None)
    return main if isinstance(main, torch.Tensor) else parameter.grad


def capture_model(
    collector: "Collector",
    model: nn.Module,
    step: OpenStep,
    selection: Selection,
    *,
    prefix: str,
    micro: int,
    tags: Mapping[str, Any] | None,
    get_grad: Callable[[torch.Tensor], torch.Tensor | None],
) -> int:
    """Capture the parameters, gradients and buffers of ``model`` that ``selection`` keeps; returns their number.

    ``prefix`` is prepended to the module paths, with or without a trailing dot (``actor``, ``actor.``). A second call
    in one step records a second occurrence. Raises TypeError if ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"dump_model() takes a torch.nn.Module, not a {type(model).__name__}")
    num_captured = 0
    found_at = members(model)
    for tap in find_taps(model):
        module = found_at[tap.path].core
        tap.global_path = ".".join(part for part in (prefix.rstrip("."), tap.global_path) if part)
        values_of: list[tuple[str, str, torch.Tensor]] = []
        values_of += [("param", *each) for each in module.named_parameters(recurse=False)]
        values_of += [("buffer", *each) for each in module.named_buffers(recurse=False)]
        for kind, name, value in values_of:
            port = tap.port(kind, name, selection)
            wanted: list[tuple[SitePort | None, Any, str]] = [(port, value, FORWARD)]
            if kind == "param":
                wanted.append((port.grad, get_grad(value), BACKWARD))
            for each, tensor, pass_ in wanted:
                if each is not None and each.may_keep and tensor is not None:
                    number = step.claim_occurrence((each.model, each.site, micro, pass_))
                    collector.capture_value(each, tensor, Firing(step, number, micro, pass_, tags))
                    num_captured += 1
    return num_captured
