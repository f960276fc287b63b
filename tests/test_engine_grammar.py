"""Constrained output: whatever a random model would like to say, its text parses and is what the schema allows."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from checkpoints import make_llama
from pydantic import BaseModel, ConfigDict, Field

from tapscope.engine import LLM, SamplingParams
from tapscope.errors import UsageError


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    # More logits than the tokenizer has tokens, as padded vocabularies of real models.
    with LLM(make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1, vocab_size=544), page_size=4) as made:
        yield made


class Item(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(max_length=6)
    kind: Literal["a", "béta", "😀"]
    count: int = Field(ge=0, le=9999)
    tags: list[bool] = Field(max_length=3)


SCHEMA = json.dumps(Item.model_json_schema())


def _params(seed: int, **constraint: str) -> SamplingParams:
    return SamplingParams(max_new_tokens=220, temperature=1.5, seed=seed, **constraint)


def test_json_validates_whatever_the_weights_prefer_and_whoever_else_runs(llm: LLM) -> None:
    params = [_params(seed, json_schema=SCHEMA) for seed in range(4)] + [SamplingParams(max_new_tokens=30)]
    generations = llm.generate([[5, 6]] * 5, params)
    texts = []
    for generation in generations[:4]:
        assert generation.finish_reason == "stop"
        Item.model_validate_json(generation.text)
        texts.append(generation.text)
    assert len(set(texts)) == 4
    free = llm.generate([[5, 6]], SamplingParams(max_new_tokens=30))[0]
    assert generations[4].token_ids == free.token_ids
    assert llm.generate([[5, 6]], params[3])[0].token_ids == generations[3].token_ids


@pytest.mark.parametrize("pattern", [r"(ab|cd){2,5}", r"[0-9]{3}-[a-f]{2}", r"é+😀?\n", r"yes|no", r"\d+(\.\d\d)?"])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_text_matches_its_regular_expression(llm: LLM, pattern: str, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=64, temperature=temperature, seed=3, regex=pattern)
    (generation,) = llm.generate([[5, 6]], params)
    if generation.finish_reason == "stop":
        assert re.fullmatch(pattern, generation.text)
    else:  # repetition without a bound may last
        assert generation.finish_reason == "length"
        assert "+" in pattern


def test_any_json_value(llm: LLM) -> None:
    (generation,) = llm.generate(
        [[5]], SamplingParams(max_new_tokens=64, json_schema="true", logit_bias={22: 30, 1: 60})
    )
    json.loads(generation.text)
    assert generation.finish_reason == "stop"


def test_a_grammar_in_lark_form(llm: LLM) -> None:
    lark = 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/'
    texts = [g.text for g in llm.generate([[5]] * 4, [_params(seed, grammar=lark) for seed in range(4)])]
    for text in texts:
        depth = text.count("(")
        assert re.fullmatch(r"\(" * depth + r"\d{1,3}" + r"\)" * depth, text)


def test_a_complete_output_ends_at_once_and_an_open_one_by_an_end_token(llm: LLM) -> None:
    (whole,) = llm.generate([[5]], SamplingParams(max_new_tokens=64, regex="abcd"))
    assert (whole.text, whole.finish_reason, whole.matched) == ("abcd", "stop", None)
    (ended,) = llm.generate([[5]], SamplingParams(max_new_tokens=64, regex="a+", logit_bias={1: 100}))
    assert (ended.text, ended.finish_reason, ended.matched) == ("a", "stop", 1)


def test_min_new_tokens_and_ignore_eos_cannot_make_a_constrained_output_wrong(llm: LLM) -> None:
    params = SamplingParams(
        max_new_tokens=64, min_new_tokens=50, ignore_eos=True, regex="(no){1,2}", logit_bias={1: 50}
    )
    (generation,) = llm.generate([[5]], params)
    assert generation.finish_reason == "stop"
    assert generation.text in ("no", "nono")


def test_length_may_cut_a_constrained_output(llm: LLM) -> None:
    (generation,) = llm.generate([[5]], SamplingParams(max_new_tokens=2, json_schema=SCHEMA))
    assert generation.finish_reason == "length"


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json_schema": '{"type": "nope"}'}, r"json_schema='.\"type\": \"nope\".': Invalid type: nope"),
        ({"json_schema": "{"}, r"json_schema='.': "),
        ({"json_schema": "[1]"}, "a schema that anything satisfies is a JSON object or true"),
        ({"json_schema": "false"}, "a schema that anything satisfies is a JSON object or true"),
        ({"json_schema": '{"enum": []}'}, "Unsatisfiable schema: anyOf is empty"),
        ({"json_schema": '{"type": "string", "minLength": 5, "maxLength": 2}'}, "Unsatisfiable schema: minLength"),
        ({"json_schema": '{"$ref": "http://elsewhere/x"}'}, "is not present in a registry"),
        ({"regex": "[ab"}, "unclosed|invalid regex"),
        ({"regex": r"(?=a)b"}, "invalid regex"),
        ({"regex": r"a[^\s\S]"}, "no text of this model's tokens satisfies it"),
        ({"grammar": "start: x"}, 'unknown name: "x"'),
    ],
)
def test_a_constraint_that_cannot_be_met_is_refused_at_submit(
    llm: LLM, constraint: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        llm.submit([5], SamplingParams(**constraint))
    assert "\n" not in str(caught.value)
    assert not llm.has_work


def test_forced_tokens_and_a_constraint_exclude_each_other(llm: LLM) -> None:
    with pytest.raises(UsageError, match="forces tokens and constrains them"):
        llm.submit([5], SamplingParams(regex="a"), forced=[5])


def test_a_vocabulary_that_cannot_go_on_aborts_the_request_with_the_reason(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", seed=1)
    tokenizer: dict[str, Any] = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    lost = tokenizer["model"]["vocab"]
    tokenizer["model"]["merges"] = []
    tokenizer["model"]["vocab"] = {token: i for token, i in lost.items() if "z" not in token and i < 258}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with LLM(path) as llm:
        with pytest.raises(UsageError, match="no text of this model's tokens satisfies it"):
            llm.submit([5], SamplingParams(regex="z"))
        (generation, other) = llm.generate([[5], [6]], [SamplingParams(regex="abz"), SamplingParams(max_new_tokens=9)])
        assert generation.finish_reason == "abort"
        assert "the constraint cannot go on" in generation.reason
        assert generation.text == "ab"
        assert len(other.token_ids) == 9
        assert llm.engine.scheduler.paging.num_used == 0


def test_without_a_tokenizer_a_constraint_is_refused(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model")
    (path / "tokenizer.json").unlink()
    with LLM(path) as llm, pytest.raises(UsageError, match=r"no tokenizer\.json; a constrained output needs one"):
        llm.submit([5], SamplingParams(regex="a"))


def test_without_the_library_only_a_constraint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # as import sees a package that is not installed
    with LLM(make_llama(tmp_path / "model")) as llm:
        assert llm.generate([[5]])
        with pytest.raises(UsageError, match="needs llguidance; pip install llguidance"):
            llm.submit([5], SamplingParams(regex="a"))
