"""Taps in compiled code: a hook that torch.compile traces becomes one node of the graph, which fires the tap.

The node is the operator ``tapscope::fire(Tensor[] values, SymInt[] numbers, str where) -> ()``. It is registered as
effectful with order, so that no pass drops, repeats or reorders its calls, and it mutates none of its arguments, so
that inductor may still run the graph as a CUDA graph. ``where`` names a handler of this process; a string without
handler does nothing, so a graph may outlive its Dumper. The handler runs wherever the graph runs Python: at every call
of an ordinary compiled function, and once while a CUDA graph is captured (:mod:`tapscope.dumper.taps.graph_taps`).

The functions under "While torch.compile traces" are traced themselves, and call those marked ``at_compile_time`` with
constants. Values that a tap does not keep are left out of the graph, so that inductor may fuse across them.
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
"""Selections of gradients inside compiled code, which was reported."""
_CALL_TENSORS = ("attention_mask", "position_ids", "cache_position")
_PAST_OF_POSITIONS = "past of positions"
"""Name without a value: the cache holds as many positions as are before the first one of the call."""


class _Owner(NamedTuple):
    """The receiver of one tap's values."""

    tap: "Tap"
    selection: "Selection"
    fire: Fire
    report: Callable[[str, str], None]


class Leaf(NamedTuple):
    """One value of a firing: a tensor or number of the graph, or a constant of the trace."""

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
    except RecorderError:  # of the strict policy
        raise
    except Exception as error:  # noqa: BLE001 - it runs in the model's forward
        _log.warning("tapscope: %s: %s: %s", where.partition(_SEPARATOR)[0], type(error).__name__, error)


def _fire_fake(values: Sequence[Tensor], numbers: Sequence[int], where: str) -> None:
    """The operator's result while a graph is traced: nothing."""


_library: Any = torch.library.Library("tapscope", "DEF")  # type: ignore[no-untyped-call]
_library.define("fire(Tensor[] values, SymInt[] numbers, str where) -> ()")
_library.impl("fire", _fire, "CompositeExplicitAutograd")
torch.library.register_fake("tapscope::fire", _fire_fake, lib=_library)
_registered: list[Any] = []


def _register_effect() -> None:
    """Tell AOTAutograd and inductor that calls have an effect; not at import, because that imports much of torch."""
    if not _registered:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        _registered.append(_register_effectful_op("tapscope::fire", _EffectType.ORDERED))


# ---- Owners of taps


def register(tap: "Tap", selection: "Selection", fire: Fire, report: Callable[[str, str], None]) -> None:
    """Pass the values of ``tap`` to ``fire`` from now on, and problems to ``report(where, reason)``."""
    _owners[tap.key] = _Owner(tap, selection, fire, report)


def unregister(keys: Sequence[str]) -> None:
    """Ignore the values of the taps with these keys from now on."""
    for key in keys:
        _owners.pop(key, None)


# ---- While torch.compile traces


def trace_output(key: str, value: Any) -> None:
    """Make the graph fire the tap ``key`` with a module's output."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    leaves: list[tuple[str, str, Any]] = []
    _collect(value, "", key, "out", tensors, numbers, leaves)
    _emit(key, "out", tensors, numbers, leaves)


def trace_inputs(key: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """As :func:`trace_output`, with a module's arguments; ``names`` are the positional parameters of its forward."""
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
    """Make the graph tell the handler of ``key`` that a call of the whole model begins.

    ``state`` names the taps in place: with others the graph is compiled again. The handler gets the arguments that
    tell of token rows; where there are none, any tensor, since an operator without one has no device.
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
    """As :func:`trace_enter`, when the call ends.

    The operator gets a tensor of the output: inductor may move what depends on inputs alone to the front.
    """
    tensors: list[Tensor] = []
    _find_tensor(output, tensors)
    _find_tensor((args, kwargs), tensors)
    _emit_call(key, "leave", state, tensors, [], [""])


def _collect(
    value: Any, path: str, key: str, kind: str, tensors: list[Tensor], numbers: list[int], leaves: list[Any]
) -> None:
    """The leaves of a value, as :func:`tapscope.dumper.records.flatten.flatten` gives them."""
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
    """Append the first tensor in ``value``, unless there is one already."""
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
        names.append(_PAST_OF_POSITIONS)  # asking the cache would compile the model again for each length
    elif cache is not None and hasattr(cache, "get_seq_length"):
        length = cache.get_seq_length()
        if type(length) is Tensor:
            tensors.append(length.detach())
            names.append("past")
        elif isinstance(length, int):
            numbers.append(length)
            names.append("past_length")


# ---- While torch.compile traces, but not traced: arguments and results are constants


@at_compile_time
def is_exporting() -> bool:
    """Whether torch.export reads the code: what it makes is not to need this package.

    ``torch.compiler.is_exporting()`` is true of every trace up to torch 2.11.
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
    """The graph calls the module of a tap, of which nothing is kept."""
    if (owner := _owners.get(key)) is not None:
        owner.tap.fired = True
    return True


@at_compile_time
def _firing_name(key: str, kind: str, leaves: tuple[tuple[str, str, Any], ...]) -> str:
    """The ``where`` of a firing, whose handler is there from now on; empty where the tap is not in place any more."""
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
    """As :func:`_firing_name`, of a call of a whole model."""
    if key not in _calls:
        return ""
    _register_effect()
    where = _SEPARATOR.join((f"{event} the model", key, state, ",".join(names)))
    _handlers[where] = lambda values, numbers: _called(key, event, names, values, numbers)
    return where


def on_calls(key: str, handler: Callable[[str, dict[str, Any]], None] | None) -> None:
    """Call ``handler(event, arguments)`` when compiled code enters or leaves the model of ``key``; None: no more."""
    if handler is None:
        _calls.pop(key, None)
    else:
        _calls[key] = handler


# ---- While the graph runs


def _handler_of(key: str, kind: str, leaves: tuple[Leaf, ...], parameters: tuple[str, ...]) -> Handler:
    """What a firing does; where its value can be put together again, it takes the way of an eager firing."""
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
            positions = next(arguments[told] for told in ("cache_position", "position_ids") if told in arguments)
            first = positions.reshape(-1, positions.shape[-1])[:, 0].max()
            arguments["past_key_values"] = _Past(first if first.is_cuda else int(first))
        elif name == "logits_to_keep":
            arguments[name] = next(counts)
        elif name:
            value = next(tensors)
            arguments["past_key_values" if name == "past" else name] = _Past(value) if name == "past" else value
    handler(event, arguments)


class _Past:
    """Stands for a key-value cache of this length."""

    def __init__(self, length: "int | Tensor") -> None:
        self._length = length

    def get_seq_length(self) -> "int | Tensor":
        """Positions that it holds."""
        return self._length


def _stand_in_for(name: str) -> Any:
    """An object of a class called ``name``, for an object of the trace, of which the class alone is recorded."""
    module, _, qualname = name.rpartition(".")
    return type(qualname, (), {"__module__": module, "__qualname__": qualname})()


def _named(path: str) -> str:
    """The path of a leaf as sites spell it."""
    return ".".join(path_part(part) for part in path.split(_SEPARATOR)) if path else ""


def state_of(paths: Mapping[str, Sequence[str]]) -> str:
    """A short name for what is in place: equal for equal ``paths`` (site -> what may be kept there)."""
    import hashlib

    return hashlib.blake2b(repr(sorted(paths.items())).encode(), digest_size=8).hexdigest()
