"""Taps in compiled code: torch.compile traces a hook into one graph node, which fires the tap.

The node calls the operator ``tapscope::fire(Tensor[] values, SymInt[] numbers, str where) -> ()``. The operator has an
ordered effect, so no compiler pass drops, duplicates or reorders its calls. It mutates none of its arguments, so
inductor can still run the graph as a CUDA graph. ``where`` names a handler of this process. An unknown ``where`` is
ignored, so a graph may outlive its Dumper. The handler runs whenever the graph runs Python: at every call of an
ordinary compiled function, but only during capture of a CUDA graph (:mod:`tapscope.dumper.recording.graph_taps`).

The functions under "While torch.compile traces" are themselves traced, and call the functions marked
``at_compile_time`` with constants. Values that a tap does not keep never enter the graph, so inductor can fuse across
them.
"""

import dataclasses
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tapscope.core.errors import RecorderError
from tapscope.dumper.job.compiled_regions import at_compile_time
from tapscope.dumper.records.flatten import Leaves, OpaqueObject, path_part
from tapscope.dumper.steps.input_rows import cache_of, row_arguments

if TYPE_CHECKING:
    from tapscope.dumper.selection.selection import Selection
    from tapscope.dumper.taps.taps import Tap

_log = logging.getLogger("tapscope")
Handler = Callable[[Sequence[Tensor], Sequence[int]], None]
Fire = Callable[["Tap", str, Any], None]
_SEPARATOR = "\x1f"
_handlers: dict[str, Handler] = {}
_owners: dict[str, "_Owner"] = {}
_without_gradients: "weakref.WeakSet[Selection]" = weakref.WeakSet()
"""Selections for which missing gradients inside compiled code were already reported."""
_CALL_TENSORS = ("attention_mask", "position_ids", "cache_position")
_PAST_OF_POSITIONS = "past of positions"
"""Argument name without a value: derive the KV cache length from the first position of the call."""


class _Owner(NamedTuple):
    """The tap behind a key, with the callbacks that receive its values and problems."""

    tap: "Tap"
    selection: "Selection"
    fire: Fire
    report: Callable[[str, str], None]


class Leaf(NamedTuple):
    """One leaf of a firing's value: a tensor or number passed by the graph, or a constant known at trace time."""

    kind: str
    """``tensor``, ``number`` or ``constant``."""
    path: str
    value: Any = None


# ---- The operator


def _fire(values: Sequence[Tensor], numbers: Sequence[int], where: str) -> None:
    handler = _handlers.get(where)
    if handler is None:
        return
    try:
        handler(values, numbers)
    except RecorderError:  # raised by strict backpressure
        raise
    except Exception as error:  # noqa: BLE001 - it runs in the model's forward
        _log.warning("tapscope: %s: %s: %s", where.partition(_SEPARATOR)[0], type(error).__name__, error)


def _fire_fake(values: Sequence[Tensor], numbers: Sequence[int], where: str) -> None:
    """Fake implementation of the operator for tracing; it has no outputs."""


_library: Any = torch.library.Library("tapscope", "DEF")  # type: ignore[no-untyped-call]
_library.define("fire(Tensor[] values, SymInt[] numbers, str where) -> ()")
_library.impl("fire", _fire, "CompositeExplicitAutograd")
torch.library.register_fake("tapscope::fire", _fire_fake, lib=_library)
_registered: list[Any] = []


def _register_effect() -> None:
    """Register the operator's ordered effect for AOTAutograd and inductor.

    Deferred until first use, because the registration imports much of torch.
    """
    if not _registered:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        _registered.append(_register_effectful_op("tapscope::fire", _EffectType.ORDERED))


# ---- Owners of taps


def register(tap: "Tap", selection: "Selection", fire: Fire, report: Callable[[str, str], None]) -> None:
    """Route the values of ``tap`` from compiled code to ``fire``, and problems to ``report(where, reason)``."""
    _owners[tap.key] = _Owner(tap, selection, fire, report)


def unregister(keys: Sequence[str]) -> None:
    """Stop routing the values of the taps with these ``keys``; graphs that contain them keep running."""
    for key in keys:
        _owners.pop(key, None)


