"""Bodies of the native routes, in the form of SGLang's native API."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, WithJsonSchema, model_validator

from tapscope.engine.sampling_params import SamplingParams
from tapscope.engine.server.body import rule

_SAMPLING_SCHEMA = {"type": "object", "properties": TypeAdapter(SamplingParams).json_schema()["properties"]}
_SAMPLING_SCHEMA["description"] = "As SamplingParams; `no_stop_trim` is `include_stop`, `sampling_seed` is `seed`."
Sampling = Annotated[dict[str, Any], WithJsonSchema(_SAMPLING_SCHEMA)]

Name = Annotated[str, Field(min_length=1, max_length=500)]
Ids = Annotated[list[int], Field(min_length=1)]
_TEXT = "must be a text or a list of at least one text"
_IDS = "must be a list of token ids or a list of such lists, none of them empty"
_RID = "must be a text, or a list of texts, one for each prompt"
_PARAMS = "must be a JSON object, or a list of them, one for each prompt"


class GenerateBody(BaseModel):
    """POST /generate: one prompt, or a batch of them."""

    text: Annotated[str | Annotated[list[str], Field(min_length=1)] | None, rule(_TEXT)] = None
    input_ids: Annotated[Ids | Annotated[list[Ids], Field(min_length=1)] | None, rule(_IDS)] = None
    sampling_params: Annotated[Sampling | list[Sampling], rule(_PARAMS)] = Field(default_factory=dict)
    rid: Annotated[Name | list[Name] | None, rule(_RID)] = None
    stream: Annotated[bool, rule("must be true or false")] = False
    return_logprob: Annotated[bool, rule("must be true or false")] = False
    logprob_start_len: Annotated[int, Field(ge=-1), rule("must be a whole number from -1 (no prompt tokens)")] = -1
    top_logprobs_num: Annotated[int, Field(ge=0), rule("must be a whole number from 0")] = 0
    return_text_in_logprobs: Annotated[bool, rule("must be true or false")] = False
    capture: Annotated[Literal["stats", "full"] | None, rule("must be 'stats' or 'full'")] = None
    return_routed_experts: Annotated[bool, rule("must be true or false")] = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), rule("must be a whole number")] = 0
    data_parallel_rank: Annotated[int | None, rule("must be the number of a DP replica, from 0")] = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "GenerateBody":
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("the body needs exactly one of 'text' and 'input_ids'")
        return self


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
