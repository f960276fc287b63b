"""Sampling fields of OpenAI bodies, and those that SGLang and vLLM add, to SamplingParams."""

import json
from collections.abc import Mapping
from typing import Any

from tapscope.core.errors import RequestError, UsageError
from tapscope.engine.params.json_fields import Fields
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.structured_output.structural_tag import lark_of

OPENAI = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "n")
"""Fields of chat and completions alike."""
EXTRA = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "stop_regex",
    "regex",
    "ebnf",
)
"""Fields beyond OpenAI's, as vLLM and SGLang name them (`extra_body` of the openai package)."""
ROUTING = ("priority", "rid", "cache_salt")
"""Fields about the request's way through the engine."""
WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Fields about the sender; they never change an answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "include_reasoning": (True,),
    "length_penalty": (1, 0),
    "mm_processor_kwargs": ({},),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "store": (False, True),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
"""Fields of other servers that are not supported here -> values that ask for what is done anyway."""


def read_sampling(fields: Fields, defaults: Mapping[str, float]) -> dict[str, Any]:
    """Arguments for :func:`make_params`; ``defaults`` are the model's own."""
    top_k = fields.whole("top_k", -1, (1 << 31) - 1)
    values: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, float("inf")),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": None if top_k is None else max(top_k, 0),
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0, float("inf")),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "min_new_tokens": fields.whole("min_tokens", 0),
        "seed": fields.whole("seed", -(1 << 63), (1 << 63) - 1),
        "n": fields.whole("n", 1, 128),
        "logit_bias": _logit_bias(fields),
        "stop": fields.texts("stop"),
        "stop_token_ids": _token_ids(fields),
        "ignore_eos": fields.flag("ignore_eos"),
        "skip_special_tokens": fields.flag("skip_special_tokens", True),
        "include_stop_str_in_output": fields.flag("include_stop_str_in_output"),
        "stop_regex": fields.texts("stop_regex"),
        "regex": fields.text("regex"),
        "ebnf": fields.text("ebnf"),
    }
    given = {name: value for name, value in values.items() if value is not None}
    return {"temperature": 1.0} | dict(defaults) | given


def make_params(values: Mapping[str, Any]) -> SamplingParams:
    """Checked parameters; raises RequestError."""
    try:
        return SamplingParams.build(values)
    except RequestError:
        raise
    except UsageError as error:
        raise RequestError(str(error), param=str(error).partition("=")[0]) from None


RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
"""OpenAI's, and what SGLang adds."""


def response_constraint(fields: Fields) -> dict[str, str]:
    """Arguments for :func:`make_params` by which ``response_format`` holds the answer; none for free text."""
    wanted = fields.object("response_format")
    if wanted is None:
        return {}
    kind = wanted.choice("type", RESPONSE_FORMATS)
    if kind is None:
        raise wanted.wrong("type", f"it must be one of {', '.join(RESPONSE_FORMATS)}")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if kind == "structural_tag":
        lark_of(wanted.values, {}, {}, "")  # what is wrong with it is said here, with its place
        return {"structural_tag": json.dumps(wanted.values)}
    described = wanted.object("json_schema")
    schema = None if described is None else described.object("schema")
    if schema is None:
        raise RequestError(
            "response_format.json_schema.schema is missing; it must be a JSON schema",
            param="response_format.json_schema.schema",
        )
    return {"json_schema": json.dumps(schema.values)}


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    given = fields.object("logit_bias")
    if given is None:
        return None
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in given.values):
        raise fields.wrong("logit_bias", "its keys must be token ids")
    return {int(key): given.number(key, -100, 100) or 0.0 for key in given.values}


def _token_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.values.get("stop_token_ids")
    ids = [] if value is None else value
    if not isinstance(ids, list) or not all(type(item) is int and 0 <= item < 1 << 31 for item in ids):
        raise fields.wrong("stop_token_ids", "it must be a list of token ids")
    return tuple(ids)