# ---- While torch.compile traces


def trace_output(key: str, value: Any) -> None:
    """Emit a graph node that fires the tap ``key`` with a module's output."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    leaves: list[tuple[str, str, Any]] = []
    _collect(value, "", key, "out", tensors, numbers, leaves)
    _emit(key, "out", tensors, numbers, leaves)


def trace_inputs(key: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Emit a graph node that fires the tap ``key`` with a module's arguments.

    ``names`` are the positional parameters of the module's forward.
    """
    tensors: list[Tensor] = []
    numbers: list[int] = []
    leaves: list[tuple[str, str, Any]] = []
    for index, value in enumerate(args):
        name = names[index] if index < len(names) else f"args.{index}"
        _collect(value, name, key, "in", tensors, numbers, leaves)
    for name, value in kwargs.items():
        _collect(value, name, key, "in", tensors, numbers, leaves)
    _emit(key, "in", tensors, numbers, leaves)


def trace_enter(key: str, state: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Emit a graph node that notifies the handler of ``key`` when a call of the whole model begins.

    ``state`` identifies the taps in place; a different state triggers recompilation. The handler receives the arguments
    that determine the token rows. If there are none, any tensor is passed, because an operator without tensor
    arguments has no device.
    """
    tensors: list[Tensor] = []
    numbers: list[int] = []
    names: list[str] = []
    _collect_rows(args, kwargs, tensors, numbers, names)
    if not tensors:
        names.append("")
        _find_tensor((args, kwargs), tensors)
    _emit_call(key, "enter", state, tensors, numbers, names)


def trace_leave(key: str, state: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Emit a graph node that notifies the handler of ``key`` when a call of the whole model ends.

    The node takes a tensor of ``output``, because inductor may hoist nodes that depend only on inputs.
    """
    tensors: list[Tensor] = []
    _find_tensor(output, tensors)
    _find_tensor((args, kwargs), tensors)
    _emit_call(key, "leave", state, tensors, [], [""])


def _collect(
    value: Any, path: str, key: str, kind: str, tensors: list[Tensor], numbers: list[int], leaves: list[Any]
) -> None:
    """Append the leaves of ``value`` to ``tensors``, ``numbers`` and ``leaves``.

    Traceable counterpart of :func:`tapscope.dumper.records.flatten.flatten`.
    """
    if value is None:
        return
    if isinstance(value, Tensor):
        if _may_keep(key, kind, path):
            if type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided:
                tensors.append(value.detach())
                leaves.append(("tensor", path, None))
            else:
                leaves.append(("failed", path, "a tensor that is not one piece of memory"))
    elif isinstance(value, (bool, str)):
        leaves.append(("constant", path, value))
    elif isinstance(value, int):
        numbers.append(value)
        leaves.append(("number", path, None))
    elif isinstance(value, float):
        leaves.append(("failed", path, "a float"))
    elif isinstance(value, dict):
        for name, child in value.items():
            _collect(child, _join(path, str(name)), key, kind, tensors, numbers, leaves)
    elif isinstance(value, (tuple, list)):
        is_named = type(value) is not tuple and type(value) is not list and hasattr(value, "_fields")
        for index, child in enumerate(value):
            name = value._fields[index] if is_named else str(index)  # type: ignore[union-attr]
            _collect(child, _join(path, name), key, kind, tensors, numbers, leaves)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name), _join(path, field.name), key, kind, tensors, numbers, leaves)
    else:
        leaves.append(("class", path, type(value).__module__ + "." + type(value).__qualname__))


def _find_tensor(value: Any, tensors: list[Tensor]) -> None:
    """Append the first tensor in ``value`` to ``tensors``, unless ``tensors`` already has one."""
    if tensors:
        return
    if type(value) is Tensor:
        tensors.append(value.detach())
    elif isinstance(value, dict):
        for child in value.values():
            _find_tensor(child, tensors)
    elif isinstance(value, (tuple, list)):
        for child in value:
            _find_tensor(child, tensors)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _find_tensor(getattr(value, field.name), tensors)


def _join(path: str, name: str) -> str:
    return path + _SEPARATOR + name if path else name


