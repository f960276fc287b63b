"""ServedModel: what the HTTP process knows of the model behind it. Read from the checkpoint, without torch."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tapscope.core.convert import InvalidValueError, convert
from tapscope.core.errors import CheckpointError, ConfigError, RequestError
from tapscope.engine.api import reasoning, tool_parsers
from tapscope.engine.api.limits import Limits
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.text.chat_template import ChatTemplate
from tapscope.engine.text.tokenizer import Tokenizer

ToolFormat = Literal["auto", "hermes", "llama3", "none"]
ReasoningFormat = Literal["auto", "think", "none"]
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model under the name that clients call it by."""

    name: str
    max_positions: int
    """Prompt and generated tokens that one request may have at most."""
    hidden_size: int = 0
    """Elements of one hidden state; 0 where config.json does not say."""
    vocab_size: int = 0
    """Likewise of one row of logits."""
    limits: Limits = field(default_factory=Limits)
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Defaults of generation_config.json; where it has none a field has OpenAI's default."""
    tool_format: str | None = None
    """``hermes``, ``llama3``, or None: how the model writes tool calls is not known."""
    thinks: bool = False
    """Whether answers may begin with `<think>` reasoning."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""

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
        """From a checkpoint; ``auto`` looks at the chat template. Raises ConfigError, CheckpointError."""
        try:
            convert(tool_format, ToolFormat, "tool_format")
            convert(reasoning_format, ReasoningFormat, "reasoning_format")
        except InvalidValueError as error:
            raise ConfigError(str(error)) from None
        template = ChatTemplate.find(folder)
        source = "" if template is None else "".join(template.sources.values())
        return cls(
            name=name,
            max_positions=max_positions,
            **_sizes(folder / "config.json"),
            limits=limits or Limits(),
            tokenizer=Tokenizer.find(folder),
            template=template,
            sampling=_generation_defaults(folder / "generation_config.json"),
            tool_format=_tool_format(source) if tool_format == "auto" else tool_format.replace("none", "") or None,
            thinks=reasoning_format == "think" or (reasoning_format == "auto" and reasoning.CLOSE in source),
        )

    def check_name(self, name: str | None) -> None:
        """Raise RequestError (``model_not_found``) for the name of another model; no name is this one's."""
        if name is not None and name != self.name:
            raise RequestError(
                f"the model {name!r} does not exist here; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises RequestError when the checkpoint has none."""
        if self.tokenizer is None:
            raise RequestError(f"{self.name} has no tokenizer.json, so that texts cannot be read; send token ids")
        return self.tokenizer

    def require_template(self) -> ChatTemplate:
        """The chat template; raises RequestError when the checkpoint has none."""
        if self.template is None:
            raise RequestError(
                f"{self.name} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
                "use /v1/completions with the whole prompt",
                param="messages",
                code="no_chat_template",
            )
        return self.template

    def check_text(self, text: str, param: str) -> None:
        """Raise RequestError for a text so long that the model's positions cannot hold it, however it is tokenized."""
        longest = self.max_positions * self.require_tokenizer().longest_token
        if len(text) > longest:
            raise RequestError(
                f"{param} has {len(text)} characters; {self.name} takes {self.max_positions} tokens, which are at "
                f"most {longest} characters; shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )

    def check_answer(self, params: SamplingParams, num_prompt: int, num_new: int, param: str) -> None:
        """Raise RequestError where ``params`` ask for more numbers than one answer may hold.

        ``num_prompt``: tokens of all prompts; ``num_new``: tokens that are generated for them at most.
        """
        self.limits.check_answer(self.num_values(params, num_prompt, num_new), param)

    def num_values(self, params: SamplingParams, num_prompt: int, num_new: int) -> int:
        """Log-probabilities and elements of hidden states that an answer would hold at most."""
        each = 1 + len(params.token_ids_logprob)
        values = 0
        if params.wants_logprobs:
            values += num_new * (each + (params.logprobs or 0) + params.full_logprobs * self.vocab_size)
        if params.prompt_logprobs is not None:
            values += num_prompt * (each + params.prompt_logprobs)
        if params.hidden_states:
            values += (num_prompt + num_new) * self.hidden_size
        return values * params.n

    def num_new_tokens(self, num_prompt: int, asked: int | None, param: str = "max_tokens") -> int:
        """Tokens to generate at most: as asked, else all that is left. Raises RequestError with the numbers."""
        left = self.max_positions - num_prompt
        if left < (1 if asked is None else asked):
            new = "" if asked is None else f" and asks for {asked} new ones"
            raise RequestError(
                f"the prompt has {num_prompt} tokens{new}, but {self.name} takes {self.max_positions} in all; "
                f"shorten the prompt or lower {param}",
                param=param if left >= 1 else "messages",
                code="context_length_exceeded",
            )
        return left if asked is None else asked


def _tool_format(source: str) -> str | None:
    """By the words that a template puts around the calls of earlier turns."""
    if tool_parsers.CALL_OPEN in source:
        return "hermes"
    return "llama3" if tool_parsers.PYTHON_TAG in source or "<|start_header_id|>" in source else None


def _sizes(path: Path) -> dict[str, int]:
    """``hidden_size`` and ``vocab_size`` of config.json, or of its ``text_config``."""
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        values = values.get("text_config", {}) | values
        found = {name: values.get(name) for name in ("hidden_size", "vocab_size")}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return {}  # the engine reads it, too, and reports what is wrong
    return {name: value for name, value in found.items() if type(value) is int}


def _generation_defaults(path: Path) -> dict[str, float]:
    """Sampling fields that the checkpoint's makers recommend; ``do_sample: false`` is greedy."""
    if not path.exists():
        return {}
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no readable JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    if values.get("do_sample") is False:
        return {"temperature": 0.0}
    numbers = {name: values.get(name) for name in _SAMPLING}
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}
