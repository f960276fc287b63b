"""Request bodies of SGLang's native routes, and the generations that POST /generate requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tapscope.core.convert import PositiveInt, shown
from tapscope.core.errors import RequestError, UsageError
from tapscope.engine.api.request_model import RequestModel, read_as
from tapscope.engine.api.sampling_fields import NEUTRAL, Priority
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.params.sampling_params import SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128
_RENAMED = {"no_stop_trim": "include_stop_str_in_output", "sampling_seed": "seed"}
_OTHER = ("spaces_between_special_tokens", "stream_interval")  # the first: older tokenizers' only

_SAMPLING = msgspec.json.schema_components([SamplingParams], ref_template="{name}")[1]["SamplingParams"]["properties"]
Sampling = Annotated[
    dict[str, Any],
    Meta(
        description="As SamplingParams; `no_stop_trim` is `include_stop_str_in_output`, `sampling_seed` is `seed`.",
        extra_json_schema={"properties": _SAMPLING},
    ),
]
Name = Annotated[str, Meta(min_length=1, max_length=500)]
Ids = Annotated[list[int], Meta(min_length=1)]
Count = Annotated[int, Meta(ge=0)]
Experts = Annotated[str, Meta(min_length=1)]
Start = Annotated[int, Meta(ge=-1)]


def _must_be(text: str) -> Meta:
    return Meta(extra={"must be": text})


_EACH = ", or a list of them, one for each prompt"


class GenerateBody(RequestModel, kw_only=True, frozen=True):
    """POST /generate: one prompt, or a batch of them."""

    FALSE_IS_ABSENT = True

    text: (
        Annotated[str | Annotated[list[str], Meta(min_length=1)], _must_be("a string or a non-empty list of strings")]
        | None
    ) = None
    input_ids: (
        Annotated[
            list[int | Ids],
            Meta(min_length=1),
            _must_be("a list of token ids or a list of such lists, none of them empty"),
        ]
        | None
    ) = None
    sampling_params: Annotated[Sampling | list[Sampling], _must_be("a JSON object" + _EACH)] = msgspec.field(
        default_factory=dict
    )
    rid: (
        Annotated[
            Name | list[Name],
            _must_be(
                "a string (of several prompts: the prefix of their ids), or a list of strings, one for each prompt"
            ),
        ]
        | None
    ) = None
    stream: bool = False
    return_logprob: Annotated[bool | list[bool], _must_be("true or false" + _EACH)] = False
    logprob_start_len: Annotated[Start | list[Start], _must_be("an integer ≥ -1 (-1: no prompt tokens)" + _EACH)] = -1
    top_logprobs_num: Annotated[Count | list[Count], _must_be("an integer ≥ 0" + _EACH)] = 0
    token_ids_logprob: (
        Annotated[
            list[Count | list[Count]], _must_be("a list of token ids, or a list of such lists, one for each prompt")
        ]
        | None
    ) = None
    return_text_in_logprobs: bool = False
    capture: Literal["stats", "full"] | None = None
    return_routed_experts: bool = False
    return_hidden_states: bool = False
    routed_experts: (
        Annotated[
            Experts | list[Experts | None],
            _must_be("base64 of int32 [positions, layers, k], as meta_info.routed_experts has it" + _EACH),
        ]
        | None
    ) = None
    priority: Priority = 0
    cache_salt: Name | None = None
    extra_key: Name | None = None
    lora_path: (
        Annotated[Name | list[Name | None], _must_be("the name of a loaded adapter, or a list of names" + _EACH[4:])]
        | None
    ) = None
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None
    log_metrics: bool = True
    session_id: Any = None
    conversation_id: Any = None
    custom_labels: Any = None
    external_trace_header: Any = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("the body needs exactly one of 'text' and 'input_ids'")
        for name in ("input_ids", "token_ids_logprob"):
            value = getattr(self, name)
            if value and isinstance(value[0], int):  # one list, so no other item is a list
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
        """Cache salt of the request, under either name (``extra_key`` is SGLang's)."""
        return self.cache_salt or self.extra_key or ""

    @property
    def replica(self) -> int | None:
        """The requested DP replica, under either name."""
        return self.data_parallel_rank if self.routed_dp_rank is None else self.routed_dp_rank


class LoadAdapterBody(RequestModel, kw_only=True, frozen=True):
    """POST /load_lora_adapter."""

    FALSE_IS_ABSENT = True
    IGNORED = ("lora_int_id", "base_model_name")

    lora_name: Name
    lora_path: Annotated[Name, _must_be("the directory of a PEFT adapter, on the server's host")]


class UnloadAdapterBody(RequestModel, kw_only=True, frozen=True):
    """POST /unload_lora_adapter."""

    IGNORED = ("lora_int_id",)

    lora_name: Name


class InitGroupBody(RequestModel, kw_only=True, frozen=True):
    """POST /init_weights_update_group."""

    master_address: Annotated[Name, _must_be("the host on which the trainer, rank 0, listens")]
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, Meta(ge=1), _must_be("the rank of the engine's first rank, at least 1")]
    world_size: Annotated[int, Meta(ge=2)]
    group_name: Name = "weight_update_group"
    backend: Annotated[Name, _must_be("gloo or nccl")] = "nccl"


