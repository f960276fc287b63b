"""PickleMachine: a safe interpreter for the subset of the pickle format that ``torch.save`` writes.

A pickle is a program for a small stack machine. This implementation supports only the opcodes that build plain
containers, strings and numbers, and calls only constructors that the caller passes by name. An unknown global is an
error and is never looked up. Time and memory are proportional to the length of the input and bounded by fixed budgets.
"""

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 64 << 20
"""Maximum size of a pickle; the bytes of tensors are stored outside of it."""
MAX_OPERATIONS = 4_000_000
"""Budget of a pickle: executed opcodes plus the elements copied by its calls. A one-byte opcode can cause 200."""
_SET_COST = 8
"""Operations charged for an empty set, which uses as much memory as eight numbers."""
_CHARACTERS = 64
"""Number of characters copied from a string per charged operation."""
_MAX_KEY = 1 << 31
"""Bound on the absolute value of integer keys: larger malicious keys could all share one hash."""
_MAX_INT_BYTES = 16


class PickleProblem(ValueError):
    """The bytes are damaged or contain unsupported data; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Constructor:
    """A callable that a pickle may invoke; no other object is ever called."""

    make: Callable[..., Any]


class Placeholder(dict[str, Any]):
    """Replacement for an object of an unsupported class, with its attributes by name; see :class:`LenientNames`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__()

    def set_state(self, state: Any) -> None:
        """Store the attributes that the pickle sets."""
        if isinstance(state, dict):
            self.update(state)


