"""Converts sampling fields of OpenAI bodies, with the extensions of SGLang and vLLM, to SamplingParams."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tapscope.core.convert import Count, NonEmptyStr, NonNegative, Positive
from tapscope.core.errors import RequestError, UsageError
from tapscope.engine.api.request_model import RequestModel, read_as
from tapscope.engine.params.sampling_params import Fraction, Penalty, SamplingParams, Seed, TopP
from tapscope.engine.structured_output.structural_tag import structural_tag_to_lark

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Strings = Annotated[
    NonEmptyStr | list[NonEmptyStr], Meta(extra={"must be": "a string or a list of strings, none of them empty"})
]
LogitBias = Annotated[
    dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(extra={"must be": "a JSON object of token ids with numbers from -100 to 100"}),
]
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]

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
"""Unsupported fields of other servers -> values that are accepted, because they describe the default behaviour."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A named JSON schema."""

    schema: dict[str, Any]


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Constraint on the output; a structural tag has further members."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None


class SamplingFields(RequestModel, kw_only=True, frozen=True):
    """Fields that chat and completions share: OpenAI's first, then those of vLLM and SGLang (`extra_body`)."""

    IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    NEUTRAL = NEUTRAL

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: NonNegative | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: Strings | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    response_format: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Positive | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stop_regex: Strings | None = None
    regex: str | None = None
    ebnf: str | None = None
    priority: Priority = 0
    rid: str | None = None
    cache_salt: NonEmptyStr = ""

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its token counts; raises RequestError for stream options without a stream."""
        options = self.stream_options
        if options is None:
            return False
        if not self.stream:
            raise RequestError("stream_options is only for streams; set stream to true", param="stream_options")
        if options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise RequestError(f"{name} is not supported; leave it out", param=name)
        return bool(options.include_usage)

    def sampling(self, defaults: Mapping[str, float]) -> dict[str, Any]:
        """Arguments for :func:`make_params`; ``defaults`` are the model's."""
        given = {ours: value for name, ours in _OURS.items() if (value := getattr(self, name)) is not None}
        return {"temperature": 1.0} | dict(defaults) | given | response_constraint(self.response_format)


_SAME: tuple[str, ...] = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
_SAME += (
    "n",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "stop_regex",
    "regex",
    "ebnf",
)
_OURS = {name: name for name in _SAME}
_OURS |= {"min_tokens": "min_new_tokens", "include_stop_str_in_output": "include_stop_str_in_output"}


def make_params(values: Mapping[str, Any]) -> SamplingParams:
    """Validated parameters; raises RequestError."""
    try:
        return SamplingParams.build(values)
    except RequestError:
        raise
    except UsageError as error:
        raise RequestError(str(error), param=str(error).partition("=")[0]) from None


def response_constraint(response_format: dict[str, Any] | None) -> dict[str, str]:
    """The constraint of ``response_format`` as arguments for :func:`make_params`; empty without a constraint."""
    if response_format is None:
        return {}
    wanted = read_as(ResponseFormat, response_format, "response_format")
    if wanted.type == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if wanted.type == "structural_tag":
        structural_tag_to_lark(response_format, {}, {}, "")  # validates it, with the path of an invalid part
        return {"structural_tag": json.dumps(response_format)}
    if wanted.type == "text":
        return {}
    if wanted.json_schema is None:
        name = "response_format.json_schema.schema"
        raise RequestError(f"{name} is missing: must be a JSON schema", param=name)
    return {"json_schema": json.dumps(wanted.json_schema.schema)}
