"""Sampling: parameters are checked, samplers agree with transformers, draws depend on nothing but the request."""

import json

import pytest

from tapscope.core.errors import UsageError
from tapscope.engine import SamplingParams


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1: it must be a whole number from 0"),
        ({"max_new_tokens": True}, "max_new_tokens=True: it must be a whole number from 0"),
        ({"min_new_tokens": 17}, "min_new_tokens=17: it must be at most max_new_tokens, 16"),
        ({"temperature": -0.1}, "temperature=-0.1: it must be a number from 0"),
        ({"temperature": float("nan")}, "temperature=nan: it must be a number from 0"),
        ({"temperature": 10**400}, "it must be a number from 0"),
        ({"temperature": "1"}, "temperature='1': it must be a number from 0"),
        ({"top_k": -2}, "top_k=-2: it must be a whole number from 0"),
        ({"top_p": 0}, "top_p=0.0: it must be a number above 0, at most 1"),
        ({"top_p": 1.1}, "top_p=1.1: it must be a number above 0, at most 1"),
        ({"min_p": 2}, "min_p=2.0: it must be a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0.0: it must be above 0"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5: it must be a number from -2 to 2"),
        ({"frequency_penalty": None}, "frequency_penalty=None: it must be a number from -2 to 2"),
        ({"logit_bias": {"x": 1}}, "logit_bias='x': its keys must be token ids"),
        ({"logit_bias": {5: 101}}, "logit_bias=101: the bias of token 5 must be a number from -100 to 100"),
        ({"logit_bias": [1]}, r"logit_bias=\[1\]: it must map token ids to numbers"),
        ({"seed": 1 << 63}, "seed=9223372036854775808: it must be a whole number from -9223372036854775808 to"),
        ({"n": 0}, "n=0: it must be a whole number from 1 to 128"),
        ({"stop": [""]}, "stop='': each must be a text that is not empty"),
        ({"stop": 5}, "stop=5: it must be a text or a list of texts"),
        ({"stop_token_ids": [-1]}, "stop_token_ids=-1: each must be a token id"),
        ({"ignore_eos": 1}, "ignore_eos=1: it must be true or false"),
        ({"logprobs": -1}, "logprobs=-1: it must be a whole number from 0"),
        ({"logprobs_mode": "both"}, "logprobs_mode='both': it must be raw or processed"),
        ({"json_schema": ""}, "json_schema='': it must be a text that is not empty"),
        ({"json_schema": {}, "regex": "a"}, "json_schema and regex are given; an output can be held to only one"),
        ({"top": 1}, "there is no sampling parameter 'top'; there are max_new_tokens, "),
    ],
)
def test_a_wrong_parameter_names_field_value_and_rule(values: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams.build(values)


def test_parameters_survive_json() -> None:
    params = SamplingParams(
        temperature=1, logit_bias={7: 2.5}, stop="x", stop_token_ids=[3], seed=-4, json_schema={"type": "null"}
    )
    assert (params.stop, params.stop_token_ids, params.temperature) == (("x",), (3,), 1.0)
    assert params.constraint == ("json_schema", '{"type": "null"}')
    assert SamplingParams.build(json.loads(json.dumps(params.plain()))) == params


def test_children_draw_differently_and_the_first_as_without_siblings() -> None:
    params = SamplingParams(temperature=1.0, seed=11, n=4)
    children = [params.child(i) for i in range(4)]
    assert [child.n for child in children] == [1] * 4
    assert children[0].seed == 11
    assert len({child.seed for child in children}) == 4
    assert children == [params.child(i) for i in range(4)]