class PlaceholderKey(Placeholder):
    """A hashable placeholder; equality and hash are by identity, so that the pickle cannot choose them."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class LenientNames(dict[tuple[str, str], Any]):
    """Known globals; any other name maps to the constructor of :class:`Placeholder`, which ignores its arguments."""

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        """Return the constructor for the name, never ``default``."""
        return super().get(key, _PLACEHOLDER)


_PLACEHOLDER = Constructor(Placeholder)
_MARK = object()
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}  # N \x88 \x89
_NUMBERS = {0x4B: "<B", 0x4D: "<H", 0x4A: "<i", 0x47: ">d"}  # K M J G
_TEXTS = {0x8C: 1, 0x58: 4, 0x8D: 8}  # short_binunicode binunicode binunicode8: bytes of the length
_BYTES = {0x43: 1, 0x42: 4, 0x8E: 8, 0x96: 8}  # short_binbytes binbytes binbytes8 bytearray8
_LONGS = {0x8A: 1, 0x8B: 4}
_NEW: dict[int, Callable[[], Any]] = {0x7D: dict, 0x5D: list, 0x29: tuple, 0x8F: set}  # } ] ) \x8f
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_PUTS, _GETS = {0x71: 1, 0x72: 4}, {0x68: 1, 0x6A: 4}  # q r, h j


def read(data: bytes, known: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any]) -> Any:
    """Return the object that the pickle ``data`` builds.

    ``known`` maps (module, name) of each allowed global to its replacement, a :class:`Constructor` if the pickle may
    call it. ``persistent`` returns the object for a persistent id. Raises PickleProblem.
    """
    if len(data) > MAX_BYTES:
        raise PickleProblem(f"its pickle has {len(data):,} bytes, at most {MAX_BYTES:,} are read")
    return run(PickleMachine(data, known, persistent))


def run(machine: "PickleMachine") -> Any:
    """Run ``machine`` and return the object it builds; raises PickleProblem."""
    try:
        return machine.run()
    except (IndexError, struct.error):
        raise PickleProblem(f"its pickle is damaged at byte {machine.at:,}") from None
    except (TypeError, AttributeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise PickleProblem(f"its pickle is damaged at byte {machine.at:,} ({type(error).__name__})") from None


class PickleMachine:
    """Interpreter state: stack, memo and position in the bytes."""

    def __init__(self, data: bytes, known: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any]) -> None:
        self.data, self.known, self.persistent = data, known, persistent
        self.at = 0
        self.left = MAX_OPERATIONS
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Interpret opcodes until STOP and return the result."""
        data, stack, memo, push = self.data, self.stack, self.memo, self.stack.append
        at, left, size = 0, self.left, len(self.data)
        while True:
            self.at = at
            code = data[at]
            left -= 1
            if left < 0:
                raise PickleProblem(f"its pickle asks for more than {MAX_OPERATIONS:,} operations")
            if code == 0x71:  # q: the six opcodes that dominate torch.save's output are inlined here for speed
                memo[data[at + 1]] = stack[-1]
                at += 2
            elif code == 0x58:  # X
                end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "little")
                if end > size:
                    raise IndexError
                push(str(data[at + 5 : end], "utf-8", "surrogatepass"))
                at = end
            elif code == 0x4B:  # K
                push(data[at + 1])
                at += 2
            elif code == 0x28:  # mark
                push(_MARK)
                at += 1
            elif code == 0x68:  # h
                push(self.remembered(data[at + 1]))
                at += 2
            elif code == 0x2E:  # stop
                return stack.pop()
            else:
                self.at, self.left = at + 1, left
                self.other(code)
                at, left = self.at, self.left

    def other(self, code: int) -> None:
        """Execute one of the less frequent opcodes."""
        if code in _NEW:
            self.stack.append(_NEW[code]())
            self.left -= _SET_COST if code == 0x8F else 0
        elif code in _PUTS:
            self.memo[self.unsigned(_PUTS[code])] = self.stack[-1]
        elif code in _GETS:
            self.stack.append(self.remembered(self.unsigned(_GETS[code])))
        elif code == 0x94:  # memoize
            self.memo[len(self.memo)] = self.stack[-1]
        elif not (self.literal(code) or self.container(code) or self.object(code)):
            raise PickleProblem(f"its pickle has an opcode that torch.save never writes, {code:#04x}")

    def literal(self, code: int) -> bool:
        """Push a constant, a number, a string or bytes; return whether ``code`` is such an opcode."""
        push = self.stack.append
        if code in _TEXTS:
            push(self.take(self.unsigned(_TEXTS[code])).decode("utf-8", "surrogatepass"))
        elif code in _NUMBERS:
            form = _NUMBERS[code]
            push(struct.unpack(form, self.take(struct.calcsize(form)))[0])
        elif code in _CONSTANTS:
            push(_CONSTANTS[code])
        elif code in _LONGS:
            length = self.unsigned(_LONGS[code])
            if length > _MAX_INT_BYTES:
                raise PickleProblem(f"its pickle has an integer of {length:,} bytes")
            push(int.from_bytes(self.take(length), "little", signed=True))
        elif code in _BYTES:
            push(self.take(self.unsigned(_BYTES[code])))
        elif code == 0x28:  # mark
            push(_MARK)
        elif code in (0x80, 0x95):  # protocol, frame: nothing to do
            self.take(1 if code == 0x80 else 8)
        else:
            return False
        return True

    def container(self, code: int) -> bool:
        """Build a tuple or fill a container; return whether ``code`` is such an opcode."""
        stack = self.stack
        if code in _TUPLES:
            count = _TUPLES[code]
            if len(stack) < count:
                raise IndexError
            stack[-count:] = [tuple(stack[-count:])]
        elif code == 0x74:  # t
            stack.append(tuple(self.since_mark()))
        elif code in (0x61, 0x65):  # append, appends
            items = [stack.pop()] if code == 0x61 else self.since_mark()
            _expect(list, stack[-1]).extend(items)
        elif code in (0x73, 0x75):  # setitem, setitems
            flat = [stack.pop(-2), stack.pop()] if code == 0x73 else self.since_mark()
            keys = flat[::2]
            check_keys(keys)
            _expect(dict, stack[-1]).update(zip(keys, flat[1::2], strict=False))
        elif code == 0x90:  # additems
            items = self.since_mark()
            check_keys(items)
            _expect(set, stack[-1]).update(items)
        else:
            return False
        return True

    def object(self, code: int) -> bool:
        """Resolve, call or initialize a known global; return whether ``code`` is such an opcode."""
        stack = self.stack
        if code == 0x63:  # global
            stack.append(self.named(self.line(), self.line()))
        elif code == 0x93:  # stack_global
            name, module = stack.pop(), stack.pop()
            stack.append(self.named(_expect(str, module), _expect(str, name)))
        elif code in (0x52, 0x81):  # reduce, newobj
            arguments, called = _expect(tuple, stack.pop()), stack.pop()
            if isinstance(called, Placeholder):
                called = _PLACEHOLDER
            if not isinstance(called, Constructor):
                raise PickleProblem("its pickle calls an unknown constructor")
            self.left -= sum(map(_cost, arguments))
            if self.left < 0:
                raise PickleProblem(f"its pickle asks for more than {MAX_OPERATIONS:,} operations")
            stack.append(called.make(*arguments))
        elif code == 0x51:  # binpersid
            stack.append(self.persistent(stack.pop()))
        elif code == 0x62:  # build: attributes of a container are ignored
            state = stack.pop()
            if not isinstance(stack[-1], dict | list | set):
                raise PickleProblem("its pickle sets the state of an object")
            if isinstance(stack[-1], Placeholder):
                stack[-1].set_state(state)
        else:
            return False
        return True

    def named(self, module: str, name: str) -> Any:
        """Return the replacement for a global; raises PickleProblem if it is unknown."""
        value = self.known.get((module, name))
        if value is None:
            raise PickleProblem(
                f"it asks for {module[:80]}.{name[:80]}, which is not a tensor, number, string or container; "
                "nothing was executed"
            )
        return value

    def remembered(self, number: int) -> Any:
        """Return an entry of the memo."""
        if number not in self.memo:
            raise IndexError
        return self.memo[number]

    def since_mark(self) -> list[Any]:
        """Pop the items pushed since the last mark."""
        stack = self.stack
        place = len(stack) - 1
        while stack[place] is not _MARK:  # raises IndexError if there is no mark
            place -= 1
            if place < 0:
                raise IndexError
        items = stack[place + 1 :]
        del stack[place:]
        return items

    def take(self, count: int) -> bytes:
        """Consume the next ``count`` bytes."""
        end = self.at + count
        if end > len(self.data):
            raise IndexError
        data = self.data[self.at : end]
        self.at = end
        return data

    def unsigned(self, width: int) -> int:
        """Consume a little-endian unsigned integer of ``width`` bytes."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        """Consume the bytes up to the next newline."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise IndexError
        text = self.data[self.at : end].decode("utf-8")
        self.at = end + 1
        return text


def _expect(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _cost(argument: Any) -> int:
    """Return the number of operations charged for an argument of a call."""
    if isinstance(argument, str | bytes):
        return len(argument) // _CHARACTERS
    return len(argument) if isinstance(argument, list | tuple | dict | set) else 0


def check_keys(keys: Iterable[Any]) -> None:
    """Raise PickleProblem unless all keys are strings, bytes, None or bounded integers: hashes of floats can be made to
    collide."""
    if not all(
        isinstance(key, str | bytes | PlaceholderKey | None) or (isinstance(key, int) and -_MAX_KEY < key < _MAX_KEY)
        for key in keys
    ):
        raise PickleProblem("its pickle has a key that is not a string, None or an integer below 2^31")
