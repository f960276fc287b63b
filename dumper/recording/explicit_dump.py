"""ExplicitDump: record values that a program dumps by name, at sites ``PATH:tap[NAME]``."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tapscope.dumper.recording.step_tracker import StepTracker
from tapscope.dumper.records.firing import Firing, rule_context
from tapscope.dumper.records.flatten import flatten
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.selection.selection import Selection, SiteDecision
from tapscope.dumper.steps.autograd_passes import graph_task
from tapscope.dumper.steps.tag_context import current
from tapscope.dumper.steps.tag_naming import json_tags, layer_path, port_name
from tapscope.run_format.record import FORWARD, RECOMPUTE

if TYPE_CHECKING:
    from tapscope.dumper.taps.collector import Collector

_MAX_SITES = 65536  # limits the memory for programs whose names never repeat
_MODULE_INFO: dict[str, Any] = {"class": "", "params": {}}
_SiteKey = tuple[Any, Any, str | None, str | None]


class DumpSite:
    """One dump name in one layer, with its ports and the configuration's decision for them."""

    __slots__ = ("dims", "grads", "inside", "may_keep", "name", "path", "port", "ports", "site")

    def __init__(self, name: Any, layer: Any, dims: tuple[str | None, str | None], selection: Selection) -> None:
        self.path = layer_path(layer)
        self.name = port_name(name)
        self.site = f"{self.path}:tap[{self.name}]"
        self.dims = (_text(dims[0]), _text(dims[1]))
        self.ports: dict[str, SitePort] = {}
        """Path within the value -> port."""
        self.grads: dict[tuple[str, bool], SitePort] = {}
        """(path within the value, whether the call has grad=True) -> port of the gradient."""
        self.port = self.port_of("", selection)
        self.inside = any(
            each.keep != "off" and _may_be_inside(each.glob, self.name) for each in selection.config.rules
        )
        """Whether a rule may match a part of the value."""
        grad = self.grad_of("", False, selection)
        self.may_keep = selection.config.enabled and (self.port.may_keep or self.inside or grad.may_keep)

    def port_of(self, path: str, selection: Selection) -> SitePort:
        """Return the port for the part of the value at ``path``."""
        port = self.ports.get(path)
        if port is None:
            site = self._site(path)
            port = self.ports[path] = SitePort(site, selection.decision(site, self.name), _MODULE_INFO, self.dims[0])
        return port

    def grad_of(self, path: str, forced: bool, selection: Selection) -> SitePort:
        """Return the port for the gradient of the part at ``path``.

        With ``forced``, the rules of the value apply if no rule matches the gradient.
        """
        port = self.grads.get((path, forced))
        if port is None:
            site = f"{self._site(path)}.grad"
            decision = selection.decision(site, self.name)
            if forced and not decision.may_keep:
                decision = selection.decision(self._site(path), self.name)
            port = self.grads[path, forced] = SitePort(site, decision, _MODULE_INFO, self.dims[1] or self.dims[0])
        return port

    def _site(self, path: str) -> str:
        return f"{self.path}:tap[{self.name}.{path}]" if path else self.site


