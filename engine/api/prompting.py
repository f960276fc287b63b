"""Convert a conversation to prompt ids, sampling parameters and the reply format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tapscope.core.errors import RequestError
from tapscope.engine.api import reasoning
from tapscope.engine.api.harmony_parser import FINAL_CHANNEL
from tapscope.engine.api.harmony_parser import TAGS as HARMONY_TAGS
from tapscope.engine.api.reply import ReplyFormat
from tapscope.engine.api.sampling_fields import make_params
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.api.tool_formats import TOOL_FORMATS, CallGrammar, ToolFormat
from tapscope.engine.api.tools import NO_TOOLS, Tools, parameters_of
from tapscope.engine.params.sampling_params import CONSTRAINTS, SamplingParams
from tapscope.engine.text.chat_template import ChatTemplate, Message

_EFFORT = "reasoning_effort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A validated conversation, independent of the API that it was sent to."""

    messages: list[Message]
    sampling: dict[str, Any]
    """Arguments of SamplingParams, without max_new_tokens."""
    tools: Tools = NO_TOOLS
    max_tokens: int | None = None
    """Maximum number of new tokens; None: all positions that the prompt leaves free."""
    max_tokens_name: str = "max_tokens"
    messages_name: str = "messages"
    """Field names of ``max_tokens`` and ``messages`` in the request body, for errors."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as ``enable_thinking``."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    separate_reasoning: bool = True
    """Whether reasoning is separated from the answer."""
    add_special_tokens: bool = False
    """Whether the tokenizer adds special tokens to the rendered chat template."""
    constraint_field: str = ""
    """Body field that constrains the output, unless tools constrain it; empty: none."""
    max_prompt_tokens: int | None = None
    """Keep this many tokens at the end of the prompt; None: all."""

    @property
    def is_constrained(self) -> bool:
        """Whether a constraint applies from the first token of the answer."""
        return self.tools.is_forced or self.constraint is not None

    @property
    def constraint(self) -> str | None:
        """Name of the constraint on the whole output, if any; structural tags do not count: they allow tool calls."""
        return next((name for name in CONSTRAINTS if name != "structural_tag" and self.sampling.get(name)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Engine inputs for one request, and the format of its reply."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    form: ReplyFormat
    constraint_field: str
    """Body field that constrains the output; empty: none."""


def encode_conversation(model: ServedModel, conversation: Conversation) -> tuple[str, tuple[int, ...]]:
    """Render the chat template; return the prompt as a string and as token ids. Raises RequestError."""
    template, tokenizer = model.require_template(), model.require_tokenizer()
    _check_tools(model, template, conversation.tools)
    effort = _thinking_by_effort(template, conversation)
    for name in conversation.variables:
        if not template.reads(name, tools=bool(conversation.tools.definitions)) and not (effort and name == _EFFORT):
            param = name if name == _EFFORT else "chat_template_kwargs"
            raise RequestError(f"the chat template of {model.name} does not use {name!r}", param=param)
    text = template.render(
        conversation.messages,
        tools=conversation.tools.definitions if conversation.tools.choice != "none" else None,
        add_generation_prompt=conversation.add_generation_prompt and not conversation.continue_final_message,
        continue_final_message=conversation.continue_final_message,
        **(effort | _thinking_disabled(template, conversation) | dict(conversation.variables)),
    )
    if model.reasoning_format == "gpt_oss" and conversation.is_constrained and not conversation.continue_final_message:
        text += FINAL_CHANNEL
    model.check_text(text, conversation.messages_name)
    ids = tuple(tokenizer.encode(text, add_special_tokens=conversation.add_special_tokens))
    return text, ids if conversation.max_prompt_tokens is None else ids[-conversation.max_prompt_tokens :]


def make_prompt(model: ServedModel, conversation: Conversation) -> Prompt:
    """Build the prompt, sampling parameters and reply format of a conversation.

    Raises RequestError; the error for a prompt that is too long includes the token counts.
    """
    text, token_ids = encode_conversation(model, conversation)
    sampling, constraint_field = dict(conversation.sampling), conversation.constraint_field
    if conversation.tools.choice != "none" and conversation.constraint:
        raise RequestError(
            f"{conversation.constraint} constrains the answer, so no tool can be called; set tool_choice to 'none'",
            param="tool_choice",
        )
    if conversation.tools.is_forced:
        sampling["json_schema"], constraint_field = conversation.tools.schema(), "tools"
    if conversation.tools.is_strict and model.tool_format is not None and "structural_tag" not in sampling:
        sampling["structural_tag"] = strict_tag(conversation.tools, model.tool_format)
        constraint_field = "tools"
    hidden = _hidden(model, conversation) if sampling.get("skip_special_tokens", True) else None
    form = ReplyFormat(
        reasoning_format=None if conversation.is_constrained else model.reasoning_format,
        separate_reasoning=conversation.separate_reasoning,
        is_thinking=text.rstrip().endswith(reasoning.OPEN),
        tools=conversation.tools,
        tool_format=model.tool_format,
        hidden=hidden or (),
    )
    if hidden is not None:
        sampling["skip_special_tokens"] = False
    asked = model.num_new_tokens(
        len(token_ids), conversation.max_tokens, conversation.max_tokens_name, prompt=conversation.messages_name
    )
    params = make_params(sampling | {"max_new_tokens": asked})
    model.limits.check_generations(1, params.n, "n")
    model.check_answer(params, len(token_ids), asked, "logprobs")
    return Prompt(token_ids=token_ids, params=params, form=form, constraint_field=constraint_field)


def _check_tools(model: ServedModel, template: ChatTemplate, tools: Tools) -> None:
    """Raise RequestError if the template does not render tools or the model's tool call format cannot be used."""
    if tools.choice == "none":
        return
    if not template.reads("tools", tools=True):
        raise RequestError(f"the chat template of {model.name} does not support tools", param="tools")
    if tools.choice == "auto" and model.tool_format is None:
        raise RequestError(
            f"the tool call format of {model.name} is unknown; set tool_choice to 'required', or serve with a tool "
            f"format ({', '.join(TOOL_FORMATS)})",
            param="tools",
        )
    if tools.is_strict and model.tool_format is not None and not model.tool_format.grammars:
        raise RequestError(
            f"a strict tool needs calls with JSON arguments, but {model.name} writes calls in the format "
            f"{model.tool_format.name}; set strict to false, or tool_choice to 'required'",
            param="tools",
        )


