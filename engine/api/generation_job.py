"""GenerationJob: one generation that an HTTP request asks the engine for."""

from collections.abc import Sequence
from dataclasses import dataclass

from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.params.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """A prompt with the settings of its request."""

    prompt: str | tuple[int, ...]
    params: SamplingParams
    request_id: str | None = None
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    """The LoRA adapter; empty for the model alone."""
    pooling: str | None = None
    experts: str = ""
    """Recorded expert ids, in base64; empty: none."""
    constraint_field: str = ""
    """Field of the body that constrains the output, for errors; empty: that of ``params``."""


def make_jobs(
    prompts: Sequence[tuple[tuple[int, ...], SamplingParams]],
    request_id: str | None,
    model: ServedModel,
    priority: int = 0,
    cache_salt: str = "",
    constraint_field: str = "",
) -> list[GenerationJob]:
    """``n`` generations of each prompt by ``model``; several get numbered ids derived from ``request_id``."""
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