class ExplicitDump:
    """Records explicitly dumped values under one configuration."""

    def __init__(
        self,
        collector: "Collector",
        steps: StepTracker,
        selection: Selection,
        latest: "Callable[[], ExplicitDump | None]",
    ) -> None:
        """``latest`` returns the current instance, because opening a step may apply another configuration."""
        self._collector = collector
        self._steps = steps
        self._selection = selection
        self._latest = latest
        self._sites: dict[_SiteKey, DumpSite] = {}

    def dump(
        self, name: Any, value: Any, dims: str | None, dims_grad: str | None, grad: bool | None, tags: dict[str, Any]
    ) -> None:
        """Record a value under ``name``, see :meth:`tapscope.dumper.Dumper.dump`; never raises."""
        try:
            context = current()
            if context:
                tags = {**context, **tags}
            layer = tags.get("layer_id")
            if layer is None:
                layer = tags.get("layer")
            place = self._sites.get((name, layer, dims, dims_grad))
            if place is None:
                place = self._new_site(name, layer, dims, dims_grad)
            if place.may_keep:
                self._dump(place, name, value, grad, tags)
        except Exception as error:  # noqa: BLE001 - an error must not reach the model
            self._collector.counters.fail(self._steps.current(), f":tap[{port_name(name)}]", error)

    @property
    def sites(self) -> list[str]:
        """Sites of all dumped values, whether kept or not."""
        return [port.site for place in self._sites.values() for port in [*place.ports.values(), *place.grads.values()]]

    def _new_site(self, name: Any, layer: Any, dims: str | None, dims_grad: str | None) -> DumpSite:
        if len(self._sites) >= _MAX_SITES:
            self._sites.clear()
        place = self._sites[name, layer, dims, dims_grad] = DumpSite(name, layer, (dims, dims_grad), self._selection)
        return place

    def _dump(self, place: DumpSite, name: Any, value: Any, grad: bool | None, tags: dict[str, Any]) -> None:
        step, micro, pass_ = self._firing()
        latest = self._latest()
        if latest is not self:  # opening the step applied another configuration
            if latest is not None:
                latest.dump(name, value, *place.dims, grad, tags)
            return
        if step.skipped:
            return
        firing = Firing(step, step.claim_occurrence((place.site, micro, pass_)), micro, pass_, json_tags(tags))
        if callable(value) and not isinstance(value, nn.Module | type):
            if not self._is_wanted(place, firing):
                return
            value = value()
        if not step.announced:
            self._collector.counters.announce(step)
        for path, leaf in leaves(value):
            self._take(place, path, leaf, firing, grad)

    def _take(self, place: DumpSite, path: str, leaf: Any, firing: Firing, grad: bool | None) -> None:
        port = place.port_of(path, self._selection)
        if port.may_keep:
            self._collector.capture(port, leaf, firing)
        if grad is not False and isinstance(leaf, torch.Tensor) and leaf.requires_grad and firing.pass_ == FORWARD:
            of_grad = place.grad_of(path, grad is True, self._selection)
            if of_grad.may_keep:
                self._collector.gradients.watch(of_grad, leaf, firing)

    def _firing(self) -> tuple[Any, int, str]:
        """Return the (step, microbatch, pass) of a value dumped now."""
        if graph_task() != -1:
            origin = self._collector.origins.find()
            if origin is not None:
                return origin.step, origin.micro, RECOMPUTE
            return (step := self._steps.current()), step.current_micro, RECOMPUTE
        step = self._steps.current()
        return step, step.current_micro, FORWARD

    def _is_wanted(self, place: DumpSite, firing: Firing) -> bool:
        """Return whether the value of a callable, which is not computed yet, may be kept."""
        decision: SiteDecision = place.port.decision
        if decision.static is not None or decision.needs_value or decision.triggers is not None or place.inside:
            return True
        return decision.decide(rule_context(None, firing)).keep != "off"


def _text(dims: Any) -> str | None:
    """Convert a dims argument to a string; a non-string matches no shape and is reported later."""
    return None if dims is None else str(dims)


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for all leaves of a value; NumPy arrays become tensors if torch has their dtype."""
    if value is None:
        yield "", None
    for path, leaf in flatten(value):
        yield path, _as_leaf(leaf)


def _as_leaf(leaf: Any) -> Any:
    if isinstance(leaf, np.generic):
        return leaf.item()
    if not isinstance(leaf, np.ndarray):
        return leaf
    dtype = getattr(torch, leaf.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        return leaf
    array = np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("=")).reshape(leaf.shape)
    if not array.flags.writeable:
        array = array.copy()
    # Extension dtypes of NumPy (bfloat16, FP8) are reinterpreted bit by bit.
    bits = array if array.dtype.kind in "biufc" else array.view(f"u{array.dtype.itemsize}")
    return torch.from_numpy(bits).view(dtype)


def attributes(data: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the items of a mapping, or the public non-method attributes of an object, and the unreadable names."""
    if isinstance(data, Mapping):
        return {str(name): value for name, value in data.items()}, []
    values, failed = {}, []
    for name in dir(data):
        if name.startswith("_"):
            continue
        try:
            value = getattr(data, name)
        except Exception:  # noqa: BLE001 - a property may raise any exception
            failed.append(name)
            continue
        if not callable(value) or isinstance(value, torch.Tensor):
            values[name] = value
    return values, failed


def _may_be_inside(glob: str, name: str) -> bool:
    """Return whether ``glob`` may match a part of the value dumped as ``name``, by its prefix before a wildcard."""
    _, bracket, rest = glob.rpartition("tap[")
    if not bracket:
        return False
    literal = rest.partition("*")[0].partition("?")[0]
    inner = f"{name}."
    return len(literal) > len(inner) and literal.startswith(inner)
