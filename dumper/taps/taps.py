"""Taps: one per module of a model that may be hooked, with the ports of the module."""

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tapscope.core.framework_plugin import FrameworkPlugin, ModuleFacts
from tapscope.core.gc_control import gc_paused
from tapscope.core.site import layer_of
from tapscope.dumper.job.framework_plugins import registry
from tapscope.dumper.records.flatten import may_hold_tensors
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.selection.selection import Selection, SiteDecision
from tapscope.dumper.taps.inferred_sharding import InferredSharding, sharding_of
from tapscope.dumper.taps.module_tree import Member, members
from tapscope.dumper.taps.traced_taps import new_key

_HEADS = frozenset({"lm_head", "embed_out", "output_layer"})
_CORE_OUTPUTS = frozenset({"", "0", "logits"})
_LAZY = (nn.UninitializedParameter, nn.UninitializedBuffer)


class ReplayMark:
    """Serial number of the last step in which a CUDA graph replay fired a set of taps; -1 before the first replay."""

    __slots__ = ("__weakref__", "serial")

    def __init__(self) -> None:
        self.serial = -1


@dataclass(slots=True, eq=False)
class Tap:
    """Description and state of the hooks on one module."""

    path: str
    module_class: str
    names: tuple[str, ...]
    """Positional parameters of the module's forward."""
    keywords: tuple[str, ...]
    """Keyword-only parameters of the module's forward."""
    is_open: bool
    """Whether forward takes arguments that its signature does not name (``*args``, ``**kwargs``)."""
    params: dict[str, list[int]]
    """Name -> local shape of the parameters that the module owns directly."""
    tap_dims: dict[str, str]
    tap_rows: dict[str, str]
    kinds: tuple[str, ...] = ("in", "out")
    """Kinds of port that the module declares worth tapping; empty for a module that only holds parameters."""
    buffers: tuple[str, ...] = ()
    """Names of the buffers that the module owns directly."""
    vectors: tuple[str, ...] = ()
    """Persistent 1-D buffers with one element per row of a matrix of the same module, such as a router's expert bias
    or the scales of quantized weights. They take part in the module's computation."""
    aliases: tuple[str, ...] = ()
    """Other paths of the same module, which has one tap, under its first path."""
    parent: str | None = None
    """Class of the parent module."""
    model: str = ""
    """Name of the model; empty if there is only one."""
    tap_name: str | None = None
    """If set, the module's output is the site ``tap[tap_name]`` of its parent module."""
    is_optional: bool = False
    """Whether it is normal that the module is never called."""
    methods: Mapping[str, str] = field(default_factory=dict)
    """Method of the module -> NAME: its return value fires with the kind ``tap``, at the site ``tap[NAME]``."""
    key: str = field(default_factory=new_key)
    """Unique key of this tap in compiled code, see dumper/taps/traced_taps.py."""
    sharding: InferredSharding | None = None
    """Inferred sharding of the whole model, if any."""
    ports: dict[tuple[str, str], SitePort] = field(default_factory=dict)
    fired: bool = False
    """Whether the module was called."""
    has_held: bool = False
    """Whether parameters or buffers of the module were processed for capture."""
    has_grads: bool = False
    """Whether gradients of the tap's ports may be kept."""
    has_inputs: bool | None = None
    """Whether any call had tensor inputs, or inputs that may contain tensors; None while unknown."""
    serial: int = -1
    """Serial number of the step that :attr:`firings` belongs to."""
    firings: dict[str | tuple[str, int], int] = field(default_factory=dict)
    """Kind, or (kind, micro) for microbatches after 0 -> number of forward firings. If a fast path took the first
    firing, the entry appears with the second."""
    fast: dict[str, Any] = field(default_factory=dict)
    """Kind -> fast path of that kind, see dumper/capture/native_record_writer.py."""

    marks: dict[str, list["weakref.ref[ReplayMark]"]] = field(default_factory=dict)
    """Kind -> marks of the CUDA graphs whose replays fire the tap without calling its hook."""
    global_path: str = ""
    """``path`` with layer numbers of the whole model; they differ if this process holds a later pipeline stage."""

    @property
    def site_path(self) -> str:
        """Path of the tap's sites: ``global_path``, or that of the parent if :attr:`tap_name` is set."""
        return self.global_path if self.tap_name is None else self.global_path.rpartition(".")[0]

    def known_ports(self, *kinds: str) -> list[str]:
        """Return the ports known before any firing, restricted to ``kinds`` if given."""
        names: list[str] = []
        for kind in kinds or (*self.kinds, "param", "buffer"):
            if kind == "in" and kind in self.kinds:
                names += [f"in[{name}]" for name in (*self.names, *self.keywords)]
            elif kind == "out" and kind in self.kinds:
                names.append(self._port_name("out", ""))
            elif kind == "tap" and kind in self.kinds:
                names += [f"tap[{name}]" for name in self.methods.values()]
            elif kind in ("param", "buffer"):
                names += [f"{kind}[{name}]" for name in (self.params if kind == "param" else self.buffers)]
        return names

    def may_keep(self, kind: str, selection: Selection) -> bool:
        """Return whether ``selection`` may keep any port of ``kind`` (``in``, ``out.grad``, ``param``, ...)."""
        if not selection.may_keep_kind(kind):
            return False
        base, _, grad = kind.partition(".")
        ports = [f"{port}.grad" if grad else port for port in self.known_ports(base)]
        return selection.may_keep(self.site_path, kind, ports, unnamed=base == "in" and self.is_open)

    def occurrence(self, serial: int, kind: str, micro: int) -> int:
        """Return the occurrence of a forward firing within the step ``serial`` and microbatch, and count it."""
        if serial != self.serial:
            self.serial = serial
            self.firings.clear()
        counter = kind if micro == 0 else (kind, micro)
        number = self.firings.get(counter)
        if micro == 0 and (fast := self.fast.get(kind)) is not None:
            number = int(fast.serial == serial) if number is None else number
            fast.serial = serial
        if micro == 0 and not number and kind in self.marks:
            number = int(_is_any_at(self.marks[kind], serial))
        self.firings[counter] = (number or 0) + 1
        return number or 0

    def has_fired_in(self, serial: int) -> bool:
        """Return whether the tap fired in the step ``serial``, by a hook, a fast path or a graph replay."""
        if self.serial == serial or any(fast.serial == serial for fast in self.fast.values()):
            return True
        return any(_is_any_at(marks, serial) for marks in self.marks.values())

    def add_mark(self, kind: str, mark: ReplayMark) -> None:
        """Register the mark of a CUDA graph whose replays fire this tap, and drop marks of destroyed graphs."""
        marks = [known for known in self.marks.get(kind, ()) if known() not in (None, mark)]
        self.marks[kind] = [*marks, weakref.ref(mark)]

    def port(self, kind: str, path: str, selection: Selection) -> SitePort:
        """Return the port of the leaf at ``path``, created at the leaf's first firing.

        Creation fixes the capture levels of the leaf and of its gradient.
        """
        port = self.ports.get((kind, path))
        if port is None:
            selection = selection.of_model(self.model)
            name = self._port_name(kind, path)
            port = self._make_port(name, self._decision(kind, path, f"{self.site_path}:{name}", selection))
            if kind == "out" and self.has_inputs is False and self.tap_name is None:
                port.module_info["no_inputs"] = True
            decision = self._decision(kind, path, f"{self.site_path}:{name}.grad", selection)
            if decision.may_keep:
                port.grad = self._make_port(f"{name}.grad", decision)
            self.ports[kind, path] = port
        return port

    def named_inputs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments keyed by parameter name of forward; excess positional ones are ``args.N``."""
        names = self.names
        inputs = {names[i] if i < len(names) else f"args.{i}": value for i, value in enumerate(args)}
        return inputs | kwargs

    def note_inputs(self, leaves: Iterable[tuple[str, Any]]) -> None:
        """Update :attr:`has_inputs` with the input leaves of a call."""
        self.has_inputs = self.has_inputs or any(may_hold_tensors(leaf) for _, leaf in leaves)

    def begin(self) -> None:
        """Reset all state for a new recording, which numbers its steps from 0."""
        self.forget()
        self.has_inputs = None if self.names or self.keywords or self.is_open else False
        self.fired, self.has_held, self.serial, self.fast, self.marks = False, False, -1, {}, {}

    def forget(self) -> None:
        """Drop all ports, so that a new configuration or run decides and announces them again."""
        self.ports.clear()
        for fast in self.fast.values():
            fast.patterns = ()

    def _port_name(self, kind: str, path: str) -> str:
        """Return the port name of the leaf at ``path``, e.g. ``in[x]``, ``out``, ``tap[NAME.0]``."""
        if self.tap_name is not None and kind == "out":
            return f"tap[{self.tap_name}.{path}]" if path else f"tap[{self.tap_name}]"
        return f"{kind}[{path}]" if path else kind

    def _decision(self, kind: str, path: str, site: str, selection: Selection) -> SiteDecision:
        if selection.config.mode == "core" and kind == "out" and path not in _CORE_OUTPUTS:
            return SiteDecision()
        return selection.decision(site)

    def _make_port(self, name: str, decision: SiteDecision) -> SitePort:
        """Create a port; a gradient inherits the dims and row set of its value unless it declares its own."""
        module_info: dict[str, Any] = {"class": self.module_class, "params": self.params}
        if self.parent is not None:
            module_info["parent"] = self.parent
        if self.aliases:
            module_info["aliases"] = list(self.aliases)
        value = name.removesuffix(".grad")
        dims = self.tap_dims.get(name, self.tap_dims.get(value))
        rows = self.tap_rows.get(name, self.tap_rows.get(value))
        return SitePort(f"{self.site_path}:{name}", decision, module_info, dims, rows, self.model)


def _is_any_at(marks: "Iterable[weakref.ref[ReplayMark]]", serial: int) -> bool:
    """Return whether any live mark has the serial number ``serial``."""
    return any((mark := known()) is not None and mark.serial == serial for known in marks)


@gc_paused()
def find_taps(model: nn.Module, name: str = "") -> list[Tap]:
    """Return one tap per module that defines forward or owns parameters or buffers, the root first.

    ``name`` is the model's name, if there are several models.
    """
    plugin = registry.owner_of(model)
    paths = _global_paths(plugin, every := members(model, repeated=True))
    aliases: dict[int, list[str]] = {}
    for path, member in every.items():
        aliases.setdefault(id(member.shell), []).append(paths[path])
    modules = members(model)
    classes = {path: type(member.core).__name__ for path, member in modules.items()}
    worth = ((path, member) for path, member in modules.items() if path == "" or _is_worth_a_tap(member.core))
    cores = {path: member.core for path, member in modules.items()} if plugin is not None else {}
    taps = [
        _tap(path, paths[path], member.core, aliases[id(member.shell)], classes, name, _facts(plugin, path, cores))
        for path, member in worth
    ]
    sharding = sharding_of(model)
    for tap in taps:
        tap.sharding = sharding
    return taps


def _global_paths(plugin: FrameworkPlugin | None, modules: Mapping[str, Member]) -> dict[str, str]:
    """Return path -> path with the layer numbers of the whole model, as given by the framework plugin.

    ``modules`` must list parents before their children.
    """
    paths: dict[str, str] = {}
    for path, member in modules.items():
        parent, _, name = path.rpartition(".")
        if plugin is not None and name.isdecimal():
            number = registry.ask(plugin, "module_number", None, member.core)
            name = name if number is None else str(number)
        above = paths.get(parent, parent)
        paths[path] = f"{above}.{name}" if above else name
    return paths


def heads(taps: Sequence[Tap]) -> frozenset[str]:
    """Return the paths of the LM heads, recognized by their usual names outside of layers."""
    paths = (tap.path for tap in taps if tap.path.rpartition(".")[2] in _HEADS)
    return frozenset(path for path in paths if layer_of(path) is None)


def is_called(module: nn.Module) -> bool:
    """Return whether the module's class defines forward; containers do not."""
    return getattr(type(module), "forward", None) is not nn.Module.forward


