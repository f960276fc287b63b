"""Taps: the modules of a model that may be hooked, and their ports."""

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
    """When a set of taps last fired together, by a replay of a CUDA graph."""

    __slots__ = ("__weakref__", "serial")

    def __init__(self) -> None:
        self.serial = -1


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
    """Its own parameters and their local shapes."""
    tap_dims: dict[str, str]
    tap_rows: dict[str, str]
    kinds: tuple[str, ...] = ("in", "out")
    """Kinds of port that the module declares worth a tap; none for one that only holds parameters."""
    buffers: tuple[str, ...] = ()
    """Its own buffers."""
    vectors: tuple[str, ...] = ()
    """Persistent buffers with one number per row of a matrix of the same module: the bias by which a router chooses
    experts, the scales of quantized weights. They take part in its computation."""
    aliases: tuple[str, ...] = ()
    """Other paths of the same module: it is one tap, under the first path."""
    parent: str | None = None
    """Class of the parent module."""
    model: str = ""
    """Name of its model, when there are several."""
    tap_name: str | None = None
    """Its output is the site ``tap[tap_name]`` of its parent module."""
    is_optional: bool = False
    """Whether the module may never be called."""
    methods: Mapping[str, str] = field(default_factory=dict)
    """Method of the module -> NAME: what it returns is a firing of the kind ``tap``, the site ``tap[NAME]``."""
    key: str = field(default_factory=new_key)
    """Its own, see dumper/taps/traced_taps.py."""
    sharding: InferredSharding | None = None
    """Known sharding of the whole model."""
    ports: dict[tuple[str, str], SitePort] = field(default_factory=dict)
    fired: bool = False
    """Whether the module was called."""
    has_held: bool = False
    """Whether its parameters or buffers were captured."""
    has_grads: bool = False
    """Whether gradients of its ports may be kept."""
    has_inputs: bool | None = None
    """Whether a call brought tensors, or objects that may hold some; None before the first call that shows it."""
    serial: int = -1
    """Step that the counters below belong to."""
    firings: dict[str | tuple[str, int], int] = field(default_factory=dict)
    """Kind, or (kind, micro) of a later microbatch -> number of forward firings. Where a fast path has taken the
    first one, counting begins with the next."""
    fast: dict[str, Any] = field(default_factory=dict)
    """Kind -> its fast path, see dumper/capture/native_record_writer.py."""

    marks: dict[str, list["weakref.ref[ReplayMark]"]] = field(default_factory=dict)
    """Kind -> graphs whose replays fire it without calling it."""
    global_path: str = ""
    """``path`` with the layer numbers of the whole model, of which this process may hold one pipeline stage."""

    @property
    def site_path(self) -> str:
        """Path of its sites."""
        return self.global_path if self.tap_name is None else self.global_path.rpartition(".")[0]

    def known_ports(self, *kinds: str) -> list[str]:
        """Ports known before any firing; only of ``kinds``, if given."""
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
        """Whether any of its ports of ``kind`` (``in``, ``out.grad``, ``param``, ...) may be kept."""
        if not selection.may_keep_kind(kind):
            return False
        base, _, grad = kind.partition(".")
        ports = [f"{port}.grad" if grad else port for port in self.known_ports(base)]
        return selection.may_keep(self.site_path, kind, ports, unnamed=base == "in" and self.is_open)

    def occurrence(self, serial: int, kind: str, micro: int) -> int:
        """Number this forward firing within the step and microbatch."""
        if serial != self.serial:
            self.serial = serial
            self.firings.clear()
        what = kind if micro == 0 else (kind, micro)
        number = self.firings.get(what)
        if micro == 0 and (fast := self.fast.get(kind)) is not None:
            number = int(fast.serial == serial) if number is None else number
            fast.serial = serial
        if micro == 0 and not number and kind in self.marks:
            number = int(_is_any_at(self.marks[kind], serial))
        self.firings[what] = (number or 0) + 1
        return number or 0

    def has_fired_in(self, serial: int) -> bool:
        """Whether anything fired in this step."""
        if self.serial == serial or any(fast.serial == serial for fast in self.fast.values()):
            return True
        return any(_is_any_at(marks, serial) for marks in self.marks.values())

    def add_mark(self, kind: str, mark: ReplayMark) -> None:
        """Replays that set ``mark`` fire this tap; those of graphs that are gone no longer do."""
        marks = [known for known in self.marks.get(kind, ()) if known() not in (None, mark)]
        self.marks[kind] = [*marks, weakref.ref(mark)]

    def port(self, kind: str, path: str, selection: Selection) -> SitePort:
        """The port of a leaf, made at its first firing: what is kept of its values and gradients is decided then."""
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
        """Arguments by the names of forward's signature."""
        names = self.names
        inputs = {names[i] if i < len(names) else f"args.{i}": value for i, value in enumerate(args)}
        return inputs | kwargs

    def note_inputs(self, leaves: Iterable[tuple[str, Any]]) -> None:
        """A call brings these inputs."""
        self.has_inputs = self.has_inputs or any(may_hold_tensors(leaf) for _, leaf in leaves)

    def begin(self) -> None:
        """A new recording begins, which counts its steps from 0."""
        self.forget()
        self.has_inputs = None if self.names or self.keywords or self.is_open else False
        self.fired, self.has_held, self.serial, self.fast, self.marks = False, False, -1, {}, {}

    def forget(self) -> None:
        """A new configuration or run: decide and announce again."""
        self.ports.clear()
        for fast in self.fast.values():
            fast.patterns = ()

    def _port_name(self, kind: str, path: str) -> str:
        """The port of the leaf at ``path`` of an argument, an output or a parameter."""
        if self.tap_name is not None and kind == "out":
            return f"tap[{self.tap_name}.{path}]" if path else f"tap[{self.tap_name}]"
        return f"{kind}[{path}]" if path else kind

    def _decision(self, kind: str, path: str, site: str, selection: Selection) -> SiteDecision:
        if selection.config.mode == "core" and kind == "out" and path not in _CORE_OUTPUTS:
            return SiteDecision()
        return selection.decision(site)

    def _make_port(self, name: str, decision: SiteDecision) -> SitePort:
        """A gradient has the dims and rows of its value, unless it has its own."""
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
    """Whether one of the marks has the serial number of this step."""
    return any((mark := known()) is not None and mark.serial == serial for known in marks)


