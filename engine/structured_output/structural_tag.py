"""StructuralTag: convert structural tags (free text with constrained parts) to llguidance's Lark syntax.

The formats are those of XGrammar, which SGLang and vLLM accept (https://xgrammar.mlc.ai, "Structural Tag"):
``{"format": {"type": ..., ...}}`` and the older ``{"structures": [...], "triggers": [...]}``.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tapscope.core.convert import InvalidValueError, NonEmptyStr, convert, must_be
from tapscope.core.errors import RequestError
from tapscope.engine.structured_output.ebnf import translate
from tapscope.engine.structured_output.lark_writer import LarkWriter, one_of

Ends = tuple[str, ...] | None
"""Strings, one of which must follow a format; (): another format follows; None: the output ends after the format."""

_DEPTH = 32  # maximum nesting of formats
_SIZE = 4096  # maximum number of formats

JsonSchema = Annotated[dict[str, Any] | bool, must_be("a JSON object or true")]


class ConstString(Struct, kw_only=True, forbid_unknown_fields=True, tag="const_string"):
    """A fixed string."""

    value: NonEmptyStr


class JsonSchemaFormat(Struct, kw_only=True, forbid_unknown_fields=True, tag="json_schema"):
    """JSON that matches a schema."""

    json_schema: JsonSchema
    style: Literal["json"] | None = None


class Regex(Struct, kw_only=True, forbid_unknown_fields=True, tag="regex"):
    """A string that fully matches a regular expression."""

    pattern: NonEmptyStr


class Grammar(Struct, kw_only=True, forbid_unknown_fields=True, tag="grammar"):
    """A string that matches an EBNF grammar."""

    grammar: NonEmptyStr


class AnyText(Struct, kw_only=True, forbid_unknown_fields=True, tag="any_text"):
    """Any text up to the first end string."""


class SequenceFormat(Struct, kw_only=True, forbid_unknown_fields=True, tag="sequence"):
    """Concatenation of formats."""

    elements: Annotated[list["Format"], Meta(min_length=1)]


class Or(Struct, kw_only=True, forbid_unknown_fields=True, tag="or"):
    """A choice between formats, one of which must match."""

    elements: Annotated[list["Format"], Meta(min_length=1)]


class Tag(Struct, kw_only=True, forbid_unknown_fields=True, tag="tag"):
    """A begin string, a content format, and an end string or one of several end strings."""

    content: "Format"
    begin: str = ""
    end: str | list[NonEmptyStr] | None = None

    @property
    def ends(self) -> tuple[str, ...]:
        """All end strings; empty if the tag ends with its content."""
        return ((self.end,) if self.end else ()) if isinstance(self.end, str) else tuple(self.end or ())


class TriggeredTags(Struct, kw_only=True, forbid_unknown_fields=True, tag="triggered_tags"):
    """Free text in which each trigger string starts one of the tags."""

    triggers: Annotated[list[NonEmptyStr], Meta(min_length=1)]
    tags: Annotated[list[Tag], Meta(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(Struct, kw_only=True, forbid_unknown_fields=True, tag="tags_with_separator"):
    """Tags separated by a string."""

    tags: Annotated[list[Tag], Meta(min_length=1)]
    separator: str = ""
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString | JsonSchemaFormat | Regex | Grammar | AnyText | SequenceFormat | Or | Tag | TriggeredTags
) | TagsWithSeparator


class StructuralTag(Struct, kw_only=True, forbid_unknown_fields=True):
    """A structural tag."""

    format: Format
    type: Literal["structural_tag"] = "structural_tag"


class Structure(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tag in the older format."""

    begin: NonEmptyStr
    schema: JsonSchema = True
    end: str = ""


class OlderStructuralTag(Struct, kw_only=True, forbid_unknown_fields=True):
    """A structural tag in the older format."""

    structures: Annotated[list[Structure], Meta(min_length=1)]
    triggers: Annotated[list[NonEmptyStr], Meta(min_length=1)]
    type: Literal["structural_tag"] = "structural_tag"


def structural_tag_to_lark(tag: Any, special: Mapping[str, int], marks: Mapping[str, int], whitespace: str) -> str:
    """Convert a decoded structural tag to a Lark grammar.

    ``special`` and ``marks`` are the arguments of :class:`LarkWriter`; ``whitespace`` is a regular expression for
    whitespace between JSON tokens. The RequestError names the field.
    """
    root = "structural_tag"
    try:
        if isinstance(tag, dict) and "structures" in tag:
            older: OlderStructuralTag = convert(tag, OlderStructuralTag, root)
            tags = [_tag_of(each) for each in older.structures]
            form: Format = TriggeredTags(triggers=older.triggers, tags=tags)
            where = root
        else:
            form = convert(tag, StructuralTag, root).format
            where = f"{root}.format"
    except InvalidValueError as error:
        text = str(error) if error.path != root else f"{root} must be a JSON object"
        raise RequestError(text, param=error.path) from None
    writer = LarkWriter(special, marks)
    start = _FormatWriter(writer, whitespace).write(form, None, where)
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.lines()])


def _tag_of(structure: Structure) -> Tag:
    content = JsonSchemaFormat(json_schema=structure.schema)
    return Tag(begin=structure.begin, content=content, end=structure.end)


