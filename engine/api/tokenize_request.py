"""vLLM's /tokenize and /detokenize: convert a prompt or conversation to token ids, and token ids to text."""

from typing import Annotated, Any

from msgspec import Meta

from tapscope.core.convert import Count
from tapscope.core.errors import RequestError
from tapscope.engine.api.chat_messages import ChatMessage
from tapscope.engine.api.chat_request import ChatRequest
from tapscope.engine.api.prompting import encode_conversation
from tapscope.engine.api.request_model import RequestModel
from tapscope.engine.api.served_model import ServedModel

_CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


class TokenizeBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /tokenize: a prompt as in /v1/completions, or messages as in /v1/chat/completions."""

    model: str | None = None
    """Name of the model; MODEL:ADAPTER or ADAPTER selects a LoRA adapter. None: the served model."""
    prompt: str | None = None
    """The string to tokenize; excludes ``messages``."""
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    """Conversation to render with the chat template; excludes ``prompt``."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add special tokens. None: true for a prompt, false for messages (the template adds them)."""
    return_token_strs: bool = False
    """Return each token as a string, in ``token_strs``."""
    add_generation_prompt: bool = True
    """End the prompt with the header of the assistant's turn."""
    continue_final_message: bool = False
    """Continue the last message, which must be the assistant's, instead of starting a new one."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template; variables that the template does not read are rejected."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call, in OpenAI's format."""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("the body needs exactly one of 'prompt' and 'messages'")


class DetokenizeBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /detokenize."""

    model: str | None = None
    """Name of the model; MODEL:ADAPTER or ADAPTER selects a LoRA adapter. None: the served model."""
    tokens: list[Count]
    """Token ids, all within the vocabulary."""


def tokenize(body: Any, model: ServedModel) -> dict[str, Any]:
    """Return the response to POST /tokenize for the decoded JSON ``body``; raises RequestError."""
    fields = TokenizeBody.parse(body)
    model.check_name(fields.model)
    tokenizer = model.require_tokenizer()
    if fields.prompt is None:
        chat = {name: body[name] for name in ("messages", "add_special_tokens", *_CHAT_FIELDS) if name in body}
        ids = list(encode_conversation(model, ChatRequest.parse(chat, model).conversation)[1])
    else:
        unused = next((name for name in _CHAT_FIELDS if body.get(name) is not None), None)
        if unused is not None:
            raise RequestError(f"{unused} applies to messages, not to a prompt; leave it out", param=unused)
        model.check_text(fields.prompt, "prompt")
        ids = tokenizer.encode(fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
    strings = [tokenizer.token_string(token) for token in ids] if fields.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.max_positions, "tokens": ids, "token_strs": strings}


def detokenize(body: Any, model: ServedModel) -> dict[str, Any]:
    """Return the response to POST /detokenize for the decoded JSON ``body``; the text includes special tokens.

    Raises RequestError, also for ids outside the vocabulary.
    """
    fields = DetokenizeBody.parse(body)
    model.check_name(fields.model)
    tokenizer = model.require_tokenizer()
    wrong = next((token for token in fields.tokens if token >= model.vocab_size > 0), None)
    if wrong is not None:
        raise RequestError(f"invalid token id {wrong} in tokens: expected 0 to {model.vocab_size - 1}", param="tokens")
    return {"prompt": tokenizer.decode(fields.tokens, skip_special_tokens=False)}
