"""Stop expressions as programs that read a text once, character by character, however they are written.

Python's own `re` searches by backtracking, which an expression can make take for ever; whoever sends one to a server
must not be able to. So its parser is used, and what it parsed becomes the states of an automaton (Thompson, CACM 11(6),
1968): as many steps a character as there are states, at most.
"""

import functools
import importlib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tapscope.core.errors import UsageError
from tapscope.core.formatting import short

MAX_STATES = 500
"""Of one expression, whose repetitions are written out."""
MAX_CHARACTERS = 5000
ACCEPT = 0
"""The state in which the expression is complete."""

_parser: Any = importlib.import_module("re._parser")
_compiler: Any = importlib.import_module("re._compiler")
_PREV_ONLY = {"AT_BEGINNING", "AT_BEGINNING_STRING"}
_END = "the end of a text that still grows ends nothing; leave '$' and '\\Z' out, or give '$' the flag (?m)"


@dataclass(slots=True, eq=False)
class State:
    """One of: what takes a character, a fork, a condition on what is left and right of here."""

    after: list[int]
    """Where it goes on."""
    takes: Callable[[str], bool] | None = None
    """Whether it takes a character."""
    holds: Callable[[str, str], bool] | None = None
    """Whether it holds between a character and the next one, each empty at an end of the text."""
    looks_ahead: bool = False
    """Whether :attr:`holds` depends on the next character."""


@dataclass(slots=True, eq=False)
class Program:
    """An expression, ready to be run."""

    text: str
    states: list[State] = field(default_factory=lambda: [State([])])
    start: int = ACCEPT

    def add(self, state: State) -> int:
        """Its number; raises UsageError when there are too many."""
        if len(self.states) >= MAX_STATES:
            rule = f"with its repetitions written out it has more than {MAX_STATES} characters and choices; shorten it"
            raise UsageError(f"stop_regex={short(self.text)}: {rule}")
        self.states.append(state)
        return len(self.states) - 1


@functools.lru_cache(256)
def compiled(text: str) -> Program:
    """Raises UsageError for what is no expression of Python's `re`, or needs backtracking, or is empty in any text."""
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"stop_regex={short(text)}: it has {len(text)} characters; at most {MAX_CHARACTERS}")
    program = Program(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of spellings that a later Python may read otherwise
            parsed = _parser.parse(text)
        program.start = _sequence(program, parsed, parsed.state.flags, ACCEPT)
    except (re.error, OverflowError) as error:
        raise UsageError(f"stop_regex={short(text)}: it is no regular expression: {error}") from None
    except RecursionError:
        raise UsageError(f"stop_regex={short(text)}: it is nested too deeply") from None
    if _is_nullable(program):
        raise UsageError(f"stop_regex={short(text)}: it matches the empty text, and would stop everything at once")
    return program


def _sequence(program: Program, items: Any, flags: int, after: int) -> int:
    """Number of the state where ``items`` begin; they are built from their end, which goes on at ``after``."""
    for op, value in reversed(list(items)):
        after = _item(program, str(op), value, flags, after, op)
    return after


def _item(program: Program, name: str, value: Any, flags: int, after: int, op: Any) -> int:
    if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        return program.add(State([after], takes=_taker(op, value, flags)))
    if name == "SUBPATTERN":
        _, added, removed, items = value
        return _sequence(program, items, (flags | added) & ~removed, after)
    if name == "BRANCH":
        return program.add(State([_sequence(program, items, flags, after) for items in value[1]]))
    if name in ("MAX_REPEAT", "MIN_REPEAT"):
        return _repeat(program, value, flags, after)
    if name == "AT":
        return program.add(_condition(program.text, str(value), flags, after))
    what = {"GROUPREF": "a reference to a group", "ASSERT": "look-around", "ASSERT_NOT": "look-around"}
    raise UsageError(f"stop_regex={short(program.text)}: {what.get(name, 'an atomic group')} is not supported")


def _repeat(program: Program, value: Any, flags: int, after: int) -> int:
    low, high, items = value
    if high is _parser.MAXREPEAT:
        fork = program.add(State([after]))
        program.states[fork].after.insert(0, _sequence(program, items, flags, fork))
        after = fork
    else:
        end = after
        for _ in range(high - low):
            after = program.add(State([_sequence(program, items, flags, after), end]))
    for _ in range(low):
        after = _sequence(program, items, flags, after)
    return after


def _taker(op: Any, value: Any, flags: int) -> Callable[[str], bool]:
    """Python's own judgement of one character."""
    state = _parser.State()
    state.flags = flags
    state.str = ""
    one = _compiler.compile(_parser.SubPattern(state, [(op, value)]), flags)
    return functools.lru_cache(512)(lambda character: one.fullmatch(character) is not None)


def _condition(text: str, name: str, flags: int, after: int) -> State:
    lines = bool(flags & re.MULTILINE)
    if name in ("AT_BOUNDARY", "AT_NON_BOUNDARY"):
        inside = name == "AT_NON_BOUNDARY"
        return State([after], holds=lambda left, right: (_is_word(left) == _is_word(right)) == inside, looks_ahead=True)
    if name in _PREV_ONLY:
        ends = ("", "\n") if lines and name == "AT_BEGINNING" else ("",)
        return State([after], holds=lambda left, _: left in ends)
    if name == "AT_END" and lines:
        return State([after], holds=lambda _, right: right in ("", "\n"), looks_ahead=True)
    raise UsageError(f"stop_regex={short(text)}: {_END}")


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _is_nullable(program: Program) -> bool:
    """Whether it can be complete without taking a character, whatever stands around."""
    seen, todo = set(), [program.start]
    while todo:
        number = todo.pop()
        if number not in seen and program.states[number].takes is None:
            seen.add(number)
            todo += program.states[number].after
    return ACCEPT in seen