def _is_worth_a_tap(module: nn.Module) -> bool:
    return is_called(module) or bool(module._parameters or module._buffers)


def _facts(plugin: FrameworkPlugin | None, path: str, modules: Mapping[str, nn.Module]) -> ModuleFacts:
    """Return the framework plugin's facts about the module at ``path``; defaults without a plugin."""
    if plugin is None:
        return ModuleFacts()
    parent = modules.get(path.rpartition(".")[0]) if path else None
    return registry.ask(plugin, "module_facts", ModuleFacts(), path, modules[path], parent)


def _tap(
    path: str,
    global_path: str,
    module: nn.Module,
    paths: list[str],
    classes: dict[str, str],
    model: str,
    facts: ModuleFacts,
) -> Tap:
    """Build the tap of a module; attributes that the module declares take precedence over ``facts``."""
    params = {name: list(p.shape) for name, p in module.named_parameters(recurse=False) if not isinstance(p, _LAZY)}
    is_tapped = path == "" or (is_called(module) and facts.is_called)
    tap_name = getattr(module, "tap_name", None)
    own_dims, own_rows = (
        _renamed(getattr(module, attribute, None) or {}, tap_name) for attribute in ("tap_dims", "tap_rows")
    )
    kinds = (*getattr(module, "tap_ports", ("in", "out")), *(("tap",) if facts.methods else ()))
    names, keywords, is_open = _parameters(module, facts.forward)
    return Tap(
        path=path,
        module_class=type(module).__name__,
        names=names,
        keywords=keywords,
        is_open=is_open,
        params=params,
        tap_dims={**facts.dims, **own_dims},
        tap_rows={**facts.row_sets, **own_rows},
        kinds=kinds if is_tapped else (),
        buffers=tuple(name for name, _ in module.named_buffers(recurse=False)),
        vectors=_vectors(module, params) if is_tapped else (),
        aliases=tuple(each for each in paths if each != global_path),
        parent=classes.get(path.rpartition(".")[0]) if path else None,
        model=model,
        tap_name=tap_name,
        is_optional=bool(getattr(module, "tap_is_optional", facts.is_optional)),
        methods=facts.methods,
        global_path=global_path,
    )


