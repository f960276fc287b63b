"""Convert the EBNF of llama.cpp (GBNF) and XGrammar to llguidance's formats.

llguidance ships a converter (``gbnf_to_lark``) that turns rules into greedy lexemes. EBNF, however, is defined on
characters: `x "b"` with `x ::= [a-z]+` matches "ab", but the lexeme of x would consume the b. Therefore a grammar
without recursion becomes one regular expression, and a recursive grammar becomes one whose lexemes are single
characters. Both accept exactly the language of the original grammar;
``tests/engine/structured_output/test_grammar.py`` compares them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_MAX_REGEX = 20_000  # characters; a longer expression compiles more slowly than a grammar
_MAX_TEXT = 100_000
_MAX_DEPTH = 100
_TOP = 0x10FFFF
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BOUNDS = re.compile(r"\{\s*(\d{1,6})\s*(?:(,)\s*(\d{1,6})?\s*)?\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "b": "\b", "0": "\0"}


@dataclass(frozen=True, slots=True)
class Characters:
    """One character within (if negated, outside of) the inclusive code point ranges [low, high]."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to another rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Concatenation of items; without items, the empty string."""

    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Alternatives:
    """A choice between alternatives, one of which must match."""

    options: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """An item repeated ``low`` to ``high`` times; None: no upper limit."""

    item: "Node"
    low: int
    high: int | None


Node = Characters | Reference | Sequence | Alternatives | Repeat


def ending(rules: dict[str, Node]) -> set[str]:
    """Return the names of the rules that match at least one finite string."""
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
    """Yield the names of the rules that ``node`` refers to, in order and with repetitions."""
    match node:
        case Reference(name):
            yield name
        case Sequence(nodes) | Alternatives(nodes):
            for each in nodes:
                yield from names(each)
        case Repeat(item):
            yield from names(item)


@dataclass(frozen=True, slots=True)
class GuidanceGrammar:
    """A grammar in one of llguidance's formats."""

    kind: str
    """``regex`` or ``lark``."""
    text: str


def translate(text: str) -> GuidanceGrammar:
    """Convert an EBNF grammar; raises ValueError with line and column if it is invalid."""
    rules = read(text)
    regex = _regex(rules)
    if regex is not None:
        return GuidanceGrammar("regex", regex)
    numbers = {name: f"r{index}" for index, name in enumerate(rules)}
    lexemes = _Writer(lambda characters: f"/{_class(characters)}/", numbers.__getitem__, "(", " ", '""')
    lines = [f"{numbers[name]}: {lexemes.write(node)}" for name, node in rules.items()]
    return GuidanceGrammar("lark", "\n".join([f"start: {numbers['root']}", *lines]))


class _NotRegularError(Exception):
    """Raised if a grammar is recursive or its regular expression would be too long."""


def _regex(rules: Mapping[str, Node]) -> str | None:
    """Convert the grammar to one regular expression; None if it is recursive or the expression would be too long."""
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
    """Writer of nodes as a regular expression or in Lark syntax, depending on the fields."""

    characters: Callable[[Characters], str]
    refer: Callable[[str], str]
    opening: str
    """Text that opens a group."""
    space: str
    """Separator between concatenated items."""
    empty: str
    """Text that matches the empty string."""

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


def read(text: str) -> dict[str, Node]:
    """Parse an EBNF grammar to a node per rule name; the ValueError has line, column and the expected input."""
    if len(text) > _MAX_TEXT:
        raise ValueError(f"it has {len(text)} characters; at most {_MAX_TEXT}")
    rules = _Reader(text).rules()
    if "root" not in rules:
        raise ValueError("it has no rule root, which every grammar starts with; write root ::= …")
    missing = next((name for node in rules.values() for name in names(node) if name not in rules), None)
    if missing is not None:
        raise ValueError(f"unknown rule {missing}; rules: {', '.join(rules)}")
    if "root" not in ending(rules):
        raise ValueError("rule root has no finite string; give it an alternative that does not lead back to it")
    return rules


