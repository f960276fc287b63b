"""Nodes: what the rules of an EBNF grammar are made of."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Characters:
    """One character: of [low, high] ranges of code points, or, negated, of none of them."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    """What another rule has."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other; the empty text where there are none."""

    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One of them."""

    options: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """From ``low`` to ``high`` (None: any number) times."""

    item: "Node"
    low: int
    high: int | None


Node = Characters | Reference | Sequence | Alternatives | Repeat


def ending(rules: dict[str, Node]) -> set[str]:
    """The rules with a text that ends."""
    known: set[str] = set()

    def ends(node: Node) -> bool:
        match node:
            case Reference(name):
                return name in known
            case Sequence(items):
                return all(map(ends, items))
            case Alternatives(options):
                return any(map(ends, options))
            case Repeat(item, low):
                return low == 0 or ends(item)
            case Characters():
                return True

    while new := {name for name, node in rules.items() if name not in known and ends(node)}:
        known |= new
    return known


def names(node: Node) -> Iterator[str]:
    """The rules that it refers to, in order, each as often as it does."""
    match node:
        case Reference(name):
            yield name
        case Sequence(nodes) | Alternatives(nodes):
            for each in nodes:
                yield from names(each)
        case Repeat(item):
            yield from names(item)
