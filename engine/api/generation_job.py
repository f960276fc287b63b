"""GenerationJob: one generation requested by an HTTP request."""

from collections.abc import Sequence
from dataclasses import dataclass

from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.params.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """One prompt with its sampling parameters and request options."""

    prompt: str | tuple[int, ...]
    params: SamplingParams
    request_id: str | None = None
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    """Name of the LoRA adapter; empty: the base model."""
    pooling: str | None = None
    experts: str = ""
    """Routed expert ids to replay, in base64; empty: none."""
    constraint_field: str = ""
    """Body field that constrains the output, for error messages; empty: the field name in ``params``."""


def make_jobs(
    prompts: Sequence[tuple[tuple[int, ...], SamplingParams]],
    request_id: str | None,
    model: ServedModel,
    priority: int = 0,
    cache_salt: str = "",
    constraint_field: str = "",
) -> list[GenerationJob]:
    """Return ``n`` jobs for each (prompt, params) pair; multiple jobs get ids ``request_id`` plus "-0", "-1", ..."""
    each = [(ids, params.child(index)) for ids, params in prompts for index in range(params.n)]
    names = [request_id if request_id is None or len(each) == 1 else f"{request_id}-{i}" for i in range(len(each))]
    return [
        GenerationJob(
            prompt=ids,
            params=params,
            request_id=name,
            priority=priority,
            cache_salt=cache_salt,
            adapter=model.adapter,
            constraint_field=constraint_field,
        )
        for (ids, params), name in zip(each, names, strict=True)
    ]
