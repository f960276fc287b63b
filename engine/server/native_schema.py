"""Bodies of the native routes, in the form of SGLang's native API."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, WithJsonSchema, model_validator

from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.server.request_body import rule

_SAMPLING_SCHEMA = {"type": "object", "properties": TypeAdapter(SamplingParams).json_schema()["properties"]}
_SAMPLING_SCHEMA["description"] = (
    "As SamplingParams; `no_stop_trim` is `include_stop_str_in_output`, `sampling_seed` is `seed`."
)
Sampling = Annotated[dict[str, Any], WithJsonSchema(_SAMPLING_SCHEMA)]

Name = Annotated[str, Field(min_length=1, max_length=500)]
Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Count = Annotated[int, Field(ge=0)]
From = Annotated[int, Field(ge=-1)]
_EACH = ", or a list of such, one for each prompt"
_START = "must be a whole number from -1 (no prompt tokens)" + _EACH
_CHOSEN = "must be a list of token ids, or a list of such lists, one for each prompt"
_TEXT = "must be a text or a list of at least one text"
_IDS = "must be a list of token ids or a list of such lists, none of them empty"
_RID = "must be a text (of several prompts: what their ids begin with), or a list of texts, one for each prompt"
_SALT = "must be a string that is not empty, for all prompts"
_PARAMS = "must be a JSON object, or a list of them, one for each prompt"


class GenerateBody(BaseModel):
    """POST /generate: one prompt, or a batch of them."""

    text: Annotated[str | Annotated[list[str], Field(min_length=1)] | None, rule(_TEXT)] = None
    input_ids: Annotated[Ids | Annotated[list[Ids], Field(min_length=1, fail_fast=True)] | None, rule(_IDS)] = None
    sampling_params: Annotated[Sampling | list[Sampling], rule(_PARAMS)] = Field(default_factory=dict)
    rid: Annotated[Name | list[Name] | None, rule(_RID)] = None
    stream: Annotated[bool, rule("must be true or false")] = False
    return_logprob: Annotated[bool | list[bool], rule("must be true or false" + _EACH)] = False
    logprob_start_len: Annotated[From | list[From], rule(_START)] = -1
    top_logprobs_num: Annotated[Count | list[Count], rule("must be a whole number from 0" + _EACH)] = 0
    token_ids_logprob: Annotated[list[Count] | list[list[Count]] | None, rule(_CHOSEN)] = None
    return_text_in_logprobs: Annotated[bool, rule("must be true or false")] = False
    capture: Annotated[Literal["stats", "full"] | None, rule("must be 'stats' or 'full'")] = None
    return_routed_experts: Annotated[bool, rule("must be true or false")] = False
    return_hidden_states: Annotated[bool, rule("must be true or false")] = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), rule("must be a whole number")] = 0
    cache_salt: Annotated[Name | None, rule(_SALT)] = None
    extra_key: Annotated[Name | None, rule(_SALT)] = None
    data_parallel_rank: Annotated[int | None, rule("must be the number of a DP replica, from 0")] = None
    routed_dp_rank: Annotated[int | None, rule("must be the number of a DP replica, from 0")] = None
    log_metrics: Annotated[Literal[True], rule("must be true: /metrics counts every request")] = True
    session_id: Any = None
    conversation_id: Any = None
    custom_labels: Any = None
    external_trace_header: Any = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "GenerateBody":
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("the body needs exactly one of 'text' and 'input_ids'")
        if (
            None not in (self.data_parallel_rank, self.routed_dp_rank)
            and self.data_parallel_rank != self.routed_dp_rank
        ):
            raise ValueError("'data_parallel_rank' and 'routed_dp_rank' name two replicas; give one of them")
        if None not in (self.cache_salt, self.extra_key) and self.cache_salt != self.extra_key:
            raise ValueError("'cache_salt' and 'extra_key' are two names of one thing; give one of them")
        return self

    @property
    def salt(self) -> str:
        """What the request's cached prefixes are set apart by, under either name (``extra_key`` is SGLang's)."""
        return self.cache_salt or self.extra_key or ""

    @property
    def replica(self) -> int | None:
        """The DP replica that is asked for, under either name."""
        return self.data_parallel_rank if self.routed_dp_rank is None else self.routed_dp_rank


class AbortBody(BaseModel):
    """POST /abort_request."""

    rid: Annotated[Name | None, rule("must be a request id")] = None
    abort_all: Annotated[bool, rule("must be true or false")] = False

    @model_validator(mode="after")
    def _something(self) -> "AbortBody":
        if (self.rid is None) == (not self.abort_all):
            raise ValueError("the body needs either 'rid' or 'abort_all': true")
        return self


class WeightsBody(BaseModel):
    """POST /update_weights_from_disk."""

    model_path: Annotated[Name, rule("must be the directory of a checkpoint, on the server's host")]
    weight_version: Annotated[Name | None, rule("must be a text")] = None
    flush_cache: Annotated[Literal[True], rule("must be true: what is cached is of the old weights")] = True
