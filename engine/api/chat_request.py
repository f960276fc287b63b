"""The body of POST /v1/chat/completions."""

from dataclasses import dataclass
from typing import Any

from tapscope.core.errors import RequestError
from tapscope.engine.api import sampling_fields
from tapscope.engine.api.chat_messages import read_messages
from tapscope.engine.api.prompting import Conversation
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.api.tools import read_tools
from tapscope.engine.params.json_fields import Fields

_FIELDS = (
    *("model", "messages", "max_tokens", "max_completion_tokens", "stream", "stream_options", "logprobs"),
    *("top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort"),
    *sampling_fields.OPENAI,
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "separate_reasoning"),
    *sampling_fields.EXTRA,
    *sampling_fields.ROUTING,
)
_TOP_LOGPROBS = 20
# Of these OpenAI takes several values; here only the one that asks for nothing special.
_ONLY = {"modalities": ["text"], "service_tier": ("auto", "default")}
_NEUTRAL = dict(sampling_fields.NEUTRAL) | {"add_special_tokens": (False,)}  # the chat template writes them


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked body."""

    talk: Conversation
    stream: bool
    include_usage: bool
    """Whether a stream ends with its token counts."""
    with_logprobs: bool
    priority: int
    cache_salt: str
    request_id: str | None

    @classmethod
    def parse(cls, body: Any, model: ServedModel) -> "ChatRequest":
        """From decoded JSON; raises RequestError with one sentence that says what to write instead."""
        fields = Fields(body)
        for name in ("functions", "function_call"):
            if fields.has(name):
                raise RequestError(f"{name} is not supported; use tools and tool_choice", param=name)
        check_only(fields)
        fields.refuse_unknown(_FIELDS, (*sampling_fields.WITHOUT_EFFECT, *_ONLY), _NEUTRAL)
        model.check_name(fields.text("model"))
        template = model.require_template()
        stream, include_usage = read_stream(fields)
        values = sampling_fields.read_sampling(fields, model.sampling) | sampling_fields.response_constraint(fields)
        values["logprobs"] = _num_logprobs(fields)
        limit_name = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
        talk = Conversation(
            messages=read_messages(fields, has_developer_role="developer" in template.sources["default"]),
            sampling=values,
            tools=read_tools(fields),
            max_tokens=fields.whole(limit_name, 1),
            max_tokens_name=limit_name,
            variables=_variables(fields),
            add_generation_prompt=fields.flag("add_generation_prompt", True),
            continue_final_message=fields.flag("continue_final_message"),
            separate_reasoning=fields.flag("separate_reasoning", True),
        )
        _check_continued(talk)
        return cls(
            talk=talk,
            stream=stream,
            include_usage=include_usage,
            with_logprobs=values["logprobs"] is not None,
            priority=fields.whole("priority", -(1 << 31), 1 << 31) or 0,
            cache_salt=fields.name("cache_salt") if fields.has("cache_salt") else "",
            request_id=fields.text("rid"),
        )


def check_only(fields: Fields) -> None:
    """Refuse values beyond those that ask for nothing."""
    for name, only in _ONLY.items():
        value = fields.values.get(name)
        known = only if isinstance(only, tuple) else (only,)
        if value is not None and value not in known:
            raise RequestError(f"{name} is {value!r}; only {known[0]!r} is supported", param=name)


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """(stream, whether it ends with usage)."""
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise RequestError("stream_options is only for streams; set stream to true", param="stream_options")
    options.refuse_unknown(("include_usage",), ("include_obfuscation",))
    if options.flag("include_obfuscation"):
        raise options.wrong("include_obfuscation", "it is not supported; leave it out")
    return stream, options.flag("include_usage")


def _num_logprobs(fields: Fields) -> int | None:
    top = fields.whole("top_logprobs", 0, _TOP_LOGPROBS)
    if not fields.flag("logprobs"):
        if top:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None
    return top or 0


def _variables(fields: Fields) -> dict[str, Any]:
    given = fields.object("chat_template_kwargs")
    variables = {} if given is None else dict(given.values)
    taken = {"messages", "tools", "documents", "add_generation_prompt", "chat_template"} & variables.keys()
    if taken:
        raise RequestError(f"chat_template_kwargs may not set {min(taken)}", param="chat_template_kwargs")
    effort = fields.text("reasoning_effort")
    return variables if effort is None else variables | {"reasoning_effort": effort}


def _check_continued(talk: Conversation) -> None:
    if talk.continue_final_message and talk.messages[-1]["role"] != "assistant":
        raise RequestError(
            "continue_final_message needs an assistant's message at the end", param="continue_final_message"
        )
