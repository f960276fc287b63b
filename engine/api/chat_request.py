"""The body of POST /v1/chat/completions."""

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from tapscope.core.convert import PositiveInt
from tapscope.core.errors import RequestError
from tapscope.engine.api.chat_messages import ChatMessage, read_messages
from tapscope.engine.api.prompting import Conversation
from tapscope.engine.api.sampling_fields import SamplingFields
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.api.tools import ToolChoice, read_tools


class ChatBody(SamplingFields, kw_only=True, frozen=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    """The conversation, oldest message first; text only."""
    max_tokens: PositiveInt | None = None
    """Deprecated name of ``max_completion_tokens``."""
    max_completion_tokens: PositiveInt | None = None
    """Maximum number of generated tokens, reasoning included. None: all that fit."""
    logprobs: bool = False
    """Return the logprob of each generated token."""
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Number of most likely tokens to return at each position; requires ``logprobs``."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call, in OpenAI's format."""
    tool_choice: ToolChoice | None = None
    """``none``, ``auto``, ``required`` or one function. None: ``auto`` with tools, otherwise ``none``."""
    parallel_tool_calls: bool = True
    """Allow several calls in one answer."""
    reasoning_effort: str | None = None
    """Variable of the chat template; also sets the variable ``enable_thinking``, to false for ``none``."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template; variables that the template does not read are rejected (vLLM, SGLang)."""
    add_generation_prompt: bool = True
    """End the prompt with the header of the assistant's turn (vLLM)."""
    continue_final_message: bool = False
    """Continue the last message, which must be the assistant's, instead of starting a new one (vLLM, SGLang)."""
    separate_reasoning: bool = True
    """Return reasoning as ``reasoning_content``, not in ``content`` (SGLang)."""
    add_special_tokens: bool = False
    """Let the tokenizer add special tokens in addition to those of the chat template (vLLM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A validated request to POST /v1/chat/completions."""

    conversation: Conversation
    stream: bool
    include_usage: bool
    """Whether a stream ends with a chunk of token counts."""
    continuous_usage: bool
    """Whether each chunk of a stream includes the token counts so far of its choice."""
    with_logprobs: bool
    has_prompt_logprobs: bool
    """Whether the response includes vLLM's ``prompt_logprobs``."""
    with_token_ids: bool
    """Whether choices include ``token_ids``, and the response ``prompt_token_ids``."""
    tokens_as_ids: bool
    """Whether tokens in logprobs are written as ``token_id:ID``."""
    priority: int
    cache_salt: str
    request_id: str | None

    @classmethod
    def parse(cls, body: Any, model: ServedModel) -> "ChatRequest":
        """Parse and validate decoded JSON; the RequestError names the field, its value and the valid values."""
        for name in ("functions", "function_call"):
            if isinstance(body, dict) and body.get(name) is not None:
                raise RequestError(f"{name} is not supported; use tools and tool_choice", param=name)
        fields = ChatBody.parse(body)
        model.check_name(fields.model)
        template = model.require_template()
        include_usage = fields.include_usage
        sampling = fields.sampling(model) | {"logprobs": _num_logprobs(fields)}
        limit_name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
        has_developer_role = "developer" in template.sources["default"]
        conversation = Conversation(
            messages=read_messages(fields.messages, has_developer_role=has_developer_role),
            sampling=sampling,
            tools=read_tools(fields.tools or (), fields.tool_choice, is_parallel=fields.parallel_tool_calls),
            max_tokens=getattr(fields, limit_name),
            max_tokens_name=limit_name,
            variables=_variables(fields),
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            separate_reasoning=fields.separate_reasoning,
            constraint_field=fields.constraint_field,
            add_special_tokens=fields.add_special_tokens,
            max_prompt_tokens=fields.max_prompt_tokens(getattr(fields, limit_name), model),
        )
        if conversation.continue_final_message and conversation.messages[-1]["role"] != "assistant":
            name = "continue_final_message"
            raise RequestError(f"{name} needs an assistant's message at the end", param=name)
        return cls(
            conversation=conversation,
            stream=fields.stream,
            include_usage=include_usage,
            continuous_usage=fields.continuous_usage,
            with_logprobs=fields.logprobs,
            has_prompt_logprobs=fields.prompt_logprobs is not None,
            with_token_ids=fields.return_token_ids,
            tokens_as_ids=fields.return_tokens_as_token_ids,
            priority=fields.priority,
            cache_salt=fields.cache_salt,
            request_id=fields.rid,
        )


def _num_logprobs(fields: ChatBody) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return None


def _variables(fields: ChatBody) -> dict[str, Any]:
    variables = dict(fields.chat_template_kwargs or {})
    taken = {"messages", "tools", "documents", "add_generation_prompt", "chat_template"} & variables.keys()
    if taken:
        raise RequestError(f"chat_template_kwargs must not set {min(taken)}", param="chat_template_kwargs")
    effort = fields.reasoning_effort
    return variables if effort is None else variables | {"reasoning_effort": effort}
