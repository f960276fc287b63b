"""Taps: the hooks that stand at a model's sites, and the ports they read."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from tapscope import dims
from tapscope.dumper.config import Keep, Selection
from tapscope.errors import DimsError


@dataclass(slots=True)
class Port:
    """One port of a tap, as far as its firings have shown."""

    site: str
    keep: Keep
    dims: str | None
    """Annotation by the module, checked against the first tensor."""
    row_set: str | None
    announced: bool = False
    """Whether the site line is written."""


@dataclass(slots=True, eq=False)
class Tap:
    """The live hooks at one module."""

    path: str
    module_class: str
    names: tuple[str, ...]
    """Positional parameters of the module's forward."""
    params: dict[str, list[int]]
    tap_dims: dict[str, str]
    tap_rows: dict[str, str]
    kinds: tuple[str, ...] = ("in", "out")
    """Kinds of port that the module says are worth a tap."""
    ports: dict[tuple[str, str], Port] = field(default_factory=dict)
    fired: bool = False
    serial: int = -1
    """Step the counters below belong to."""
    num_in: int = 0
    num_out: int = 0

    def known_ports(self, *kinds: str) -> list[str]:
        """Ports that can be named before anything fired; of ``kinds`` only, if any are given."""
        ports = {"in": [f"in[{name}]" for name in self.names], "out": ["out"]}
        return [port for kind in self.kinds if not kinds or kind in kinds for port in ports[kind]]

    def occurrence(self, serial: int, kind: str) -> int:
        """Number this firing within the step."""
        if serial != self.serial:
            self.serial, self.num_in, self.num_out = serial, 0, 0
        if kind == "in":
            self.num_in += 1
            return self.num_in - 1
        self.num_out += 1
        return self.num_out - 1

    def port(self, kind: str, path: str, selection: Selection) -> Port:
        """The port for a leaf; what is kept there is decided once."""
        found = self.ports.get((kind, path))
        if found is None:
            name = f"{kind}[{path}]" if path else kind
            site = f"{self.path}:{name}"
            annotation = self.tap_dims.get(name)
            found = Port(site, selection.keep(site), annotation, self.tap_rows.get(name))
            self.ports[kind, path] = found
        return found

    def named_inputs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by the names of forward's signature."""
        names = self.names
        inputs = {names[i] if i < len(names) else f"args.{i}": value for i, value in enumerate(args)}
        return inputs | kwargs

    def forget(self) -> None:
        """A new configuration or run: decide and announce again."""
        self.ports.clear()


def find_taps(model: nn.Module) -> list[Tap]:
    """One tap a module that has a forward of its own, in the order of named_modules."""
    return [_tap(path, module) for path, module in _callable_modules(model)]


def _callable_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if path == "" or type(module).forward is not nn.Module.forward:
            yield path, module


def _tap(path: str, module: nn.Module) -> Tap:
    params = {name: list(param.shape) for name, param in module.named_parameters(recurse=False)}
    return Tap(
        path,
        type(module).__name__,
        _parameter_names(module.forward),
        params,
        dict(getattr(module, "tap_dims", None) or {}),
        dict(getattr(module, "tap_rows", None) or {}),
        tuple(getattr(module, "tap_ports", None) or ("in", "out")),
    )


def _parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (ValueError, TypeError):
        return ()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in named)


class Hooks:
    """Installs and removes hooks below the root; calls ``fire(tap, kind, value)``, which must not raise."""

    def __init__(self, model: nn.Module, taps: list[Tap], fire: Callable[[Tap, str, Any], None]) -> None:
        self._modules = dict(model.named_modules())
        self._taps = taps
        self._fire = fire
        self._handles: list[RemovableHandle] = []
        self.armed: list[Tap] = []
        """Taps in place now, the root's included."""

    def install(self, selection: Selection) -> None:
        """Put hooks where ``selection`` may keep something, and nowhere else."""
        self.remove()
        for tap in self._taps:
            tap.forget()
            wants_in, wants_out = (
                kind in tap.kinds and selection.may_keep(tap.path, kind, tap.known_ports(kind))
                for kind in ("in", "out")
            )
            if wants_in or wants_out:
                self.armed.append(tap)
            if tap.path:  # the root is wrapped instead, see RootWrapper
                self._hook(self._modules[tap.path], tap, wants_in=wants_in, wants_out=wants_out)

    def remove(self) -> None:
        """Take every hook away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.armed.clear()

    def _hook(self, module: nn.Module, tap: Tap, *, wants_in: bool, wants_out: bool) -> None:
        fire = self._fire
        if wants_in:

            def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                fire(tap, "in", (args, kwargs))

            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if wants_out:

            def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                fire(tap, "out", output)

            self._handles.append(module.register_forward_hook(after))


class RootWrapper:
    """Stands in for the root's forward, so that ``model(x)`` and ``model.forward(x)`` are both seen, once."""

    def __init__(
        self, model: nn.Module, around: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        self._model = model
        self._had_own = "forward" in model.__dict__
        self._original = model.forward

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return around(self._original, args, kwargs) if self.active else self._original(*args, **kwargs)

        self.active = True
        self._wrapper = forward
        model.forward = forward

    def remove(self) -> None:
        """Give the forward back; a wrapper that someone else put around ours is left alone."""
        self.active = False
        if self._model.__dict__.get("forward") is not self._wrapper:
            return
        if self._had_own:
            self._model.forward = self._original
        else:
            del self._model.forward


def usable_dims(annotation: str | None, shape: tuple[int, ...]) -> tuple[str | None, str | None]:
    """The annotation if it fits the shape, else None and the reason."""
    if annotation is None:
        return None, None
    try:
        dims.parse(annotation).check(shape)
    except DimsError as error:
        return None, str(error)
    return annotation, None


def slots_as_ranges(slots: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """``(3, 4, 5, 9)`` -> ``((3, 3), (9, 1))``: the form of :attr:`Record.rows`."""
    ranges: list[tuple[int, int]] = []
    for slot in slots:
        if ranges and ranges[-1][0] + ranges[-1][1] == slot:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((slot, 1))
    return tuple(ranges)
