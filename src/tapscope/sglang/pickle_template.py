"""PickleTemplates: fast reading of pickles that differ from an earlier pickle only in strings and integers in their
dicts.

A dump has thousands of files with the same layout: a dict of ``value`` and ``meta`` with a different name, step and
index in each. The first pickle of a layout is interpreted opcode by opcode (:mod:`.safe_unpickler`), recording the byte
span of each string and integer. If all other bytes of a later pickle are equal, it would execute the same operations,
so its values are filled into a copy of the first result. This takes a tenth of the time. Any other pickle is
interpreted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tapscope.run_format.tensor_layout import Tensor
from tapscope.sglang.safe_unpickler import PickleMachine, read, run

_MAX_BYTES = 1 << 16
"""Maximum size of a pickle that becomes a template; a longer one contains more than a value and its metadata."""
_MAX_WALK = 1 << 16
"""Maximum number of objects visited to locate the literals of a pickle in its result."""
_MAX_UNUSED = 32
"""Maximum number of consecutive templates without a match; then the directory has no common layout, and no more
templates are created."""
_TEXT = 0x58  # BINUNICODE
_INTEGERS = {0x4B: 1, 0x4D: 2, 0x4A: 4}  # BININT1, BININT2 (unsigned) and BININT (signed): opcode -> width
_GETS = {0x68, 0x6A}  # BINGET, LONG_BINGET
_CALLS = {0x52, 0x81, 0x51, 0x93}  # REDUCE, NEWOBJ, BINPERSID, STACK_GLOBAL

Place = Callable[[str], tuple[int, int]]
"""Key of a storage -> (offset in the file, number of bytes)."""


class PickleTemplates:
    """The layouts seen so far in one directory."""

    def __init__(self) -> None:
        self._known: dict[int, dict[bytes, list[_Template]]] = {}
        """Length of the prefix before the first hole -> prefix bytes -> templates."""
        self._num_unused = 0

    def read(
        self, data: bytes, known: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any], place: Place
    ) -> Any:
        """Return the same object as :func:`~tapscope.sglang.safe_unpickler.read`, with the same exceptions."""
        if len(data) > _MAX_BYTES:
            return read(data, known, persistent)
        if (value := self._match(data, place)) is not None:
            return value
        if self._num_unused < _MAX_UNUSED:
            self._num_unused += 1
            machine = _TracingMachine(data, known, persistent)
            try:
                template = _template_of(machine, run(machine))
            except _NoTemplate:
                template = None
            if template is not None:
                prefix = template.segments[0][0]
                self._known.setdefault(len(prefix), {}).setdefault(prefix, []).append(template)
                offset, _ = place(template.key)
                return template.root.filled(template.values_of(data) or [], offset)
        return read(data, known, persistent)

    def _match(self, data: bytes, place: Place) -> dict[Any, Any] | None:
        for length, layouts in self._known.items():
            for template in layouts.get(data[:length], ()):
                if (values := template.values_of(data)) is None:
                    continue
                offset, nbytes = place(template.key)
                if nbytes == template.nbytes:
                    self._num_unused = 0
                    return template.root.filled(values, offset)
        return None


@dataclass(slots=True)
class _Dict:
    """A dict of a template: constant entries, and holes to be filled per pickle."""

    constants: dict[Any, Any]
    """Every key in order; the value is None where it is filled in."""
    holes: list[tuple[Any, int]] = field(default_factory=list)
    """(key, index of the hole)"""
    inner: "list[tuple[Any, _Dict]]" = field(default_factory=list)
    tensors: list[tuple[Any, Tensor]] = field(default_factory=list)
    """(key, tensor); offsets are relative to the storage."""

    def filled(self, values: list[Any], offset: int) -> dict[Any, Any]:
        filled = self.constants.copy()
        for key, hole in self.holes:
            filled[key] = values[hole]
        for key, tensor in self.tensors:
            filled[key] = Tensor(tensor.dtype, tensor.shape, tensor.strides, tensor.offset + offset)
        for key, inner in self.inner:
            filled[key] = inner.filled(values, offset)
        return filled


@dataclass(slots=True)
class _Template:
    """One layout of pickles."""

    segments: list[tuple[bytes, bool]]
    """(bytes before the hole, True if the hole is a string) for each hole."""
    tail: bytes
    root: _Dict
    key: str
    """Key of the only storage."""
    nbytes: int

    def values_of(self, data: bytes) -> list[Any] | None:
        """Return the values of the holes in ``data``, or None if the bytes between the holes differ."""
        at, size = 0, len(data)
        values: list[Any] = []
        for segment, is_text in self.segments:
            if not data.startswith(segment, at):
                return None
            at += len(segment)
            if is_text:  # the opcode is the last byte of the segment
                end = at + 4 + int.from_bytes(data[at : at + 4], "little")
                if end > size:
                    return None
                try:
                    values.append(str(data[at + 4 : end], "utf-8", "surrogatepass"))
                except UnicodeDecodeError:
                    return None
            else:
                width = _INTEGERS.get(data[at]) if at < size else None
                if width is None:
                    return None
                end = at + 1 + width
                values.append(int.from_bytes(data[at + 1 : end], "little", signed=width == 4))
            at = end
        return values if data[at:] == self.tail else None


class _Text(str):
    """A string literal that carries the index of its span."""

    number: int


class _Integer(int):
    """An integer literal that carries the index of its span."""

    number: int


class _NoTemplate(Exception):
    """The pickle is not a dict of plain values and tensors of one storage, or too large to analyze."""


class _TracingMachine(PickleMachine):
    """Pickle interpreter that records the byte span of each string and integer literal."""

    def __init__(self, data: bytes, known: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any]) -> None:
        super().__init__(data, known, self._resolve)
        self._persistent = persistent
        self.spans: list[tuple[int, int]] = []
        """(first byte, end) of each literal, including its opcode."""
        self.fixed: set[int] = set()
        """Indices of literals passed to a constructor, a storage or a global; these must not vary."""
        self.storages: dict[Any, Any] = {}
        """Key of a storage -> storage."""
        self._walked = 0

    def run(self) -> Any:
        stack = self.stack
        while True:
            begin, code = self.at, self.data[self.at]
            self.at += 1
            self.left -= 1
            if code == 0x2E:  # STOP
                return stack.pop()
            if code in _CALLS:
                self._fix(stack[-2:])
            self.other(code)
            if code in _GETS and isinstance(stack[-1], _Text | _Integer):  # used twice, possibly as a key
                self.fixed.add(stack[-1].number)
            if code == _TEXT or code in _INTEGERS:
                literal = _Text(stack[-1]) if code == _TEXT else _Integer(stack[-1])
                literal.number = len(self.spans)
                stack[-1] = literal
                self.spans.append((begin, self.at))

    def _resolve(self, identity: Any) -> Any:
        storage = self._persistent(identity)
        self.storages[str(identity[2])] = storage
        return storage

    def _fix(self, arguments: list[Any]) -> None:
        pending, seen = list(arguments), set()
        while pending:
            one = pending.pop()
            self._walked += 1
            if self._walked > _MAX_WALK:
                raise _NoTemplate
            if isinstance(one, _Text | _Integer):
                self.fixed.add(one.number)
            elif isinstance(one, list | tuple | set | dict) and id(one) not in seen:
                seen.add(id(one))
                pending.extend(one)
                if isinstance(one, dict):
                    pending.extend(one.values())


def _template_of(machine: _TracingMachine, content: Any) -> _Template:
    """Return the template of an interpreted pickle; raises _NoTemplate."""
    if not isinstance(content, dict) or len(machine.storages) != 1:
        raise _NoTemplate
    ((key, storage),) = machine.storages.items()
    values: set[int] = set()
    _classify(content, values, machine.fixed, [_MAX_WALK])
    order = sorted(values - machine.fixed)
    if not order:
        raise _NoTemplate
    segments, at = [], 0
    for number in order:
        begin, end = machine.spans[number]
        is_text = machine.data[begin] == _TEXT
        segments.append((machine.data[at : begin + 1 if is_text else begin], is_text))
        at = end
    root = _dict_of(content, storage.offset, {number: hole for hole, number in enumerate(order)})
    return _Template(segments, machine.data[at:], root, key, storage.nbytes)


def _classify(content: dict[Any, Any], values: set[int], fixed: set[int], left: list[int], depth: int = 0) -> None:
    """Classify literals: dict values may vary, dict keys may not; raises _NoTemplate."""
    left[0] -= len(content) + 1
    if left[0] < 0 or depth > 8:
        raise _NoTemplate
    for key, value in content.items():
        if isinstance(key, _Text | _Integer):
            fixed.add(key.number)
        if isinstance(value, _Text | _Integer):
            values.add(value.number)
        elif isinstance(value, dict):
            _classify(value, values, fixed, left, depth + 1)
        elif not (value is None or isinstance(value, bool | float | bytes | Tensor) or value == ()):
            raise _NoTemplate


def _dict_of(content: dict[Any, Any], offset: int, holes: Mapping[int, int]) -> _Dict:
    made = _Dict({})
    for name, value in content.items():
        key = _plain(name)
        made.constants[key] = None
        if isinstance(value, dict):
            made.inner.append((key, _dict_of(value, offset, holes)))
        elif isinstance(value, Tensor):
            shape, strides = tuple(map(int, value.shape)), tuple(map(int, value.strides))
            made.tensors.append((key, replace(value, shape=shape, strides=strides, offset=value.offset - offset)))
        elif isinstance(value, _Text | _Integer) and value.number in holes:
            made.holes.append((key, holes[value.number]))
        else:
            made.constants[key] = _plain(value)
    return made


def _plain(value: Any) -> Any:
    """Return a literal as a plain str or int."""
    if isinstance(value, _Text):
        return str.__str__(value)
    return int(value) if isinstance(value, _Integer) else value
