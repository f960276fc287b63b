"""Sampling: parameters are validated, samplers match transformers, and draws depend only on the request."""

import json

import pytest

from tapscope.core.errors import UsageError
from tapscope.engine import SamplingParams


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1: must be an integer ≥ 0"),
        ({"max_new_tokens": True}, "max_new_tokens=True: must be an integer ≥ 0"),
        ({"min_new_tokens": 17}, "min_new_tokens=17: must be at most max_new_tokens=16"),
        ({"temperature": -0.1}, "temperature=-0.1: must be a finite number ≥ 0"),
        ({"temperature": float("nan")}, "temperature=nan: must be a finite number ≥ 0"),
        ({"temperature": 10**400}, r"temperature=1000.*: must be a finite number ≥ 0"),
        ({"temperature": "1"}, "temperature='1': must be a finite number ≥ 0"),
        ({"top_k": -2}, "top_k=-2: must be an integer ≥ -1"),
        ({"top_p": 0}, "top_p=0: must be a number > 0 and ≤ 1"),
        ({"top_p": 1.1}, "top_p=1.1: must be a number > 0 and ≤ 1"),
        ({"min_p": 2}, "min_p=2: must be a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: must be a finite number > 0"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5: must be a number from -2 to 2"),
        ({"frequency_penalty": None}, "frequency_penalty=None: must be a number from -2 to 2"),
        ({"logit_bias": {"x": 1}}, "logit_bias={'x': 1}: must be a mapping of token ids to numbers from -100 to 100"),
        ({"logit_bias": {5: 101}}, "logit_bias={5: 101}: must be a mapping of token ids to numbers from -100 to 100"),
        ({"logit_bias": [1]}, r"logit_bias=\[1\]: must be a mapping of token ids to numbers"),
        ({"seed": 1 << 63}, "seed=9223372036854775808: must be an integer from -9223372036854775808 to"),
        ({"n": 0}, "n=0: must be an integer from 1 to 128"),
        ({"stop": [""]}, r"stop\[0\]='': must be a non-empty string"),
        ({"stop": 5}, "stop=5: must be a string or a list of strings"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids\[0\]=-1: must be an integer ≥ 0"),
        ({"ignore_eos": 1}, "ignore_eos=1: must be true or false"),
        ({"logprobs": -1}, "logprobs=-1: must be an integer ≥ 0"),
        ({"logprobs_mode": "both"}, "logprobs_mode='both': must be one of raw, processed"),
        ({"json_schema": ""}, "json_schema='': must be a non-empty string"),
        (
            {"json_schema": {}, "regex": "a"},
            "json_schema and regex are given; an output can be constrained by only one",
        ),
        ({"heat": 1}, "unknown sampling parameter 'heat'; valid parameters: max_new_tokens, "),
        ({"max_new_token": 1}, r"unknown sampling parameter 'max_new_token' \(did you mean max_new_tokens\?\); valid"),
        ({"max_tokens": 1}, r"unknown sampling parameter 'max_tokens' \(did you mean max_new_tokens\?\); valid"),
        ({"guided_json": {}}, r"unknown sampling parameter 'guided_json' \(did you mean json_schema\?\); valid"),
    ],
)
def test_sampling_params_errors_name_field_value_and_rule(values: dict, message: str) -> None:
    for make in (SamplingParams.build, lambda values: SamplingParams(**values)):
        with pytest.raises(UsageError, match=message):
            make(values)


def test_sampling_params_json_roundtrip() -> None:
    params = SamplingParams(
        temperature=1, logit_bias={7: 2.5}, stop="x", stop_token_ids=[3], seed=-4, json_schema={"type": "null"}
    )
    assert (params.stop, params.stop_token_ids, params.temperature) == (("x",), (3,), 1.0)
    assert params.constraint == ("json_schema", '{"type": "null"}')
    assert SamplingParams.build(json.loads(json.dumps(params.plain()))) == params


def test_sampling_params_child_seeds() -> None:
    params = SamplingParams(temperature=1.0, seed=11, n=4)
    children = [params.child(i) for i in range(4)]
    assert [child.n for child in children] == [1] * 4
    assert children[0].seed == 11
    assert len({child.seed for child in children}) == 4
    assert children == [params.child(i) for i in range(4)]