@gc_paused()
def find_taps(model: nn.Module, name: str = "") -> list[Tap]:
    """One tap per module that is called or holds parameters or buffers, the root first; ``name`` is the model's."""
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
    """Path -> the path with the numbers that the model's framework gives to modules of lists; parents come first."""
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
    """Paths of the modules that compute a language model's logits, by their usual names."""
    paths = (tap.path for tap in taps if tap.path.rpartition(".")[2] in _HEADS)
    return frozenset(path for path in paths if layer_of(path) is None)


def is_called(module: nn.Module) -> bool:
    """Whether the module has its own forward; a container is never called."""
    return getattr(type(module), "forward", None) is not nn.Module.forward


def _is_worth_a_tap(module: nn.Module) -> bool:
    return is_called(module) or bool(module._parameters or module._buffers)


def _facts(plugin: FrameworkPlugin | None, path: str, modules: Mapping[str, nn.Module]) -> ModuleFacts:
    """The framework plugin's facts about a module."""
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
    """The tap of a module; what the module declares itself takes precedence over ``facts``."""
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
    """``ports``, with the output under its name as a tap."""
    return {f"tap[{tap_name}]" if tap_name is not None and name == "out" else name: ports[name] for name in ports}


def _vectors(module: nn.Module, params: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    rows = {shape[0] for shape in params.values() if len(shape) == 2}
    left_out = module._non_persistent_buffers_set
    own = ((name, each) for name, each in module.named_buffers(recurse=False) if name not in left_out)
    return tuple(name for name, each in own if each.ndim == 1 and len(each) in rows)


def vectors(taps: Sequence[Tap]) -> frozenset[str]:
    """Sites of the buffers that count as ordinary, see :attr:`Tap.vectors`."""
    return frozenset(f"{tap.path}:buffer[{name}]" for tap in taps for name in tap.vectors)


def _parameters(module: nn.Module, forward: Callable[..., Any] | None) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """(positional, keyword-only, open) parameters of the module's forward; open when they are unknown.

    ``forward`` is the function that a forward with ``*args`` calls.
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
