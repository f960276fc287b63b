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
    """Directory of a checkpoint, on the server's host."""
    weight_version: Name | None = None
    """Name of the new weights, which answers then have. None: the name stays."""
    flush_cache: bool = True
    """Must be true: cached prefixes belong to the old weights."""

    def __post_init__(self) -> None:
        if not self.flush_cache:
            rule = "must be true, as cached prefixes belong to the old weights"
            raise RequestError(f"flush_cache=False: {rule}", param="flush_cache")


class InitGroupBody(RequestModel, kw_only=True, frozen=True):
    """POST /init_weights_update_group."""

    master_address: Annotated[Name, must_be("the host on which the trainer, rank 0, listens")]
    """Host on which the trainer, rank 0 of the group, listens."""
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    """TCP port on which it listens."""
    rank_offset: Annotated[int, Meta(ge=1), must_be("the rank of the engine's first rank, at least 1")]
    """Rank of the engine's first rank in the group."""
    world_size: Annotated[int, Meta(ge=2)]
    """Ranks of the group: the trainer's and the engine's."""
    group_name: Name = "weight_update_group"
    """Name by which later calls refer to the process group."""
    backend: Annotated[Name, must_be("gloo or nccl")] = "nccl"
    """torch.distributed's: ``nccl`` or ``gloo``."""


class DestroyGroupBody(RequestModel, kw_only=True, frozen=True):
    """POST /destroy_weights_update_group."""

    group_name: Name = "weight_update_group"
    """The group to leave."""


class DistributedWeightsBody(RequestModel, kw_only=True, frozen=True):
    """POST /update_weights_from_distributed. Cached prefixes are always dropped, whatever ``flush_cache`` says."""

    FALSE_IS_ABSENT = True
    IGNORED = ("flush_cache", "torch_empty_cache")

    names: Annotated[list[Name], Meta(min_length=1)]
    """Hugging Face's names of the tensors, in the order of the broadcasts."""
    dtypes: list[Name]
    """dtype of each, such as ``bfloat16``."""
    shapes: list[list[Count]]
    """Shape of each."""
    group_name: Name = "weight_update_group"
    """The group that broadcasts."""
    weight_version: Name | None = None
    """Name of the new weights, which answers then have. None: the name stays."""


class DigestBody(RequestModel, kw_only=True, frozen=True):
    """POST /weights_digest."""

    names: Annotated[list[Name], must_be("a list of the caller's names, which choose between layouts")] | None = None
    """The caller's names of the weights, where a model has several naming schemes (ours)."""


class MemoryBody(RequestModel, kw_only=True, frozen=True):
    """POST /release_memory_occupation and /resume_memory_occupation."""

    tags: Annotated[list[Name], must_be("a list of 'weights' and 'kv_cache'")] | None = None
    """``weights``, ``kv_cache`` or both. None: both."""


class PauseBody(RequestModel, kw_only=True, frozen=True):
    """POST /pause_generation."""

    FALSE_IS_ABSENT = True

    mode: Literal["abort", "retract", "in_place"] = "abort"
    """Live requests ``abort``, give up their pages (``retract``) or keep them (``in_place``)."""


class ContinueBody(RequestModel, kw_only=True, frozen=True):
    """POST /continue_generation."""

    IGNORED = ("torch_empty_cache",)