def _renamed(ports: Mapping[str, str], tap_name: str | None) -> dict[str, str]:
    """Return ``ports`` with the key ``out`` renamed to ``tap[tap_name]``, if the module has a tap name."""
    return {f"tap[{tap_name}]" if tap_name is not None and name == "out" else name: ports[name] for name in ports}


def _vectors(module: nn.Module, params: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    rows = {shape[0] for shape in params.values() if len(shape) == 2}
    left_out = module._non_persistent_buffers_set
    own = ((name, each) for name, each in module.named_buffers(recurse=False) if name not in left_out)
    return tuple(name for name, each in own if each.ndim == 1 and len(each) in rows)


def vectors(taps: Sequence[Tap]) -> frozenset[str]:
    """Return the sites of buffers that are treated as ordinary sites, see :attr:`Tap.vectors`."""
    return frozenset(f"{tap.path}:buffer[{name}]" for tap in taps for name in tap.vectors)


def _parameters(module: nn.Module, forward: Callable[..., Any] | None) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Return (positional names, keyword-only names, is_open) of forward; ``is_open`` is also true if unknown.

    ``forward``, if given, replaces the module's own: the function to which a forward with ``*args`` delegates.
    """
    kinds = inspect.Parameter
    try:
        parameters = list(inspect.signature(forward or module.forward).parameters.values())
        if "forward" in module.__dict__ and [p.kind for p in parameters] == [kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD]:
            parameters = list(inspect.signature(type(module).forward).parameters.values())
            parameters = parameters[1:]  # without self
    except (ValueError, TypeError, AttributeError):
        return (), (), True
    positional = tuple(p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD))
    keywords = tuple(p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY)
    return positional, keywords, any(p.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD) for p in parameters)
