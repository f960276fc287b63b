"""Request bodies of SGLang's routes for trainers: pausing generation, updating weights, releasing memory."""

from typing import Annotated, Literal

from msgspec import Meta

from tapscope.core.convert import Count, must_be
from tapscope.core.errors import RequestError
from tapscope.engine.api.request_model import Name, RequestModel


class WeightsBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /update_weights_from_disk."""

    FALSE_IS_ABSENT = True

    model_path: Annotated[Name, must_be("the directory of a checkpoint, on the server's host")]
    """Directory of a checkpoint, on the server's host."""
    weight_version: Name | None = None
    """Version name of the new weights, reported in responses. None: the name stays the same."""
    flush_cache: bool = True
    """Must be true, as cached prefixes belong to the old weights."""

    def __post_init__(self) -> None:
        if not self.flush_cache:
            rule = "must be true, as cached prefixes belong to the old weights"
            raise RequestError(f"flush_cache=False: {rule}", param="flush_cache")


class InitGroupBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /init_weights_update_group."""

    master_address: Annotated[Name, must_be("the host on which the trainer, rank 0, listens")]
    """Host on which the trainer, rank 0 of the group, listens."""
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    """TCP port on which the trainer listens."""
    rank_offset: Annotated[int, Meta(ge=1), must_be("the rank of the engine's first rank, at least 1")]
    """Group rank of the engine's first rank."""
    world_size: Annotated[int, Meta(ge=2)]
    """Number of ranks in the group: those of the trainer and of the engine."""
    group_name: Name = "weight_update_group"
    """Name of the process group, used by later calls."""
    backend: Annotated[Name, must_be("gloo or nccl")] = "nccl"
    """``torch.distributed`` backend: ``nccl`` or ``gloo``."""


class DestroyGroupBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /destroy_weights_update_group."""

    group_name: Name = "weight_update_group"
    """Name of the process group to leave."""


class DistributedWeightsBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /update_weights_from_distributed; cached prefixes are dropped regardless of ``flush_cache``."""

    FALSE_IS_ABSENT = True
    IGNORED = ("flush_cache", "torch_empty_cache")

    names: Annotated[list[Name], Meta(min_length=1)]
    """Hugging Face names of the tensors, in broadcast order."""
    dtypes: list[Name]
    """Dtype of each tensor, for example ``bfloat16``."""
    shapes: list[list[Count]]
    """Shape of each tensor."""
    group_name: Name = "weight_update_group"
    """Name of the process group over which the trainer broadcasts."""
    weight_version: Name | None = None
    """Version name of the new weights, reported in responses. None: the name stays the same."""


class DigestBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /weights_digest."""

    names: Annotated[list[Name], must_be("a list of the caller's names, which choose between layouts")] | None = None
    """The caller's weight names, which select one of the model's naming schemes if it has several (ours)."""


class MemoryBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /release_memory_occupation and /resume_memory_occupation."""

    tags: Annotated[list[Name], must_be("a list of 'weights' and 'kv_cache'")] | None = None
    """``weights``, ``kv_cache`` or both. None: both."""


class PauseBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /pause_generation."""

    FALSE_IS_ABSENT = True

    mode: Literal["abort", "retract", "in_place"] = "abort"
    """``abort`` ends live requests, ``retract`` preempts them and frees their pages, ``in_place`` keeps their pages."""


class ContinueBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /continue_generation."""

    IGNORED = ("torch_empty_cache",)