class DestroyGroupBody(RequestModel, kw_only=True, frozen=True):
    """POST /destroy_weights_update_group."""

    group_name: Name = "weight_update_group"


class DistributedWeightsBody(RequestModel, kw_only=True, frozen=True):
    """POST /update_weights_from_distributed. Cached prefixes are always dropped, whatever ``flush_cache`` says."""

    FALSE_IS_ABSENT = True
    IGNORED = ("flush_cache", "torch_empty_cache")

    names: Annotated[list[Name], Meta(min_length=1)]
    dtypes: list[Name]
    shapes: list[list[Count]]
    group_name: Name = "weight_update_group"
    weight_version: Name | None = None


class DigestBody(RequestModel, kw_only=True, frozen=True):
    """POST /weights_digest."""

    names: Annotated[list[Name], _must_be("a list of the caller's names, which choose between layouts")] | None = None


class MemoryBody(RequestModel, kw_only=True, frozen=True):
    """POST /release_memory_occupation and /resume_memory_occupation."""

    tags: Annotated[list[Name], _must_be("a list of 'weights' and 'kv_cache'")] | None = None


class ProfileBody(RequestModel, kw_only=True, frozen=True):
    """POST /start_profile. The server's setting ``profile_dir`` says where traces are written."""

    FALSE_IS_ABSENT = True
    IGNORED = ("record_shapes", "activities", "start_step", "profile_id", "profile_prefix")


class AbortBody(RequestModel, kw_only=True, frozen=True):
    """POST /abort_request."""

    FALSE_IS_ABSENT = True

    rid: Name | None = None
    abort_all: bool = False

    def __post_init__(self) -> None:
        if (self.rid is None) == (not self.abort_all):
            raise RequestError("the body needs either 'rid' or 'abort_all': true")


