"""Structural tags: text is free up to a trigger, after which it must match the tag."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from checkpoints import make_llama, tokenizer_json
from llguidance import StructTag
from tokenizers import AddedToken, Tokenizer

from tapscope.core.errors import UsageError
from tapscope.engine import LLM, SamplingParams
from tapscope.engine.structured_output.grammar import Constraint, Grammars

EOS = 1
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=y>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
SPECIAL = {"structures": [{"begin": "<|call|>go", "schema": SCHEMA, "end": ""}], "triggers": ["<|call|>"]}


def _format(**kv_format: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": kv_format}


def _tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


MARK = {"structures": [{"begin": "<mark>x", "schema": SCHEMA, "end": "</mark>"}], "triggers": ["<mark>"]}
THINK = _format(
    type="sequence",
    elements=[
        _tag("<think>", {"type": "any_text"}, "</think>"),
        {"type": "or", "elements": [{"type": "const_string", "value": "yes"}, {"type": "regex", "pattern": "no+/"}]},
    ],
)
LIST = {
    "type": "tags_with_separator",
    "tags": [_tag("<a>", JSON, "</a>")],
    "separator": ", ",
}
NESTED = 'root ::= "(" root? ")"'
CALLS = {
    "type": "triggered_tags",
    "triggers": ["<a", "<b"],
    "tags": [
        _tag("<a>", {"type": "regex", "pattern": "[a-z<>/]*"}, "</a>"),
        _tag("<b>", {"type": "grammar", "grammar": NESTED}, ["</b>", "!"]),
    ],
}
WITHIN = _format(type="sequence", elements=[_tag("{", CALLS, "}"), {"type": "const_string", "value": "."}])
ODD = '\x01 é😀"\\\n/}{%\x7f'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer.from_str(tokenizer_json())
    made.add_special_tokens([AddedToken("<|call|>", special=True)])
    made.add_tokens([AddedToken(text, special=False) for text in ("<mark>", "<other>")])
    return made


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    return Grammars(path, tokenizer.get_vocab_size(), [EOS])


@pytest.mark.parametrize(
    ("tag", "texts"),
    [
        (OLD, ["hi", 'hi <f=x>{"a":1}</f> b', '<f=y>true</f><f=x>{"a": 2}</f>', "<g", ""]),
        (SPECIAL, ["hi", 'hi <|call|>go{"a":1}', 'hi <|call|>go{"a":1} and <|call|>go{"a":2}']),
        (MARK, ["<other>hi", 'hi<other> <mark>x{"a":1}</mark> b<mark>x{"a":1}</mark>']),
        (THINK, ["<think>ab</think>yes", "<think></think>nooo/", "<think></thin</think>yes"]),
        (_format(**LIST), ["", '<a>{"a":1}</a>', '<a>{"a":1}</a>, <a>{"a":2}</a>']),
        (_format(**CALLS), ["x", "<a>xx</a> tail", "<b>(())! t <a>b</a>", "<b>()</b>"]),
        (_format(**CALLS, at_least_one=True), ["<a>xx</a> tail", "<b>()! t <b>()!"]),
        (_format(**CALLS, stop_after_first=True), ["x", "x <a></a>", "<b>()!"]),
        (_format(**CALLS, stop_after_first=True, at_least_one=True), ["<a></a>", "<b>()</b>"]),
        (WITHIN, ["{}.", "{ab <b>()! c}.", "{<a>x</a>}."]),
        (_format(**_tag(ODD, {"type": "any_text"}, ODD)), [ODD + ODD, ODD + "x" + ODD]),
    ],
)
def test_structural_tag_allows_its_strings(
    grammars: Grammars, tokenizer: Tokenizer, tag: dict[str, Any], texts: list[str]
) -> None:
    for text in texts:
        assert _end(grammars, tokenizer, tag, text) is None, text


@pytest.mark.parametrize(
    ("tag", "text", "good"),
    [
        (OLD, "hi <f=z>", "hi <f="),
        (OLD, '<f=x>{"b":1}</f>', '<f=x>{"'),
        (OLD, '<f=x>{"a":1}</f', '<f=x>{"a":1}</f'),
        (SPECIAL, '<|call|>{"a":1}', "<|call|>"),
        (MARK, '<other><mark>{"a":1}', "<other><mark>"),
        (MARK, "hi <|call|>", "hi "),
        (MARK | {"triggers": ["<ma"]}, "<other><mark>", "<other>"),
        (THINK, "yes", ""),
        (THINK, "<think></think>maybe", "<think></think>"),
        (THINK, "<think></think>", "<think></think>"),
        (_format(**LIST, at_least_one=True), "", ""),
        (_format(**LIST, stop_after_first=True), '<a>{"a":1}</a>, ', '<a>{"a":1}</a>'),
        (_format(**CALLS, at_least_one=True), "x", ""),
        (_format(**CALLS), "<a", "<a"),
        (_format(**CALLS, stop_after_first=True), "x <b>()! y", "x <b>()!"),
        (WITHIN, "{a.", "{a."),
        (WITHIN, "{<b>}.", "{<b>"),
    ],
)
def test_structural_tag_forbids_other_strings(
    grammars: Grammars, tokenizer: Tokenizer, tag: dict[str, Any], text: str, good: str
) -> None:
    assert _end(grammars, tokenizer, tag, text) == good


def _end(grammars: Grammars, tokenizer: Tokenizer, tag: dict[str, Any], text: str) -> str | None:
    """Return the longest allowed prefix of ``text``; None if all of ``text`` is allowed as a complete output."""
    constraint = grammars.start(SamplingParams(structural_tag=tag))
    assert constraint is not None
    return _written(constraint, tokenizer, text)


def _written(constraint: Constraint, tokenizer: Tokenizer, text: str) -> str | None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for place, token in enumerate(ids):
        if constraint.finished or not _allows(constraint.mask(), token):
            return tokenizer.decode(ids[:place], skip_special_tokens=False)
        constraint.accept(token)
    ends = constraint.finished or _allows(constraint.mask(), EOS)
    return None if ends else text


def _allows(mask: Any, token: int) -> bool:
    return bool((int(mask[token // 32]) >> (token % 32)) & 1)


@pytest.mark.parametrize(
    ("tag", "text", "good"),
    [(OLD, 'hi <f=x>{"a":1}</f> b', None), (SPECIAL, 'hi <|call|>go{"a":1}', None), (MARK, "<other>hi", "")],
)
def test_structural_tag_differs_from_llguidances_converter(
    grammars: Grammars, tokenizer: Tokenizer, tag: dict[str, Any], text: str, good: str | None
) -> None:
    """Show why :mod:`structural_tag` exists: ``StructTag`` supports only the older format, and no marks in free text.

    Of the 49 cases above, ``StructTag`` cannot express 32 and differs in 4 of the other 17 (llguidance 1.9.1). ``good``
    is the prefix that it allows of a ``text`` that the tag allows completely.
    """
    (item,), (trigger,) = tag["structures"][:1], tag["triggers"]
    theirs = StructTag.to_grammar(
        [StructTag(trigger=trigger, begin=item["begin"], grammar=item["schema"], end=item["end"])]
    )
    assert _end(grammars, tokenizer, tag, text) is None
    constraint = grammars.start(SamplingParams(grammar=theirs))
    assert constraint is not None
    assert _written(constraint, tokenizer, text) == good


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ({}, r"structural_tag\.format is missing"),
        ("{", "structural_tag='{': "),
        ("[1]", "structural_tag must be a JSON object"),
        (_format(type=[]), r"structural_tag\.format\.type=\[\]: must be one of const_string, "),
        (_format(type="any_text", begin="x"), r"structural_tag\.format\.begin is not supported"),
        (_format(type="const_string", value=""), "value='': must be a non-empty string"),
        (_format(type="json_schema", json_schema=[]), r"json_schema=\[\]: must be a JSON object or true"),
        (_format(type="json_schema", json_schema=False), "json_schema=False: must be a JSON object or true"),
        (_format(type="json_schema", json_schema={}, style="qwen_xml"), "style='qwen_xml': must be json"),
        (_format(type="regex", pattern="("), "invalid regex"),
        (_format(type="grammar", grammar="x"), "expected ::="),
        (_format(type="or", elements=[]), r"elements=\[\]: must be a non-empty list"),
        (_format(type="sequence", elements=[{"type": "any_text"}] * 2), r"elements\[0\]: put it last, or into a tag"),
        ({"structures": [], "triggers": ["x"]}, r"structures=\[\]: must be a non-empty list"),
        (OLD | {"triggers": []}, r"triggers=\[\]: must be a non-empty list"),
        (OLD | {"triggers": ["<g"]}, r"structures?\[0\]\.begin|tags\[0\]\.begin"),
        (OLD | {"triggers": ["<f=", "z"]}, "no tag begins with the trigger 'z'"),
    ],
)
def test_structural_tag_errors_name_the_field(grammars: Grammars, tag: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        grammars.start(SamplingParams(structural_tag=tag))


def test_structural_tag_limits_nesting(grammars: Grammars) -> None:
    kv_format: dict[str, Any] = {"type": "any_text"}
    for _ in range(40):
        kv_format = {"type": "or", "elements": [kv_format]}
    with pytest.raises(UsageError, match="nested more than 32 deep"):
        grammars.start(SamplingParams(structural_tag=_format(**kv_format)))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1), page_size=4) as made:
        yield made


def test_structural_tag_constrains_output(llm: LLM) -> None:
    dense = {"type": "json_schema", "json_schema": SCHEMA | {"x-guidance": {"whitespace_pattern": " ?"}}}
    kv_format = _format(**CALLS | {"triggers": ["<f"], "tags": [_tag("<f>", dense, "</f>")]}, at_least_one=True)
    likes = {llm.tokenizer.encode("<")[0]: 8.0, llm.tokenizer.encode("f")[0]: 3.0, llm.tokenizer.encode("}")[0]: 4.0}
    params = [
        SamplingParams(max_new_tokens=80, temperature=1.5, seed=seed, structural_tag=kv_format, logit_bias=likes)
        for seed in range(4)
    ]
    outputs = [generation.text for generation in llm.generate([[5, 6]] * 4, params)]
    calls = [call for text in outputs for call in re.findall(r"<f>(.*?)</f>", text, re.DOTALL)]
    assert len(calls) >= 4
    assert all(isinstance(json.loads(call)["a"], int) for call in calls)
    assert all(text.startswith("<f>") for text in outputs)