class _FormatWriter:
    """Writer of formats as Lark expressions; a :class:`LarkWriter` collects their rules."""

    def __init__(self, rules: LarkWriter, whitespace: str) -> None:
        self._rules = rules
        self._whitespace = whitespace
        self._depth = self._size = 0

    def write(self, form: Format, ends: Ends, where: str) -> str:
        """Return an expression for ``form`` followed by one of ``ends``; ``where`` is the path of ``form``, for errors.

        Raises RequestError.
        """
        self._size += 1
        self._depth += 1
        if self._depth > _DEPTH or self._size > _SIZE:
            raise RequestError(f"{where}: more than {_SIZE} formats, or nested more than {_DEPTH} deep")
        written = self._write(form, ends, where)
        self._depth -= 1
        return written

    def _write(self, form: Format, ends: Ends, where: str) -> str:
        match form:
            case ConstString(value=value):
                return self._rules.closed(self._rules.text(value), ends or ())
            case JsonSchemaFormat():
                return self._json_schema(form, ends, where)
            case Regex(pattern=pattern):
                return self._rules.expression(pattern, ends or ())
            case Grammar():
                return self._grammar(form, ends, where)
            case AnyText():
                return self._until(ends, ends or (), where)
            case SequenceFormat(elements=elements):
                ends_of = [*[()] * (len(elements) - 1), ends]
                items = enumerate(zip(elements, ends_of, strict=True))
                return " ".join(self.write(each, end, f"{where}.elements[{i}]") for i, (each, end) in items)
            case Or(elements=elements):
                return one_of(self.write(each, ends, f"{where}.elements[{i}]") for i, each in enumerate(elements))
            case Tag():
                return self._tag(form, form.begin, ends, where)
            case TriggeredTags():
                return self._triggered_tags(form, ends, where)
            case TagsWithSeparator():
                return self._tags_with_separator(form, ends, where)

    def _json_schema(self, form: JsonSchemaFormat, ends: Ends, where: str) -> str:
        if form.json_schema is False:
            name = f"{where}.json_schema"
            raise RequestError(f"{name}=False: must be a JSON object or true", param=name)
        schema = form.json_schema if isinstance(form.json_schema, dict) else {}
        given = schema.get("x-guidance")
        options = {"whitespace_pattern": self._whitespace} | (given if isinstance(given, dict) else {})
        return self._rules.closed(self._rules.rule(f"%json {json.dumps(schema | {'x-guidance': options})}"), ends or ())

    def _grammar(self, form: Grammar, ends: Ends, where: str) -> str:
        try:
            translated = translate(form.grammar)
        except ValueError as error:
            raise RequestError(f"{where}.grammar: {error}", param=f"{where}.grammar") from None
        if translated.kind == "regex":
            return self._rules.expression(translated.text, ends or ())
        return self._rules.closed(self._rules.rule(f"%lark {{\n{translated.text}\n}}"), ends or ())

    def _triggered_tags(self, form: TriggeredTags, ends: Ends, where: str) -> str:
        triggers = tuple(form.triggers)
        for index, tag in enumerate(form.tags):
            if not tag.begin.startswith(triggers):
                name = f"{where}.tags[{index}].begin"
                raise RequestError(f"{name}={tag.begin!r}: must begin with one of the triggers", param=name)
        after = ends if form.stop_after_first else ()
        first = ""
        if form.at_least_one:
            first = one_of(self._tag(tag, tag.begin, after, where) for tag in form.tags)
            if form.stop_after_first:
                return first
        stops = (*triggers, *(ends or ()))
        free, options = self._until(ends, stops, where), self._triggered(form, stops, after, where)
        return one_of([options, free]) if form.stop_after_first else f"{first} ({options})* {free}".strip()

    def _tags_with_separator(self, form: TagsWithSeparator, ends: Ends, where: str) -> str:
        written = one_of(self._tag(tag, tag.begin, (), where) for tag in form.tags)
        if not form.stop_after_first:
            one = self._rules.rule(written)
            written = f"({one} ({self._rules.text(form.separator)} {one})*)"
        return self._rules.closed(written if form.at_least_one else f"({written})?", ends or ())

    def _triggered(self, form: TriggeredTags, stops: Sequence[str], ends: Ends, where: str) -> str:
        """Return an expression for free text up to a trigger, followed by one of the trigger's tags.

        A trigger that contains another trigger which ends earlier cannot occur, and is left out.
        """
        options = []
        for trigger in dict.fromkeys(form.triggers):
            matching = [tag for tag in form.tags if tag.begin.startswith(trigger)]
            if not matching:
                raise RequestError(
                    f"structural_tag: no tag begins with the trigger {trigger!r}", param="structural_tag"
                )
            if any(other in trigger[:-1] for other in form.triggers):
                continue
            rests = one_of(self._tag(tag, tag.begin[len(trigger) :], ends, where) for tag in matching)
            options.append(f"{self._rules.upto((trigger,), stops)} {rests}")
        return one_of(options)

    def _tag(self, tag: Tag, begin: str, ends: Ends, where: str) -> str:
        """Return an expression for ``tag``; ``begin`` is the remaining part of its begin string."""
        content = self.write(tag.content, tag.ends or ends, f"{where}.content")
        written = f"{self._rules.text(begin)} {content}".strip()
        return self._rules.closed(written, ends or ()) if tag.ends else written

    def _until(self, ends: Ends, stops: Sequence[str], where: str) -> str:
        """Return an expression for free text up to one of ``ends``, or up to the end of the output if None.

        Marks that overlap one of ``stops`` are excluded. Raises RequestError if another format follows directly.
        """
        if ends == ():
            rule = "put it last, or into a tag with an end; otherwise the end of its text is ambiguous"
            raise RequestError(f"{where}: {rule}", param=where)
        return self._rules.free(stops) if ends is None else self._rules.upto(ends, stops)
