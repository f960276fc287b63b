"""EBNF as llama.cpp (GBNF) and XGrammar write it, to the forms of llguidance.

llguidance cuts its text into lexemes, each as long as it can be; EBNF knows characters only: `root ::= [a-z]+ "b"`
has "ab". So a grammar without recursion becomes one regular expression, and any other one a grammar whose lexemes are
single characters: both have exactly the grammar's texts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tapscope.engine.structured_output.ebnf_nodes import Alternatives, Characters, Node, Reference, Repeat, Sequence
from tapscope.engine.structured_output.ebnf_reader import read

_MAX_REGEX = 20_000  # characters; a longer expression takes longer to compile than a grammar


@dataclass(frozen=True, slots=True)
class Form:
    """What llguidance is to compile."""

    kind: str
    """``regex`` or ``lark``."""
    text: str


def translate(text: str) -> Form:
    """Raises ValueError, saying where, for what is no grammar."""
    rules = read(text)
    regex = _regex(rules)
    if regex is not None:
        return Form("regex", regex)
    numbers = {name: f"r{index}" for index, name in enumerate(rules)}
    lexemes = _Writer(lambda characters: f"/{_class(characters)}/", numbers.__getitem__, "(", " ", '""')
    lines = [f"{numbers[name]}: {lexemes.write(node)}" for name, node in rules.items()]
    return Form("lark", "\n".join([f"start: {numbers['root']}", *lines]))


class _NotRegularError(Exception):
    """It is recursive, or long."""


def _regex(rules: Mapping[str, Node]) -> str | None:
    """The grammar as one expression; None where it is recursive, or would be long."""
    written: dict[str, str] = {}
    under_way: set[str] = set()

    def refer(name: str) -> str:
        if name in under_way:
            raise _NotRegularError
        if name not in written:
            under_way.add(name)
            written[name] = f"(?:{writer.write(rules[name])})"
            under_way.remove(name)
            if sum(map(len, written.values())) > _MAX_REGEX:
                raise _NotRegularError
        return written[name]

    writer = _Writer(_class, refer, "(?:", "", "")
    try:
        return refer("root")
    except _NotRegularError:
        return None


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes nodes in one of the two forms."""

    characters: Callable[[Characters], str]
    refer: Callable[[str], str]
    opening: str
    """Begins a group."""
    space: str
    """Between what follows each other."""
    empty: str
    """The empty text."""

    def write(self, node: Node) -> str:
        match node:
            case Characters():
                return self.characters(node)
            case Reference(name):
                return self.refer(name)
            case Sequence(items):
                return self.space.join(map(self.write, items)) or self.empty
            case Alternatives(options):
                return f"{self.opening}{'|'.join(map(self.write, options))})"
            case Repeat(item, low, high):
                if high == 0:
                    return self.empty
                return f"{self.opening}{self.write(item)}){{{low},{'' if high is None else high}}}"


def _class(characters: Characters) -> str:
    ranges = characters.ranges if characters.ranges or not characters.is_negated else ((0, 0x10FFFF),)
    sign = "^" if characters.is_negated and characters.ranges else ""
    return f"[{sign}{''.join(f'{_code(low)}-{_code(high)}' for low, high in ranges)}]"


def _code(point: int) -> str:
    return f"\\u{{{point:x}}}"
