"""Convert the sampling fields of OpenAI bodies, with the extensions of SGLang and vLLM, to SamplingParams."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tapscope.core.convert import Count, NonEmptyStr, NonNegative, Positive, must_be
from tapscope.core.errors import RequestError, UsageError
from tapscope.engine.api.request_model import SENDER_FIELDS, RequestModel, read_as
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.params.sampling_params import Fraction, Penalty, SamplingParams, Seed, TopP
from tapscope.engine.structured_output.structural_tag import structural_tag_to_lark

TopK = Annotated[int, Meta(ge=-1, lt=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Strings = Annotated[NonEmptyStr | list[NonEmptyStr], must_be("a string or a list of strings, none of them empty")]
LogitBias = Annotated[
    dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Annotated[float, Meta(ge=-100, le=100)]],
    must_be("a JSON object of token ids with numbers from -100 to 100"),
]
Choices = Annotated[list[NonEmptyStr], Meta(min_length=1)]
TruncatePromptTokens = Annotated[int, Meta(ge=-1), must_be("an integer ≥ 1, or -1")]
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
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
    "return_routed_experts": (False,),
    "spaces_between_special_tokens": (True,),
    "store": (False, True),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
}
"""Unsupported fields of other servers -> values that are accepted because they request the default behavior."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool | None = None
    """End the stream with an event that contains the token counts."""
    include_obfuscation: bool | None = None
    """Only false is supported."""
    continuous_usage_stats: bool | None = None
    """With ``include_usage``: include the token counts so far in every event (vLLM)."""


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A named JSON schema."""

    schema: dict[str, Any]
    """JSON schema of the output."""


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Constraint on the output; a structural tag has additional fields."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    """``json_schema`` requires the field ``json_schema``; ``structural_tag`` (SGLang) has additional fields."""
    json_schema: JsonSchemaFormat | None = None
    """The schema; its name has no effect."""


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's constraint on the output: exactly one of these fields."""

    json: dict[str, Any] | str | None = None
    """JSON schema of the output, as an object or a JSON string."""
    regex: NonEmptyStr | None = None
    """Regular expression that the whole output must match."""
    choice: Choices | None = None
    """Strings of which the output must be one."""
    grammar: NonEmptyStr | None = None
    """Grammar of the output: EBNF if it contains ``::=``, otherwise Lark."""
    json_object: bool | None = None
    """Constrain the output to any JSON object."""
    structural_tag: str | None = None
    """XGrammar structural tag, as a JSON string."""
    disable_any_whitespace: Literal[False] | None = None
    """Only the default is supported."""
    disable_additional_properties: Literal[False] | None = None
    """Only the default is supported."""
    whitespace_pattern: None = None
    """Only the default is supported."""


