"""Normalize the prompts and parameters that callers pass to LLM."""

from collections.abc import Mapping, Sequence
from typing import Any

from tapscope.core.errors import UsageError
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""A string, or token ids."""

Messages = Sequence[Mapping[str, Any]]
"""One conversation: messages with ``role`` and ``content``, as in OpenAI's API."""

Params = SamplingParams | Sequence[SamplingParams] | None
"""Sampling parameters for all prompts, or one per prompt; None for the defaults."""


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a single prompt as a list of one, and a sequence of prompts as a list."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and all(isinstance(item, int) for item in items) else items


def require_list(prompts: Any) -> None:
    """Raise UsageError unless ``prompts`` is a list of prompts."""
    if isinstance(prompts, str):
        raise UsageError("prompts is a single string; pass a list of prompts")
    if not isinstance(prompts, Sequence):
        raise UsageError(f"prompts is {type(prompts).__name__}; pass a list of strings or of lists of token ids")


def token_ids(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the prompt's token ids; raises UsageError for an invalid prompt or a string without a tokenizer."""
    if not isinstance(prompt, str):
        try:
            return tuple(prompt)
        except TypeError:
            raise UsageError(f"a prompt is {type(prompt).__name__}; pass a string or a list of token ids") from None
    if tokenizer is None:
        raise UsageError("the checkpoint has no tokenizer.json; pass prompts as token ids")
    return tuple(tokenizer.encode(prompt))


def resolve_params(
    params: SamplingParams | None, max_new_tokens: int | None, ignore_eos: bool | None
) -> SamplingParams:
    """Return ``params``, or parameters from the two shorthand arguments; raises UsageError if both are given."""
    if params is not None and not isinstance(params, SamplingParams):
        raise UsageError(f"params is {type(params).__name__}; pass SamplingParams, or a list with one per prompt")
    short = {"max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos}
    given = {name: value for name, value in short.items() if value is not None}
    if params is not None and given:
        raise UsageError(f"{' and '.join(given)} given together with params; set it in params instead")
    return SamplingParams.build(given) if params is None else params


def resolve_params_each(
    params: Params, count: int, max_new_tokens: int | None, ignore_eos: bool | None
) -> list[SamplingParams]:
    """Return the parameters of each of ``count`` prompts; raises UsageError."""
    each = params if isinstance(params, Sequence) else [params] * count
    return [resolve_params(one, max_new_tokens, ignore_eos) for one in one_per_prompt("params", each, count)]


def adapters_each(adapter: str | Sequence[str | None] | None, count: int) -> list[str]:
    """Return the adapter of each of ``count`` prompts; empty: the base model. A single name applies to all prompts."""
    each = [adapter] * count if adapter is None or isinstance(adapter, str) else adapter
    return [name or "" for name in one_per_prompt("adapter", each, count)]


def one_per_prompt(name: str, values: Sequence[Any] | None, count: int) -> Sequence[Any]:
    """Return ``values``, or ``count`` Nones if ``values`` is None; raises UsageError unless the length is ``count``."""
    if values is None:
        return [None] * count
    if len(values) != count:
        raise UsageError(f"{name} has {len(values)} entries for {count} prompts; give one each")
    return values


def expand_generations(params: SamplingParams, name: str) -> list[tuple[SamplingParams, str]]:
    """Return (parameters, request id) of each of the ``n`` generations of request ``name``."""
    if params.n == 1:
        return [(params, name)]
    return [(params.child(index), f"{name}-{index}") for index in range(params.n)]
