"""Request bodies of SGLang's routes for trainers: pauses, weights, their digests, and the memory of the engine."""

from typing import Annotated, Literal

from msgspec import Meta

from tapscope.core.convert import Count, must_be
from tapscope.core.errors import RequestError
from tapscope.engine.api.request_model import Name, RequestModel


class WeightsBody(RequestModel, kw_only=True, frozen=True):
    """POST /update_weights_from_disk."""

    FALSE_IS_ABSENT = True

    model_path: Annotated[Name, must_be("the directory of a checkpoint, on the server's host")]
    weight_version: Name | None = None
    flush_cache: bool = True

    def __post_init__(self) -> None:
        if not self.flush_cache:
            rule = "must be true, as cached prefixes belong to the old weights"
            raise RequestError(f"flush_cache=False: {rule}", param="flush_cache")


class InitGroupBody(RequestModel, kw_only=True, frozen=True):
    """POST /init_weights_update_group."""

    master_address: Annotated[Name, must_be("the host on which the trainer, rank 0, listens")]
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, Meta(ge=1), must_be("the rank of the engine's first rank, at least 1")]
    world_size: Annotated[int, Meta(ge=2)]
    group_name: Name = "weight_update_group"
    backend: Annotated[Name, must_be("gloo or nccl")] = "nccl"


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

    names: Annotated[list[Name], must_be("a list of the caller's names, which choose between layouts")] | None = None


class MemoryBody(RequestModel, kw_only=True, frozen=True):
    """POST /release_memory_occupation and /resume_memory_occupation."""

    tags: Annotated[list[Name], must_be("a list of 'weights' and 'kv_cache'")] | None = None


class PauseBody(RequestModel, kw_only=True, frozen=True):
    """POST /pause_generation."""

    FALSE_IS_ABSENT = True

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(RequestModel, kw_only=True, frozen=True):
    """POST /continue_generation."""

    IGNORED = ("torch_empty_cache",)