def _thinking_by_effort(template: ChatTemplate, conversation: Conversation) -> dict[str, Any]:
    """Derive the variable ``enable_thinking`` from ``reasoning_effort`` as in vLLM: on unless the effort is "none"."""
    effort = conversation.variables.get(_EFFORT)
    reads = template.reads("enable_thinking", tools=bool(conversation.tools.definitions))
    return {"enable_thinking": effort != "none"} if effort is not None and reads else {}


def _thinking_disabled(template: ChatTemplate, conversation: Conversation) -> dict[str, Any]:
    """Return the template variables that disable thinking if a constraint applies from the first token."""
    reads = template.reads("enable_thinking", tools=bool(conversation.tools.definitions))
    return {"enable_thinking": False} if conversation.is_constrained and reads else {}


def _hidden(model: ServedModel, conversation: Conversation) -> tuple[str, ...] | None:
    """Return the special tokens to strip from the reply's text if its parser needs other special tokens as text.

    None if the parser needs no special tokens, so that the detokenizer can skip all of them.
    """
    tags: tuple[str, ...] = ()
    if conversation.tools.choice == "auto" and model.tool_format is not None:
        tags += model.tool_format.tags
    if model.reasoning_format == "gpt_oss" and not conversation.is_constrained:
        tags += HARMONY_TAGS
    special = model.require_tokenizer().special_tokens if tags else ()
    return tuple(token for token in special if token not in tags) if set(tags) & set(special) else None


def strict_tag(tools: Tools, tool_format: ToolFormat) -> str:
    """Return a JSON-encoded structural tag: arguments of strict tools match their schema, others are any JSON object.

    Unless parallel calls are allowed, the output ends after the first call.
    """
    grammars = tool_format.grammars
    tags = [_tag(grammar, tool) for grammar in grammars for tool in tools.definitions]
    triggers = [grammar.trigger for grammar in grammars]
    calls: dict[str, Any] = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return json.dumps({"format": calls | {"stop_after_first": not tools.is_parallel}})


def _tag(grammar: CallGrammar, tool: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = parameters_of(tool) if tool["function"].get("strict") else {"type": "object"}
    begin = grammar.begin + tool["function"]["name"] + grammar.between
    return {"begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": grammar.end}
