"""Responses of GET /v1/models: the served model, in OpenAI's or Anthropic's format."""

from datetime import UTC, datetime
from typing import Any

from tapscope.engine.api.served_model import ServedModel


def model_card(model: ServedModel, *, for_anthropic: bool = False) -> dict[str, Any]:
    """GET /v1/models/NAME."""
    if for_anthropic:
        created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        card = {"type": "model", "id": model.name, "display_name": model.name, "created_at": created}
        most = model.max_positions - 1  # prompt and output have at least one token each
        return card | {"lifecycle": "active", "max_input_tokens": most, "max_tokens": most}
    named = {"id": model.name, "object": "model", "created": model.created, "owned_by": "tapscope"}
    return named | {"max_model_len": model.max_positions}


def model_list(model: ServedModel, *, for_anthropic: bool = False) -> dict[str, Any]:
    """GET /v1/models."""
    cards = [model_card(model, for_anthropic=for_anthropic)]
    if for_anthropic:
        return {"data": cards, "has_more": False, "first_id": model.name, "last_id": model.name}
    return {"object": "list", "data": cards}