class WeightsBody(RequestModel, kw_only=True, frozen=True):
    """POST /update_weights_from_disk."""

    FALSE_IS_ABSENT = True

    model_path: Annotated[Name, _must_be("the directory of a checkpoint, on the server's host")]
    weight_version: Name | None = None
    flush_cache: bool = True

    def __post_init__(self) -> None:
        if not self.flush_cache:
            rule = "must be true, as cached prefixes belong to the old weights"
            raise RequestError(f"flush_cache=False: {rule}", param="flush_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobOptions:
    """Which log-probabilities of one generation are returned."""

    enabled: bool = False
    top: int = 0
    """Number of the most likely tokens at each position."""
    start: int = -1
    """The first prompt token whose log-probability is returned; -1 for none."""
    token_ids: tuple[int, ...] = ()
    """Further tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation that a body requests."""

    prompt: str | tuple[int, ...]
    params: SamplingParams
    request_id: str | None
    logprobs: LogprobOptions = LogprobOptions()
    stream_interval: int = 1
    """Tokens between two events of a stream, except for the first and the last."""
    adapter: str = ""
    """The LoRA adapter; empty for the model alone."""
    experts: str = ""
    """Recorded expert ids, in base64; empty: none."""


def read_generations(body: GenerateBody, model: ServedModel) -> list[Generation]:
    """Every generation of ``body``, prompt by prompt; raises UsageError if they exceed the limits of ``model``."""
    prompts = _prompts(body)
    model.limits.check_generations(len(prompts), 1, "text or input_ids")
    for prompt in prompts:
        if isinstance(prompt, str) and model.tokenizer is not None:
            model.check_text(prompt, "text")
    many = body.sampling_params
    if isinstance(many, list) and len(many) != len(prompts):
        raise UsageError(f"'sampling_params' has {len(many)} entries for {len(prompts)} prompts; give one each")
    found: list[Generation] = []
    each = zip(prompts, _for_each(many, len(prompts)), _logprobs(body, len(prompts)), strict=True)
    count = len(prompts)
    names, experts = _request_ids(body, count), _experts(body, count)
    of_prompts = zip(each, names, _adapters(body, count, model), experts, strict=True)
    for (prompt, values, logprobs), name, adapter, ids in of_prompts:
        params, interval = _sampling(values, logprobs, body), _stream_interval(values)
        model.limits.check_generations(len(found) + params.n, 1, "sampling_params.n")
        for index in range(params.n):
            own = name if name is None or params.n == 1 else f"{name}-{index}"
            one = Generation(
                prompt=prompt,
                params=params.child(index),
                request_id=own,
                logprobs=logprobs,
                stream_interval=interval,
                adapter=adapter,
                experts=ids,
            )
            found.append(one)
    _check_answer(found, model, streams=body.stream)
    return found


def _check_answer(found: Sequence[Generation], model: ServedModel, *, streams: bool) -> None:
    """Check the limit on values, counting each character of a string as a token and the repetition in stream events."""
    values = 0
    for one in found:
        new = min(one.params.max_new_tokens, model.max_positions)
        num_prompt = min(len(one.prompt), model.max_positions)
        num_events = max(1, new // one.stream_interval // 2) if streams else 1
        values += num_events * model.num_values(one.params, num_prompt, new)
    model.limits.check_answer(values, "sampling_params")


def is_batch(body: GenerateBody, count: int) -> bool:
    """Whether the response is a list."""
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
    columns = {
        "return_logprob": _for_each(body.return_logprob, count),
        "top_logprobs_num": _for_each(body.top_logprobs_num, count),
        "logprob_start_len": _for_each(body.logprob_start_len, count),
        "token_ids_logprob": each_ids,
    }
    for name, column in columns.items():
        if len(column) != count:
            raise UsageError(f"{name!r} has {len(column)} entries for {count} prompts; give one each, or one for all")
    found = [
        LogprobOptions(enabled=enabled, top=top, start=start, token_ids=tuple(tokens))
        for enabled, top, start, tokens in zip(*columns.values(), strict=True)
    ]
    if any(each.token_ids and not each.enabled for each in found):
        raise UsageError("'token_ids_logprob' adds to the tokens' own log-probabilities; set 'return_logprob'")
    return found


def _adapters(body: GenerateBody, count: int, model: ServedModel) -> list[str]:
    """Adapter of each prompt, empty for none; raises RequestError for one that is not loaded."""
    names = body.lora_path if isinstance(body.lora_path, list) else [body.lora_path] * count
    if len(names) != count:
        raise UsageError(f"'lora_path' has {len(names)} entries for {count} prompts; give one each, or one for all")
    return [model.selected(None, name).adapter if name else "" for name in names]


def _experts(body: GenerateBody, count: int) -> list[str]:
    """Recorded expert ids of each prompt, empty for none."""
    given = body.routed_experts if isinstance(body.routed_experts, list) else [body.routed_experts] * count
    if len(given) != count:
        raise UsageError(f"'routed_experts' has {len(given)} entries for {count} prompts; give one each")
    return [ids or "" for ids in given]


def _for_each(value: Any, count: int) -> list[Any]:
    return value if isinstance(value, list) else [value] * count


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