def _emit(key: str, kind: str, tensors: list[Tensor], numbers: list[int], leaves: list[Any]) -> None:
    if tensors:
        where = _firing_name(key, kind, tuple(leaves))
        if where:
            torch.ops.tapscope.fire(tensors, numbers, where)
    else:
        _note_call(key)


def _emit_call(key: str, event: str, state: str, tensors: list[Tensor], numbers: list[int], names: list[str]) -> None:
    where = _call_name(key, event, state, tuple(names))
    if where and tensors:
        torch.ops.tapscope.fire(tensors, numbers, where)


def _collect_rows(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], numbers: list[int], names: list[str]
) -> None:
    named = row_arguments(args, kwargs)
    if named is None or type(named["input_ids"]) is not Tensor:
        return
    kwargs, ids = named, named["input_ids"]
    tensors.append(ids.detach())
    names.append("input_ids")
    has_positions = False
    for name in _CALL_TENSORS:
        value = kwargs.get(name)
        if type(value) is Tensor:
            tensors.append(value.detach())
            names.append(name)
            has_positions = has_positions or name == "cache_position" or (name == "position_ids" and value.ndim == 2)
    keep = kwargs.get("logits_to_keep")
    if isinstance(keep, int) and keep > 0:
        numbers.append(keep)
        names.append("logits_to_keep")
    cache = cache_of(kwargs)
    if cache is not None and has_positions:
        names.append(_PAST_OF_POSITIONS)  # reading the cache length here would recompile the model for each length
    elif cache is not None and hasattr(cache, "get_seq_length"):
        length = cache.get_seq_length()
        if type(length) is Tensor:
            tensors.append(length.detach())
            names.append("past")
        elif isinstance(length, int):
            numbers.append(length)
            names.append("past_length")


# ---- Called by traced code but not traced: arguments and results are compile-time constants