class SamplingFields(RequestModel, kw_only=True, frozen=True):
    """Fields shared by chat and completions: OpenAI's first, then those of vLLM and SGLang (`extra_body`)."""

    IGNORED = (*SENDER_FIELDS, "guided_decoding_backend")
    NEUTRAL = NEUTRAL

    model: str | None = None
    """Name of the model; MODEL:ADAPTER or ADAPTER selects a LoRA adapter. None: the served model."""
    stream: bool = False
    """Respond with server-sent events; the last one is ``[DONE]``."""
    stream_options: StreamOptions | None = None
    """Token counts in the stream: ``include_usage``, ``continuous_usage_stats`` (vLLM)."""
    temperature: NonNegative | None = None
    """Divisor of the logits; 0 is greedy. None: the value in generation_config.json, or 1."""
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    """Map from token id (a string in JSON) to the value added to its logit."""
    seed: Seed | None = None
    stop: Strings | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    response_format: dict[str, Any] | None = None
    """Constraint on the output: ``json_object``, ``json_schema``, or ``structural_tag`` (SGLang)."""
    modalities: list[Literal["text"]] | None = None
    """Only text output is supported."""
    service_tier: Literal["auto", "default"] | None = None
    """Without effect."""
    top_k: TopK | None = None
    min_p: Fraction | None = None
    repetition_penalty: Positive | None = None
    min_tokens: Count | None = None
    """Number of tokens before which end and stop tokens are masked and stop strings are ignored (vLLM)."""
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stop_regex: Strings | None = None
    regex: str | None = None
    """Regular expression that the whole output must match (SGLang)."""
    ebnf: str | None = None
    guided_json: dict[str, Any] | str | None = None
    """JSON schema of the output, as an object or a JSON string (vLLM)."""
    guided_regex: NonEmptyStr | None = None
    """Regular expression that the whole output must match (vLLM)."""
    guided_choice: Choices | None = None
    """Strings of which the output must be one (vLLM)."""
    guided_grammar: NonEmptyStr | None = None
    """Grammar of the output: EBNF if it contains ``::=``, otherwise Lark (vLLM)."""
    structured_outputs: StructuredOutputs | None = None
    """One of ``json``, ``regex``, ``choice``, ``grammar``, ``json_object``, ``structural_tag`` (vLLM)."""
    allowed_token_ids: list[TokenId] | None = None
    """Token ids that may be sampled; end tokens must be listed too (vLLM). None: all tokens."""
    bad_words: list[NonEmptyStr] | None = None
    """Strings that must not occur in the output (vLLM)."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Return the logprobs of the prompt and of this many most likely tokens; not in a stream (vLLM)."""
    return_token_ids: bool = False
    """Return ``token_ids`` and ``prompt_token_ids`` (vLLM)."""
    return_tokens_as_token_ids: bool = False
    """Write tokens in logprobs as ``token_id:ID`` (vLLM)."""
    truncate_prompt_tokens: TruncatePromptTokens | None = None
    """Keep this many tokens at the end of the prompt; -1: as many as fit (vLLM). None: all."""
    priority: Priority = 0
    """Requests of higher priority are scheduled first, as in SGLang; vLLM schedules lower values first."""
    rid: str | None = None
    """Id of the request, for /abort_request (SGLang). None: the id of the response."""
    cache_salt: NonEmptyStr = ""
    """Cached prefixes are shared only between requests with the same salt (vLLM)."""
    lora_path: NonEmptyStr | None = None
    """Name of a loaded LoRA adapter (SGLang). None: the adapter in ``model``, if any."""

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts; raises RequestError for ``stream_options`` without a stream."""
        options = self.stream_options
        if options is None:
            return False
        if not self.stream:
            raise RequestError("stream_options is only for streams; set stream to true", param="stream_options")
        if options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise RequestError(f"{name} is not supported; leave it out", param=name)
        return bool(options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream includes the token counts so far; requires ``include_usage``, as in vLLM."""
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )

    def sampling(self, model: ServedModel) -> dict[str, Any]:
        """Return the arguments for :func:`make_params`, including the model's defaults; raises RequestError."""
        given = {ours: value for name, ours in _OURS.items() if (value := getattr(self, name)) is not None}
        if self.allowed_token_ids:
            given["allowed_token_ids"] = self.allowed_token_ids
        if self.bad_words:
            given["bad_words_ids"] = bad_words_ids(self.bad_words, model)
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs is not supported in a stream", param="prompt_logprobs")
        given["prompt_logprobs"] = self.prompt_logprobs
        return {"temperature": 1.0} | dict(model.sampling) | given | self._output_constraint()[1]

    @property
    def constraint_field(self) -> str:
        """Name of the field that constrains the output; empty: none. Raises RequestError for several constraints."""
        return self._output_constraint()[0]

    def _output_constraint(self) -> tuple[str, dict[str, str]]:
        """Return the constraining field and its argument for :func:`make_params`; raises RequestError for several."""
        constraints = {
            "response_format": response_constraint(self.response_format),
            "structured_outputs": _structured_outputs(self.structured_outputs),
            "guided_json": _json_constraint(self.guided_json),
            "guided_regex": _constraint("regex", self.guided_regex),
            "guided_choice": _choice_constraint(self.guided_choice),
            "guided_grammar": _grammar_constraint(self.guided_grammar),
            "regex": _constraint("regex", self.regex),
            "ebnf": _constraint("ebnf", self.ebnf),
        }
        given = {name: constraint for name, constraint in constraints.items() if constraint}
        if len(given) > 1:
            names = " and ".join(given)
            text = f"{names} are given; an output can be constrained by only one of them"
            raise RequestError(text, param=list(given)[1])
        return next(iter(given.items()), ("", {}))

    def max_prompt_tokens(self, max_tokens: int | None, model: ServedModel) -> int | None:
        """Return :func:`truncated_length` of this request; without ``max_tokens``, one position is left for output."""
        return truncated_length(self.truncate_prompt_tokens, max_tokens or 1, model)


_SAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "n", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "stop_regex",
    "include_stop_str_in_output",
)  # fmt: skip
_OURS = {name: name for name in _SAME} | {"min_tokens": "min_new_tokens"}


def truncated_length(limit: int | None, num_new: int, model: ServedModel) -> int | None:
    """Return the maximum number of prompt tokens for ``truncate_prompt_tokens=limit``; None: no truncation.

    A ``limit`` of -1 leaves ``num_new`` positions for new tokens. Raises RequestError for 0.
    """
    if limit == 0:
        text = "truncate_prompt_tokens=0: must be an integer ≥ 1, or -1 for the model's limit"
        raise RequestError(text, param="truncate_prompt_tokens")
    return max(1, model.max_positions - num_new) if limit == -1 else limit


def make_params(values: Mapping[str, Any]) -> SamplingParams:
    """Build validated sampling parameters; raises RequestError."""
    try:
        return SamplingParams.build(values)
    except RequestError:
        raise
    except UsageError as error:
        name = str(error).partition("=")[0]
        raise RequestError(str(error), param=name if name.isidentifier() else None) from None


def bad_words_ids(words: Sequence[str], model: ServedModel) -> list[list[int]]:
    """Return the token ids of each bad word, both without and with a leading space, as vLLM does."""
    tokenizer = model.require_tokenizer()
    sequences = []
    for word in words:
        for text in (word.lstrip(" "), " " + word.lstrip(" ")):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences


def _constraint(name: str, value: str | None) -> dict[str, str]:
    return {} if not value else {name: value}


def _json_constraint(schema: dict[str, Any] | str | None) -> dict[str, str]:
    return _constraint("json_schema", json.dumps(schema) if isinstance(schema, dict) else schema)


def _choice_constraint(choices: Sequence[str] | None) -> dict[str, str]:
    """Return a Lark grammar that accepts one of ``choices``."""
    return {} if choices is None else {"grammar": "start: " + " | ".join(map(json.dumps, choices))}


def _grammar_constraint(grammar: str | None) -> dict[str, str]:
    """Return the constraint for a grammar in EBNF (recognized by ``::=``) or in Lark syntax."""
    return _constraint("grammar" if grammar is None or "::=" not in grammar else "ebnf", grammar)


def _structured_outputs(wanted: StructuredOutputs | None) -> dict[str, str]:
    if wanted is None:
        return {}
    constraints = (
        _json_constraint(wanted.json),
        _constraint("regex", wanted.regex),
        _choice_constraint(wanted.choice),
        _grammar_constraint(wanted.grammar),
        {"json_schema": '{"type": "object"}'} if wanted.json_object else {},
        _constraint("structural_tag", wanted.structural_tag),
    )
    given = [constraint for constraint in constraints if constraint]
    if len(given) != 1:
        name = "structured_outputs"
        rule = "must contain exactly one of json, regex, choice, grammar, json_object, structural_tag"
        raise RequestError(f"{name}: {rule}", param=name)
    return given[0]


def response_constraint(response_format: dict[str, Any] | None) -> dict[str, str]:
    """Return the constraint of ``response_format`` as arguments for :func:`make_params`; empty: no constraint.

    Raises RequestError.
    """
    if response_format is None:
        return {}
    wanted = read_as(ResponseFormat, response_format, "response_format")
    if wanted.type == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if wanted.type == "structural_tag":
        structural_tag_to_lark(response_format, {}, {}, "")  # validates; errors include the path of the invalid part
        return {"structural_tag": json.dumps(response_format)}
    if wanted.type == "text":
        return {}
    if wanted.json_schema is None:
        name = "response_format.json_schema.schema"
        raise RequestError(f"{name} is missing: must be a JSON schema", param=name)
    return {"json_schema": json.dumps(wanted.json_schema.schema)}
