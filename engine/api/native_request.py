"""Request bodies of SGLang's native routes, and the conversion of a POST /generate body to generation jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tapscope.core.convert import Count, PositiveInt, must_be, shown
from tapscope.core.errors import RequestError, UsageError
from tapscope.engine.api.generation_job import GenerationJob
from tapscope.engine.api.request_model import Name, RequestModel, described_schema, read_as
from tapscope.engine.api.sampling_fields import NEUTRAL, Priority
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.params.sampling_params import SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128
_RENAMED = {"no_stop_trim": "include_stop_str_in_output", "sampling_seed": "seed"}
_OTHER = ("spaces_between_special_tokens", "stream_interval")  # the first affects only slow (Python) tokenizers

_SAMPLING = described_schema(SamplingParams)["properties"]
Sampling = Annotated[
    dict[str, Any],
    Meta(
        description="As SamplingParams; `no_stop_trim` is `include_stop_str_in_output`, `sampling_seed` is `seed`.",
        extra_json_schema={"properties": _SAMPLING},
    ),
]
Ids = Annotated[list[int], Meta(min_length=1)]
Experts = Annotated[str, Meta(min_length=1)]
Start = Annotated[int, Meta(ge=-1)]


_EACH = ", or a list of them, one for each prompt"


class GenerateBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /generate: one prompt, or a batch of prompts."""

    FALSE_IS_ABSENT = True

    text: (
        Annotated[str | Annotated[list[str], Meta(min_length=1)], must_be("a string or a non-empty list of strings")]
        | None
    ) = None
    """A prompt, or a list of prompts; excludes ``input_ids``."""
    input_ids: (
        Annotated[
            list[int | Ids],
            Meta(min_length=1),
            must_be("a list of token ids or a list of such lists, none of them empty"),
        ]
        | None
    ) = None
    """Token ids of a prompt, or a list of token id lists; excludes ``text``."""
    sampling_params: Annotated[Sampling | list[Sampling], must_be("a JSON object" + _EACH)] = msgspec.field(
        default_factory=dict
    )
    """Fields of ``SamplingParams``, or a list with one object per prompt; ``max_new_tokens`` is 128 by default."""
    rid: (
        Annotated[
            Name | list[Name],
            must_be(
                "a string (of several prompts: the prefix of their ids), or a list of strings, one for each prompt"
            ),
        ]
        | None
    ) = None
    """Id of the request, for /abort_request; for several prompts a list of ids, or their common prefix."""
    stream: bool = False
    """Respond with server-sent events, each with the whole output so far."""
    return_logprob: Annotated[bool | list[bool], must_be("true or false" + _EACH)] = False
    """Return the logprob of each generated token, in ``meta_info``."""
    logprob_start_len: Annotated[Start | list[Start], must_be("an integer ≥ -1 (-1: no prompt tokens)" + _EACH)] = -1
    """First prompt position whose logprob is returned; -1: none."""
    top_logprobs_num: Annotated[Count | list[Count], must_be("an integer ≥ 0" + _EACH)] = 0
    """Number of most likely tokens to return at each position."""
    token_ids_logprob: (
        Annotated[
            list[Count | list[Count]], must_be("a list of token ids, or a list of such lists, one for each prompt")
        ]
        | None
    ) = None
    """Token ids whose logprobs are returned at each position; requires ``return_logprob``."""
    return_text_in_logprobs: bool = False
    """Include each token's string in the logprobs."""
    capture: Literal["stats", "full"] | None = None
    """Record this request's tensors: statistics only, or full payloads (ours)."""
    return_routed_experts: bool = False
    """Return the routed experts of every position, in ``meta_info.routed_experts``."""
    return_hidden_states: bool = False
    """Return the last hidden state of every position, in ``meta_info.hidden_states``."""
    routed_experts: (
        Annotated[
            Experts | list[Experts | None],
            must_be("base64 of int32 [positions, layers, k], as meta_info.routed_experts has it" + _EACH),
        ]
        | None
    ) = None
    """Routed experts to replay, in the format of ``meta_info.routed_experts``; -1: the router chooses (ours)."""
    priority: Priority = 0
    """Requests of higher priority are scheduled first."""
    cache_salt: Name | None = None
    """Cached prefixes are shared only between requests with the same salt (vLLM)."""
    extra_key: Name | None = None
    """SGLang's name for ``cache_salt``."""
    lora_path: (
        Annotated[Name | list[Name | None], must_be("the name of a loaded adapter, or a list of names" + _EACH[4:])]
        | None
    ) = None
    """Name of a loaded LoRA adapter. None: the base model."""
    data_parallel_rank: int | None = None
    """DP replica that serves the request. None: the server chooses."""
    routed_dp_rank: int | None = None
    """Alias of ``data_parallel_rank`` (SGLang)."""
    log_metrics: bool = True
    """Must be true, as /metrics counts every request."""
    session_id: Any = None
    """Without effect."""
    conversation_id: Any = None
    """Without effect."""
    custom_labels: Any = None
    """Without effect."""
    external_trace_header: Any = None
    """Without effect."""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("the body needs exactly one of 'text' and 'input_ids'")
        for name in ("input_ids", "token_ids_logprob"):
            value = getattr(self, name)
            if value and isinstance(value[0], int):  # a flat list: every item must be an integer
                read_as(list[int], value, name)
            elif value and any(isinstance(item, int) for item in value):
                rule = "must be a list of token ids or a list of such lists, not of both"
                raise RequestError(f"{name}={shown(value)}: {rule}", param=name)
        if (
            None not in (self.data_parallel_rank, self.routed_dp_rank)
            and self.data_parallel_rank != self.routed_dp_rank
        ):
            raise RequestError("'data_parallel_rank' and 'routed_dp_rank' name different replicas; give one of them")
        if None not in (self.cache_salt, self.extra_key) and self.cache_salt != self.extra_key:
            raise RequestError("'cache_salt' and 'extra_key' are two names of one field; give one of them")
        if not self.log_metrics:
            raise RequestError("log_metrics=False: must be true, as /metrics counts every request", param="log_metrics")

    @property
    def salt(self) -> str:
        """Cache salt of the request, given as ``cache_salt`` or ``extra_key``; empty: none."""
        return self.cache_salt or self.extra_key or ""

    @property
    def replica(self) -> int | None:
        """The requested DP replica, given as ``data_parallel_rank`` or ``routed_dp_rank``; None: any."""
        return self.data_parallel_rank if self.routed_dp_rank is None else self.routed_dp_rank


class LoadAdapterBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /load_lora_adapter."""

    FALSE_IS_ABSENT = True
    IGNORED = ("lora_int_id", "base_model_name")

    lora_name: Name
    """Name with which requests select the adapter."""
    lora_path: Annotated[Name, must_be("the directory of a PEFT adapter, on the server's host")]
    """Directory of an adapter in PEFT's format, on the server's host."""


class UnloadAdapterBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /unload_lora_adapter."""

    IGNORED = ("lora_int_id",)

    lora_name: Name
    """Name of a loaded adapter."""


class ProfileBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /start_profile. Traces are written to the directory of the server setting ``profile_dir``."""

    FALSE_IS_ABSENT = True
    IGNORED = ("record_shapes", "activities", "start_step", "profile_id", "profile_prefix")


class AbortBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /abort_request."""

    FALSE_IS_ABSENT = True

    rid: Name | None = None
    """Id of the request to abort; excludes ``abort_all``."""
    abort_all: bool = False
    """Abort all live requests."""

    def __post_init__(self) -> None:
        if (self.rid is None) == (not self.abort_all):
            raise RequestError("the body needs either 'rid' or 'abort_all': true")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobOptions:
    """Selection of the log-probabilities that one generation returns."""

    enabled: bool = False
    top: int = 0
    """Number of most likely tokens at each position."""
    start: int = -1
    """First prompt position whose log-probability is returned; -1: none."""
    token_ids: tuple[int, ...] = ()
    """Additional token ids whose log-probabilities are returned at each position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeGeneration:
    """One generation requested by a body, with its response options."""

    job: GenerationJob
    logprobs: LogprobOptions = LogprobOptions()
    stream_interval: int = 1
    """Number of tokens between two events of a stream; the first and last event are exempt."""


def read_generations(body: GenerateBody, model: ServedModel) -> list[NativeGeneration]:
    """Return all generations of ``body``, prompt by prompt; raises UsageError beyond the limits of ``model``."""
    prompts = _prompts(body)
    model.limits.check_generations(len(prompts), 1, "text or input_ids")
    for prompt in prompts:
        if isinstance(prompt, str) and model.tokenizer is not None:
            model.check_text(prompt, "text")
    generations: list[NativeGeneration] = []
    count = len(prompts)
    columns = (
        _for_each(body, "sampling_params", count),
        _logprobs(body, count),
        _request_ids(body, count),
        [model.selected(None, name).adapter if name else "" for name in _for_each(body, "lora_path", count)],
        [ids or "" for ids in _for_each(body, "routed_experts", count)],
    )
    for prompt, values, logprobs, name, adapter, ids in zip(prompts, *columns, strict=True):
        params, interval = _sampling(values, logprobs, body), _stream_interval(values)
        model.limits.check_generations(len(generations) + params.n, 1, "sampling_params.n")
        for index in range(params.n):
            own = name if name is None or params.n == 1 else f"{name}-{index}"
            job = GenerationJob(
                prompt=prompt,
                params=params.child(index),
                request_id=own,
                priority=body.priority,
                cache_salt=body.salt,
                adapter=adapter,
                experts=ids,
            )
            generations.append(NativeGeneration(job=job, logprobs=logprobs, stream_interval=interval))
    _check_answer(generations, model, streams=body.stream)
    return generations


def _check_answer(generations: Sequence[NativeGeneration], model: ServedModel, *, streams: bool) -> None:
    """Raise RequestError if the response could exceed the limit on values.

    The estimate is an upper bound: each character of a string counts as a token, and stream events repeat the values.
    """
    values = 0
    for one in generations:
        prompt, params = one.job.prompt, one.job.params
        new, num_prompt = min(params.max_new_tokens, model.max_positions), min(len(prompt), model.max_positions)
        num_events = max(1, new // one.stream_interval // 2) if streams else 1
        values += num_events * model.num_values(params, num_prompt, new)
    model.limits.check_answer(values, "sampling_params")


def is_batch(body: GenerateBody, count: int) -> bool:
    """Return whether the response to ``body`` with ``count`` generations is a list."""
    ids = body.input_ids
    return count > 1 or isinstance(body.text, list) or (ids is not None and isinstance(ids[0], list))


def _sampling(values: Mapping[str, Any], logprobs: LogprobOptions, body: GenerateBody) -> SamplingParams:
    given = {_RENAMED.get(name, name): value for name, value in values.items() if value is not None}
    for name in _OTHER:
        given.pop(name, None)
    given = {name: value for name, value in given.items() if value not in NEUTRAL.get(name, ())}
    if given.get("json_schema") == "$$ANY$$":
        given["json_schema"] = '{"type": "object"}'
    if body.return_routed_experts:
        given["routed_experts"] = True
    if body.return_hidden_states:
        given["hidden_states"] = True
    if logprobs.enabled:
        given |= {"logprobs": logprobs.top, "prompt_logprobs": logprobs.top if logprobs.start >= 0 else None}
        given["token_ids_logprob"] = logprobs.token_ids
    return SamplingParams.build({"max_new_tokens": DEFAULT_MAX_NEW_TOKENS} | given)


def _logprobs(body: GenerateBody, count: int) -> list[LogprobOptions]:
    ids = body.token_ids_logprob
    each_ids: list[Any] = ids if ids and isinstance(ids[0], list) else [ids or []] * count
    _require_count("token_ids_logprob", each_ids, count)
    columns = (_for_each(body, name, count) for name in ("return_logprob", "top_logprobs_num", "logprob_start_len"))
    options = [
        LogprobOptions(enabled=enabled, top=top, start=start, token_ids=tuple(tokens))
        for enabled, top, start, tokens in zip(*columns, each_ids, strict=True)
    ]
    if any(each.token_ids and not each.enabled for each in options):
        raise UsageError("'token_ids_logprob' adds to the tokens' own log-probabilities; set 'return_logprob'")
    return options


def _for_each(body: GenerateBody, name: str, count: int) -> list[Any]:
    """Return the value of field ``name`` for each of ``count`` prompts; the body has one per prompt or one for all.

    Raises UsageError if the list has another length.
    """
    value = getattr(body, name)
    each = value if isinstance(value, list) else [value] * count
    _require_count(name, each, count)
    return each


def _require_count(name: str, each: Sequence[Any], count: int) -> None:
    if len(each) != count:
        raise UsageError(f"{name!r} has {len(each)} entries for {count} prompts; give one each, or one for all")


def _stream_interval(values: Mapping[str, Any]) -> int:
    value = values.get("stream_interval")
    return 1 if value is None else read_as(PositiveInt, value, "stream_interval")


def _prompts(body: GenerateBody) -> list[str | tuple[int, ...]]:
    if body.text is not None:
        return [body.text] if isinstance(body.text, str) else list(body.text)
    ids: list[Any] = body.input_ids or []
    return [tuple(item) for item in ids] if isinstance(ids[0], list) else [tuple(ids)]


def _request_ids(body: GenerateBody, count: int) -> list[str | None]:
    if body.rid is None:
        return [None] * count
    if isinstance(body.rid, str):
        return [body.rid] if count == 1 else [f"{body.rid}-{index}" for index in range(count)]
    names = body.rid
    if len(names) != count:
        raise UsageError(f"'rid' has {len(names)} request ids for {count} prompts; give one each")
    if len(set(names)) < count:
        raise UsageError("'rid' names a request twice")
    return list(names)