@at_compile_time
def is_exporting() -> bool:
    """Return whether torch.export traces the code; an exported program must not depend on this package.

    ``torch.compiler.is_exporting()`` does not help: up to torch 2.11 it is true for every trace.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator = InstructionTranslator.current_tx()
    return bool(getattr(torch.compiler, "_is_exporting_flag", False) or getattr(translator, "export", False))


@at_compile_time
def _may_keep(key: str, kind: str, path: str) -> bool:
    owner = _owners.get(key)
    if owner is None:
        return False
    port = owner.tap.port(kind, _named(path), owner.selection)
    return port.may_keep


@at_compile_time
def _note_call(key: str) -> bool:
    """Mark the tap ``key`` as fired: the graph calls its module, but no value of the call is kept."""
    if (owner := _owners.get(key)) is not None:
        owner.tap.fired = True
    return True


@at_compile_time
def _firing_name(key: str, kind: str, leaves: tuple[tuple[str, str, Any], ...]) -> str:
    """Register a handler for a firing and return its ``where``; empty if the tap is no longer in place."""
    owner = _owners.get(key)
    if owner is None:
        return ""
    _register_effect()
    if owner.tap.has_grads and torch.is_grad_enabled() and owner.selection not in _without_gradients:
        _without_gradients.add(owner.selection)
        owner.report(
            f"{owner.tap.site_path}:{kind}.grad",
            "gradients of values inside compiled code are not captured, here and elsewhere",
        )
    named = []
    for form, path, value in leaves:
        if form == "failed":
            owner.report(
                f"{owner.tap.path}:{kind}", f"{_named(path) or kind}: {value} inside compiled code is left out"
            )
        elif form == "class":
            named.append(Leaf("constant", _named(path), OpaqueObject(_stand_in_for(value))))
        else:
            named.append(Leaf(form, _named(path), value))
    site = f"{owner.tap.model}/{owner.tap.path}" if owner.tap.model else owner.tap.path
    where = _SEPARATOR.join((f"{site}:{kind}", key, repr(leaves)))
    _handlers[where] = _handler_of(key, kind, tuple(named), owner.tap.names)
    return where


_calls: dict[str, Callable[[str, dict[str, Any]], None]] = {}


@at_compile_time
def _call_name(key: str, event: str, state: str, names: tuple[str, ...]) -> str:
    """Register a handler for a call of the whole model and return its ``where``; empty if no one listens to ``key``."""
    if key not in _calls:
        return ""
    _register_effect()
    where = _SEPARATOR.join((f"{event} the model", key, state, ",".join(names)))
    _handlers[where] = lambda values, numbers: _called(key, event, names, values, numbers)
    return where


def on_calls(key: str, handler: Callable[[str, dict[str, Any]], None] | None) -> None:
    """Call ``handler(event, arguments)`` when compiled code enters or leaves the model of ``key``; None unregisters."""
    if handler is None:
        _calls.pop(key, None)
    else:
        _calls[key] = handler


# ---- While the graph runs


def _handler_of(key: str, kind: str, leaves: tuple[Leaf, ...], parameters: tuple[str, ...]) -> Handler:
    """Return the handler of a firing.

    If the leaves are a single output tensor or a plain argument list, the handler rebuilds the eager value, so that the
    tap's fast path applies. Otherwise it passes the leaves as :class:`.Leaves`.
    """
    paths = tuple(leaf.path for leaf in leaves)
    is_plain = all(leaf.kind == "tensor" for leaf in leaves)
    is_output = is_plain and kind == "out" and paths == ("",)
    is_call = is_plain and kind == "in" and paths == parameters[: len(paths)]

    def handle(values: Sequence[Tensor], numbers: Sequence[int]) -> None:
        owner = _owners.get(key)
        if owner is None:
            return
        value: Any
        fast = owner.tap.fast.get(kind)
        if is_output:
            value = values[0]
            if fast is not None and fast(value):
                return
        elif is_call:
            value = tuple(values), {}
            if fast is not None and fast(*value):
                return
        else:
            value = Leaves(_filled(leaves, values, numbers))
        owner.fire(owner.tap, kind, value)

    return handle


def _filled(leaves: Sequence[Leaf], values: Sequence[Tensor], numbers: Sequence[int]) -> list[tuple[str, Any]]:
    tensors, counts = iter(values), iter(numbers)
    filled: list[tuple[str, Any]] = []
    for leaf in leaves:
        value = next(tensors) if leaf.kind == "tensor" else next(counts) if leaf.kind == "number" else leaf.value
        filled.append((leaf.path, value))
    return filled


def _called(key: str, event: str, names: Sequence[str], values: Sequence[Tensor], numbers: Sequence[int]) -> None:
    handler = _calls.get(key)
    if handler is None:
        return
    arguments: dict[str, Any] = {}
    tensors, counts = iter(values), iter(numbers)
    for name in names:
        if name == "past_length":
            arguments["past_key_values"] = _Past(next(counts))
        elif name == _PAST_OF_POSITIONS:
            positions = next(
                arguments[argument] for argument in ("cache_position", "position_ids") if argument in arguments
            )
            first = positions.reshape(-1, positions.shape[-1])[:, 0].max()
            arguments["past_key_values"] = _Past(first if first.is_cuda else int(first))
        elif name == "logits_to_keep":
            arguments[name] = next(counts)
        elif name:
            value = next(tensors)
            arguments["past_key_values" if name == "past" else name] = _Past(value) if name == "past" else value
    handler(event, arguments)


class _Past:
    """Placeholder for a KV cache of a given length."""

    def __init__(self, length: "int | Tensor") -> None:
        self._length = length

    def get_seq_length(self) -> "int | Tensor":
        """Return the number of cached positions."""
        return self._length


def _stand_in_for(name: str) -> Any:
    """Return an instance of an empty class named ``name``, for a traced object of which only the class is recorded."""
    module, _, qualname = name.rpartition(".")
    return type(qualname, (), {"__module__": module, "__qualname__": qualname})()


def _named(path: str) -> str:
    """Return the path of a leaf in the spelling of sites."""
    return ".".join(path_part(part) for part in path.split(_SEPARATOR)) if path else ""


def state_of(paths: Mapping[str, Sequence[str]]) -> str:
    """Return a short hash of ``paths`` (path of a tap -> its capture state): equal inputs give equal hashes."""
    import hashlib

    return hashlib.blake2b(repr(sorted(paths.items())).encode(), digest_size=8).hexdigest()
