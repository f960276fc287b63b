"""StructuralTag: text that is free but for parts between known begins and ends, to the Lark form of llguidance.

The formats are those of XGrammar, which SGLang and vLLM take (https://xgrammar.mlc.ai, "Structural Tag"), in both
spellings: ``{"format": {"type": ..., ...}}`` and the older ``{"structures": [...], "triggers": [...]}``.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tapscope.core.errors import RequestError
from tapscope.engine.params.json_fields import Fields
from tapscope.engine.structured_output.ebnf import translate
from tapscope.engine.structured_output.lark_writer import LarkWriter, one_of

Ends = tuple[str, ...] | None
"""Texts of which one must follow a part, and belongs to it; none: something else follows; None: nothing does."""

_DEPTH = 32  # of formats within each other
_SIZE = 4096  # formats in all


def structural_tag_to_lark(tag: Any, special: Mapping[str, int], marks: Mapping[str, int], whitespace: str) -> str:
    """The grammar of a decoded structural tag.

    ``special`` and ``marks`` are those of :class:`LarkWriter`; ``whitespace`` is a regular expression of what may stand
    between the parts of JSON. Raises RequestError, naming the field.
    """
    fields = Fields(tag, "structural_tag")
    fields.choice("type", ("structural_tag",))
    if "structures" in fields.values:
        form = _modern(fields)
    else:
        fields.refuse_unknown(("type", "format"))
        form = _required(fields, "format")
    rules = LarkWriter(special, marks)
    start = _Writer(rules, whitespace).write(form, None)
    return "\n".join(["%llguidance {}", f"start: {start}", *rules.lines()])


def _modern(fields: Fields) -> Fields:
    """The older spelling as a format."""
    fields.refuse_unknown(("type", "structures", "triggers"))
    tags = []
    for item in fields.objects("structures"):
        item.refuse_unknown(("begin", "schema", "end"))
        schema = True if item.values.get("schema") is True else (item.object("schema") or Fields({})).values
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"begin": item.name("begin"), "content": content, "end": item.text("end") or ""})
    triggers = fields.values.get("triggers")
    return Fields({"type": "triggered_tags", "triggers": triggers, "tags": tags}, fields.where)


class _Writer:
    """Writes formats as expressions over rules that it collects."""

    def __init__(self, rules: LarkWriter, whitespace: str) -> None:
        self._rules = rules
        self._whitespace = whitespace
        self._depth = self._size = 0

    def write(self, form: Fields, ends: Ends) -> str:
        """``form`` and one of ``ends``."""
        kind = form.choice("type", tuple(_FORMATS))
        if kind is None:
            raise form.wrong("type", f"it must be one of {', '.join(_FORMATS)}")
        known, method = _FORMATS[kind]
        form.refuse_unknown(("type", *known))
        self._size += 1
        self._depth += 1
        if self._depth > _DEPTH or self._size > _SIZE:
            raise RequestError(f"{form.where}: more than {_SIZE} formats, or {_DEPTH} within each other")
        written = method(self, form, ends)
        self._depth -= 1
        return written

    def const_string(self, form: Fields, ends: Ends) -> str:
        """One text."""
        return self._rules.closed(self._rules.text(form.name("value")), ends or ())

    def json_schema(self, form: Fields, ends: Ends) -> str:
        """JSON that a schema accepts."""
        style = form.text("style")
        if style not in (None, "json"):
            raise form.wrong("style", "only 'json' is supported")
        given = form.values.get("json_schema")
        schema = {} if given is True else _required(form, "json_schema").values
        asked = schema.get("x-guidance")
        schema = schema | {
            "x-guidance": {"whitespace_pattern": self._whitespace} | (asked if isinstance(asked, dict) else {})
        }
        return self._rules.closed(self._rules.rule(f"%json {json.dumps(schema)}"), ends or ())

    def regex(self, form: Fields, ends: Ends) -> str:
        """A text that matches a regular expression as a whole."""
        return self._rules.expression(form.name("pattern"), ends or ())

    def grammar(self, form: Fields, ends: Ends) -> str:
        """A text of a grammar in EBNF."""
        try:
            made = translate(form.name("grammar"))
        except ValueError as error:
            raise form.wrong("grammar", str(error)) from None
        if made.kind == "regex":
            return self._rules.expression(made.text, ends or ())
        return self._rules.closed(self._rules.rule(f"%lark {{\n{made.text}\n}}"), ends or ())

    def any_text(self, form: Fields, ends: Ends) -> str:
        """Any text up to the first of the ends."""
        return self._until(ends, ends or (), form)

    def sequence(self, form: Fields, ends: Ends) -> str:
        """One after the other."""
        *others, last = self._items(form, "elements")
        return " ".join([*(self.write(each, ()) for each in others), self.write(last, ends)])

    def either(self, form: Fields, ends: Ends) -> str:
        """One of several."""
        return one_of(self.write(each, ends) for each in self._items(form, "elements"))

    def tag(self, form: Fields, ends: Ends) -> str:
        """A begin, a content, an end."""
        return self._tag(form, form.text("begin") or "", ends)

    def triggered_tags(self, form: Fields, ends: Ends) -> str:
        """Free text in which each trigger begins one of the tags."""
        tags, triggers = self._items(form, "tags"), form.texts("triggers")
        if not triggers:
            raise form.wrong("triggers", "it must be a list of at least one text")
        for tag in tags:
            if not tag.name("begin").startswith(triggers):
                raise tag.wrong("begin", "it must begin with one of the triggers")
        once = form.flag("stop_after_first")
        after = ends if once else ()
        first = ""
        if form.flag("at_least_one"):
            first = one_of(self._tag(tag, tag.name("begin"), after) for tag in tags)
            if once:
                return first
        stops = (*triggers, *(ends or ()))
        free, options = self._until(ends, stops, form), self._triggered(tags, triggers, stops, after)
        return one_of([options, free]) if once else f"{first} ({options})* {free}".strip()

    def tags_with_separator(self, form: Fields, ends: Ends) -> str:
        """Tags and nothing but a text between them."""
        tags = self._items(form, "tags")
        if form.flag("stop_after_first"):
            written = one_of(self._tag(tag, tag.text("begin") or "", ()) for tag in tags)
        else:
            one = self._rules.rule(one_of(self._tag(tag, tag.text("begin") or "", ()) for tag in tags))
            written = f"({one} ({self._rules.text(form.text('separator') or '')} {one})*)"
        return self._rules.closed(written if form.flag("at_least_one") else f"({written})?", ends or ())

    def _triggered(self, tags: Sequence[Fields], triggers: Sequence[str], stops: Sequence[str], ends: Ends) -> str:
        """Free text up to a trigger, and what may follow it; a trigger that another one forestalls never comes."""
        options = []
        for trigger in dict.fromkeys(triggers):
            mine = [tag for tag in tags if tag.name("begin").startswith(trigger)]
            if not mine:
                raise RequestError(f"structural_tag: the trigger {trigger!r} begins no tag", param="structural_tag")
            if any(other in trigger[:-1] for other in triggers):
                continue
            rests = one_of(self._tag(tag, tag.name("begin")[len(trigger) :], ends) for tag in mine)
            options.append(f"{self._rules.upto((trigger,), stops)} {rests}")
        return one_of(options)

    def _tag(self, tag: Fields, begin: str, ends: Ends) -> str:
        """``tag``, of whose begin only ``begin`` is still to come."""
        tag.refuse_unknown(("type", "begin", "content", "end"))
        tag.choice("type", ("tag",))
        own = tag.texts("end") if tag.values.get("end") != "" else ()
        content = self.write(_required(tag, "content"), own or ends)
        written = f"{self._rules.text(begin)} {content}".strip()
        return self._rules.closed(written, ends or ()) if own else written

    def _items(self, form: Fields, name: str) -> list[Fields]:
        items = form.objects(name)
        if not items:
            raise form.wrong(name, "it must be a list of at least one object")
        return items

    def _until(self, ends: Ends, stops: Sequence[str], form: Fields) -> str:
        """Free text and its end; what else stops it is in ``stops``, too."""
        if ends == ():
            rule = "put it last, or into a tag with an end: else nobody can tell where its text ends"
            raise RequestError(f"{form.where}: {rule}", param=form.where)
        return self._rules.free(stops) if ends is None else self._rules.upto(ends, stops)


_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[_Writer, Fields, Ends], str]]] = {
    "const_string": (("value",), _Writer.const_string),
    "json_schema": (("json_schema", "style"), _Writer.json_schema),
    "regex": (("pattern",), _Writer.regex),
    "grammar": (("grammar",), _Writer.grammar),
    "any_text": ((), _Writer.any_text),
    "sequence": (("elements",), _Writer.sequence),
    "or": (("elements",), _Writer.either),
    "tag": (("begin", "content", "end"), _Writer.tag),
    "triggered_tags": (("triggers", "tags", "at_least_one", "stop_after_first"), _Writer.triggered_tags),
    "tags_with_separator": (("tags", "separator", "at_least_one", "stop_after_first"), _Writer.tags_with_separator),
}
"""Type -> its fields, and what writes it."""


def _required(fields: Fields, name: str) -> Fields:
    found = fields.object(name)
    if found is None:
        where = fields.path(name)
        raise RequestError(f"{where} is missing; it must be a JSON object", param=where)
    return found
