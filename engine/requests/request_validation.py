"""Validates requests against a model; the scheduler validates them against the KV cache."""

from tapscope.core.errors import UsageError
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.requests.pooling import POOLINGS
from tapscope.engine.requests.request import Request


def check_request(request: Request, model: ModelConfig, *, is_observed: bool) -> None:
    """Raise UsageError when ``model`` cannot compute ``request``, or it needs an observer and there is none."""
    _check_tokens(request, model)
    if request.pooling not in (None, *POOLINGS):
        raise UsageError(
            f"request {request.id!r}: invalid pooling {request.pooling!r}: expected {' or '.join(POOLINGS)}"
        )
    if request.capture not in ("", "stats", "full"):
        raise UsageError(f"request {request.id!r}: invalid capture {request.capture!r}: expected 'stats' or 'full'")
    if request.capture and not is_observed:
        raise UsageError(
            f"request {request.id!r}: capture={request.capture!r}, but this engine has no observer; pass one to "
            "LLM, or serve with `tapscope serve`"
        )
    if request.params.routed_experts and model.moe is None:
        raise UsageError(f"request {request.id!r} requests routed experts, but {model.architecture} has no experts")


def _check_tokens(request: Request, model: ModelConfig) -> None:
    vocab = model.vocab_size
    for name, ids in (("the prompt", request.prompt_ids), ("forced_token_ids", request.forced_token_ids)):
        wrong = next((token for token in ids if type(token) is not int or not 0 <= token < vocab), None)
        if wrong is not None:
            raise UsageError(f"request {request.id!r}: invalid token id {wrong!r} in {name}: expected 0 to {vocab - 1}")
    if not request.prompt_ids:
        raise UsageError(f"request {request.id!r} has no prompt tokens; pass at least one")
    limit, needed = model.max_positions, len(request.prompt_ids) + request.max_new_tokens
    if needed > limit:
        raise UsageError(
            f"request {request.id!r} needs {needed} positions (prompt {len(request.prompt_ids)}, "
            f"{request.max_new_tokens} new) but the model has {limit}; shorten the prompt or lower max_new_tokens"
        )