class _Reader:
    """Recursive-descent parser of EBNF."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._blank()
        while self._at < len(self._text):
            name = self._name("the name of a rule")
            if name in rules:
                raise self._wrong(f"rule {name} is defined twice")
            self._expect("::=")
            rules[name] = self._alternatives()
        return rules

    def _alternatives(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Alternatives(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while (item := self._item()) is not None:
            items.append(item)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self) -> Node | None:
        """Parse the next item with its repetitions; None at the end of an alternative, a group or a rule."""
        item = self._atom()
        while item is not None:
            if (bounds := _BOUNDS.match(self._text, self._at)) is not None:
                self._at = bounds.end()
                self._blank()
                low, comma, high = bounds.groups()
                most = int(high) if high else None if comma else int(low)
                if most is not None and most < int(low):
                    raise self._wrong(f"{bounds[0]} has a minimum above its maximum")
                item = Repeat(item, int(low), most)
            elif self._take("*"):
                item = Repeat(item, 0, None)
            elif self._take("+"):
                item = Repeat(item, 1, None)
            elif self._take("?"):
                item = Repeat(item, 0, 1)
            else:
                break
        return item

    def _atom(self) -> Node | None:
        sign = self._text[self._at : self._at + 1]
        if sign in ("", "|", ")"):
            return None
        if sign == '"':
            return self._literal()
        if sign == "[":
            return self._class()
        if self._take("."):
            return Characters((), is_negated=True)
        if self._text.startswith("(=", self._at):
            raise self._wrong("look-ahead is not supported")
        if sign == "(":
            return self._group()
        begin = self._at
        name = self._name('a literal "…", a class […], a group (…) or the name of a rule')
        if self._text.startswith("::=", self._at):  # the name starts the next rule
            self._at = begin
            return None
        return Reference(name)

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._wrong(f"groups are nested more than {_MAX_DEPTH} deep")
        self._expect("(")
        inner = self._alternatives()
        self._expect(")")
        self._depth -= 1
        return inner

    def _literal(self) -> Node:
        self._at += 1
        codes = []
        while self._peek('a literal needs its closing "') != '"':
            codes.append(self._character())
        self._at += 1
        self._blank()
        return Sequence(tuple(Characters(((code, code),)) for code in codes))

    def _class(self) -> Node:
        self._at += 1
        is_negated = self._peek("a class needs its closing ]") == "^"
        self._at += is_negated
        ranges = []
        while self._peek("a class needs its closing ]") != "]":
            low = high = self._character()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                self._peek("a class needs its closing ]")
                high = self._character()
            if high < low:
                raise self._wrong(f"{chr(low)}-{chr(high)} runs backwards")
            ranges.append((low, high))
        self._at += 1
        self._blank()
        if not ranges and not is_negated:
            raise self._wrong("the class [] has no character")
        return Characters(tuple(ranges), is_negated)

    def _character(self) -> int:
        """Parse the next character, which may be escaped, to its code point."""
        sign = self._text[self._at]
        self._at += 1
        if sign != "\\":
            return ord(sign)
        kind = self._peek("a literal cannot end with \\")
        self._at += 1
        if (size := _HEX.get(kind)) is None:
            return ord(_ESCAPES.get(kind, kind)) if not kind.isalnum() or kind in _ESCAPES else self._unknown(kind)
        digits = self._text[self._at : self._at + size]
        if not re.fullmatch(f"[0-9a-fA-F]{{{size}}}", digits) or int(digits, 16) > _TOP:
            raise self._wrong(f"\\{kind} needs {size} hexadecimal digits of a character")
        if 0xD800 <= int(digits, 16) < 0xE000:
            raise self._wrong(f"\\{kind}{digits} is a surrogate; write the character as \\U and eight digits")
        self._at += size
        return int(digits, 16)

    def _unknown(self, kind: str) -> int:
        known = " ".join(f"\\{each}" for each in [*_ESCAPES, *_HEX])
        raise self._wrong(f"unknown escape \\{kind}; escapes: {known}")

    def _name(self, wanted: str) -> str:
        if (match := _NAME.match(self._text, self._at)) is None:
            raise self._wrong(f"expected {wanted}")
        self._at = match.end()
        self._blank()
        return match[0]

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise self._wrong(f"expected {sign}")

    def _take(self, sign: str) -> bool:
        if not self._text.startswith(sign, self._at):
            return False
        self._at += len(sign)
        self._blank()
        return True

    def _peek(self, otherwise: str) -> str:
        if self._at >= len(self._text):
            raise self._wrong(otherwise)
        return self._text[self._at]

    def _blank(self) -> None:
        match = _BLANK.match(self._text, self._at)
        self._at = match.end() if match is not None else self._at

    def _wrong(self, what: str) -> ValueError:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - (self._text.rfind("\n", 0, self._at) + 1) + 1
        return ValueError(f"line {line}, column {column}: {what}")
