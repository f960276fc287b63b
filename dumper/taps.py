"""Taps: the hooks that stand at a model's sites, and the ports they read."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from tapscope.dumper.port import Port
from tapscope.dumper.rules import Selection


@dataclass(slots=True, eq=False)
class Tap:
    """The live hooks at one module."""

    path: str
    module_class: str
    names: tuple[str, ...]
    """Positional parameters of the module's forward."""
    keywords: tuple[str, ...]
    """Keyword-only parameters."""
    is_open: bool
    """Whether forward takes arguments that its signature does not name (``*args``, ``**kwargs``)."""
    params: dict[str, list[int]]
    tap_dims: dict[str, str]
    tap_rows: dict[str, str]
    kinds: tuple[str, ...] = ("in", "out")
    """Kinds of port that the module says are worth a tap."""
    ports: dict[tuple[str, str], Port] = field(default_factory=dict)
    fired: bool = False
    serial: int = -1
    """Step the counters below belong to."""
    firings: dict[tuple[str, int, str], int] = field(default_factory=dict)
    """(kind, micro, pass) -> how often it has fired."""

    def known_ports(self, *kinds: str) -> list[str]:
        """Ports that can be named before anything fired; of ``kinds`` only, if any are given."""
        ports = {"in": [f"in[{name}]" for name in (*self.names, *self.keywords)], "out": ["out"]}
        return [port for kind in self.kinds if not kinds or kind in kinds for port in ports[kind]]

    def occurrence(self, serial: int, kind: str, micro: int, pass_: str) -> int:
        """Number this firing within the step, micro and pass."""
        if serial != self.serial:
            self.serial = serial
            self.firings.clear()
        number = self.firings.get((kind, micro, pass_), 0)
        self.firings[kind, micro, pass_] = number + 1
        return number

    def port(self, kind: str, path: str, selection: Selection) -> Port:
        """The port for a leaf; what is kept there is decided once."""
        found = self.ports.get((kind, path))
        if found is None:
            name = f"{kind}[{path}]" if path else kind
            site = f"{self.path}:{name}"
            about = {"class": self.module_class, "params": self.params}
            found = Port(site, selection.choice(site), about, self.tap_dims.get(name), self.tap_rows.get(name))
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
        if path == "" or getattr(type(module), "forward", None) is not nn.Module.forward:
            yield path, module


def _tap(path: str, module: nn.Module) -> Tap:
    lazy = (nn.UninitializedParameter, nn.UninitializedBuffer)
    own = module.named_parameters(recurse=False)
    params = {name: list(param.shape) for name, param in own if not isinstance(param, lazy)}
    return Tap(
        path,
        type(module).__name__,
        *_parameters(module),
        params,
        dict(getattr(module, "tap_dims", None) or {}),
        dict(getattr(module, "tap_rows", None) or {}),
        tuple(getattr(module, "tap_ports", None) or ("in", "out")),
    )


def _parameters(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """(positional, keyword-only, open) of the module's forward; open when nothing is known of it."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (ValueError, TypeError, AttributeError):
        return (), (), True
    kinds = inspect.Parameter
    positional = tuple(p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD))
    keywords = tuple(p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY)
    return positional, keywords, any(p.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD) for p in parameters)


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
                kind in tap.kinds
                and selection.may_keep(tap.path, kind, tap.known_ports(kind), unnamed=kind == "in" and tap.is_open)
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
        if wants_in:
            before = _Before(tap, self._fire)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if wants_out:
            self._handles.append(module.register_forward_hook(_After(tap, self._fire)))


class _Hook:
    """A hook that stays behind: in a deep copy or a pickle of the module it does nothing."""

    def __init__(self, tap: Tap, fire: Callable[[Tap, str, Any], None]) -> None:
        self._tap = tap
        self._fire = fire

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_nothing, ()


class _Before(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._fire(self._tap, "in", (args, kwargs))


class _After(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._fire(self._tap, "out", output)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a hook becomes in a copy of the model."""


def _get_nothing() -> Callable[..., None]:
    return _nothing
