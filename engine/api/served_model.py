"""ServedModel: tokenizer, chat template and limits of the served model, read from the checkpoint without torch."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tapscope.core.convert import InvalidValueError, convert
from tapscope.core.errors import ConfigError, RequestError
from tapscope.engine.api import reasoning
from tapscope.engine.api.harmony_parser import CHANNEL
from tapscope.engine.api.limits import Limits
from tapscope.engine.api.tool_formats import TOOL_FORMATS, ToolFormat, tool_format_of
from tapscope.engine.params.json_file import read_object
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.text.chat_template import ChatTemplate
from tapscope.engine.text.tokenizer import Tokenizer

ToolFormatName = Literal[
    "auto", "deepseek", "glm45", "gpt_oss", "hermes", "kimi_k2", "llama3", "mistral", "qwen3_coder", "none"
]
ReasoningFormat = Literal["auto", "think", "gpt_oss", "none"]
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The served model, as the HTTP API needs it: names, tokenizer, chat template, formats and limits."""

    name: str
    max_positions: int
    """Maximum number of prompt and generated tokens of a request."""
    hidden_size: int = 0
    """Hidden size; 0 if config.json does not define it."""
    vocab_size: int = 0
    """Vocabulary size; 0 if config.json does not define it."""
    limits: Limits = field(default_factory=Limits)
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling defaults from generation_config.json; other fields have OpenAI's defaults."""
    tool_format: ToolFormat | None = None
    """Format of the model's tool calls; None: unknown."""
    reasoning_format: str | None = None
    """``think`` if outputs may start with `<think>` reasoning; ``gpt_oss`` if they use channels; None: no reasoning."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Loaded LoRA adapters (name -> directory); updated as adapters are loaded and unloaded."""
    adapter: str = ""
    """Adapter selected by a request; :attr:`name` is then the model name that the request gave."""
    parent: str = ""
    """Name of the base model if an adapter is selected."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time in seconds."""

    @classmethod
    def read(
        cls,
        folder: Path,
        *,
        name: str,
        max_positions: int,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
        limits: Limits | None = None,
    ) -> "ServedModel":
        """Read a checkpoint directory; formats ``auto`` are detected from its chat template.

        Raises ConfigError, CheckpointError.
        """
        try:
            convert(tool_format, ToolFormatName, "tool_format")
            convert(reasoning_format, ReasoningFormat, "reasoning_format")
        except InvalidValueError as error:
            raise ConfigError(str(error)) from None
        template, sizes = ChatTemplate.find(folder), _sizes(folder / "config.json")
        source = "" if template is None else "".join(template.sources.values())
        return cls(
            name=name,
            max_positions=max_positions,
            hidden_size=sizes.get("hidden_size", 0),
            vocab_size=sizes.get("vocab_size", 0),
            limits=limits or Limits(),
            tokenizer=Tokenizer.find(folder),
            template=template,
            sampling=_generation_defaults(folder / "generation_config.json"),
            tool_format=tool_format_of(source) if tool_format == "auto" else TOOL_FORMATS.get(tool_format),
            reasoning_format={"auto": _reasoning_format(source), "none": None}.get(reasoning_format, reasoning_format),
        )

    def selected(self, name: Any, lora_path: Any = None) -> "ServedModel":
        """Return the base model or adapter that a request selects with ``model`` or SGLang's ``lora_path``.

        The body's ``model`` (here ``name``) is MODEL, MODEL:ADAPTER (as in SGLang) or ADAPTER (as in vLLM). Raises
        RequestError for an adapter that is not loaded; an unknown model name is left to :meth:`check_name`.
        """
        if not isinstance(name, str | None) or not isinstance(lora_path, str | None):
            return self  # validation of the body reports the invalid type
        base, adapter = name, lora_path or ""
        if name is not None and name != self.name:
            adapter_name = name.removeprefix(f"{self.name}:")
            if adapter_name not in self.adapters:
                return self
            if adapter and adapter != adapter_name:
                raise RequestError(f"model={name!r} and lora_path={adapter!r} name two adapters", param="lora_path")
            adapter = adapter_name
        if not adapter:
            return self
        if adapter not in self.adapters:
            loaded = ", ".join(self.adapters) or "none"
            text = f"the adapter {adapter!r} is not loaded; loaded: {loaded}"
            raise RequestError(text, param="lora_path", code="model_not_found")
        return replace(self, name=base or self.name, adapter=adapter, parent=self.name)

    @property
    def names(self) -> list[str]:
        """Name of the base model, then MODEL:ADAPTER for each loaded adapter."""
        return [self.name, *(f"{self.name}:{adapter}" for adapter in self.adapters)]

    def check_name(self, name: str | None) -> None:
        """Raise RequestError (``model_not_found``) unless ``name`` is this model's name or None."""
        if name is not None and name != self.name:
            raise RequestError(
                f"the model {name!r} does not exist here; this server has {', '.join(map(repr, self.names))}",
                param="model",
                code="model_not_found",
            )

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raises RequestError if the checkpoint has none."""
        if self.tokenizer is None:
            raise RequestError(f"{self.name} has no tokenizer.json, so it accepts token ids only")
        return self.tokenizer

    def require_template(self) -> ChatTemplate:
        """Return the chat template; raises RequestError if the checkpoint has none."""
        if self.template is None:
            raise RequestError(
                f"{self.name} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
                "use /v1/completions with the whole prompt",
                param="messages",
                code="no_chat_template",
            )
        return self.template

    def check_text(self, text: str, param: str) -> None:
        """Raise RequestError if ``text`` cannot fit into the model's positions under any tokenization."""
        longest = self.max_positions * self.require_tokenizer().longest_token
        if len(text) > longest:
            raise RequestError(
                f"{param} has {len(text)} characters; {self.name} has {self.max_positions} positions, which hold at "
                f"most {longest} characters; shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )

    def check_answer(self, params: SamplingParams, num_prompt: int, num_new: int, param: str) -> None:
        """Raise RequestError if the values that ``params`` request exceed the limit of one response.

        ``num_prompt``: tokens of all prompts; ``num_new``: maximum number of tokens generated for them.
        """
        self.limits.check_answer(self.num_values(params, num_prompt, num_new), param)

    def num_values(self, params: SamplingParams, num_prompt: int, num_new: int) -> int:
        """Return the maximum number of log-probabilities and hidden state elements in a response."""
        each = 1 + len(params.token_ids_logprob)
        values = 0
        if params.wants_logprobs:
            values += num_new * (each + (params.logprobs or 0) + params.full_logprobs * self.vocab_size)
        if params.prompt_logprobs is not None:
            values += num_prompt * (each + params.prompt_logprobs)
        if params.hidden_states:
            values += (num_prompt + num_new) * self.hidden_size
        return values * params.n

    def num_new_tokens(self, num_prompt: int, asked: int | None, param: str = "max_tokens", *, prompt: str) -> int:
        """Return the maximum number of new tokens: ``asked``, or all remaining positions if ``asked`` is None.

        Raises RequestError with the token counts if they do not fit; ``param`` and ``prompt`` name the body fields of
        the limit and the prompt.
        """
        left = self.max_positions - num_prompt
        if left < (1 if asked is None else asked):
            new = "" if asked is None else f" and requests {asked} new ones"
            raise RequestError(
                f"the prompt has {num_prompt} tokens{new}, but {self.name} supports {self.max_positions} in total; "
                f"shorten the prompt or lower {param}",
                param=param if left >= 1 else prompt,
                code="context_length_exceeded",
            )
        return left if asked is None else asked


def _reasoning_format(source: str) -> str | None:
    """Detect the reasoning format from the way the chat template renders the reasoning of earlier turns."""
    if CHANNEL in source:
        return "gpt_oss"
    return "think" if reasoning.CLOSE in source else None


def _sizes(path: Path) -> dict[str, int]:
    """Return ``hidden_size`` and ``vocab_size`` of config.json, or of its ``text_config``, if defined."""
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        values = values.get("text_config", {}) | values
        sizes = {name: values.get(name) for name in ("hidden_size", "vocab_size")}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return {}  # the engine reads config.json too, and reports the error
    return {name: value for name, value in sizes.items() if type(value) is int}


def _generation_defaults(path: Path) -> dict[str, float]:
    """Read the sampling defaults of generation_config.json; ``do_sample: false`` is greedy. Raises CheckpointError."""
    if not path.exists():
        return {}
    values = read_object(path)
    if values.get("do_sample") is False:
        return {"temperature": 0.0}
    numbers = {name: values.get(name) for name in _SAMPLING}
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}


def model_card(model: ServedModel, *, for_anthropic: bool = False) -> dict[str, Any]:
    """Return the response to GET /v1/models/NAME."""
    if for_anthropic:
        created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        card = {"type": "model", "id": model.name, "display_name": model.name, "created_at": created}
        most = model.max_positions - 1  # the prompt and the output each have at least one token
        return card | {"lifecycle": "active", "max_input_tokens": most, "max_tokens": most}
    named = {"id": model.name, "object": "model", "created": model.created, "owned_by": "tapscope"}
    if model.adapter:
        named |= {"root": model.adapters[model.adapter], "parent": model.parent}
    return named | {"max_model_len": model.max_positions}


def model_list(model: ServedModel, *, for_anthropic: bool = False) -> dict[str, Any]:
    """Return the response to GET /v1/models."""
    cards = [model_card(model.selected(name), for_anthropic=for_anthropic) for name in model.names]
    if for_anthropic:
        return {"data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return {"object": "list", "data": cards}
