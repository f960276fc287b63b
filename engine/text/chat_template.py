"""ChatTemplate: render messages to a prompt with the checkpoint's Jinja template, as transformers does.

Location of templates (Hugging Face's layout): ``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja``, or
``chat_template`` in tokenizer_config.json, a string or a list of ``{"name": ..., "template": ...}``.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tapscope.core.errors import CheckpointError, RequestError
from tapscope.engine.params.json_file import read_object

Message = dict[str, Any]
"""A chat message: ``role``, ``content``; an assistant message may have ``tool_calls`` and ``reasoning_content``."""

_FILE = "chat_template.jinja"
_MORE = "additional_chat_templates"
_CONFIG = "tokenizer_config.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CUT = "\ue000tapscope cuts here\ue000"  # private-use characters, which neither templates nor users write


class ChatTemplate:
    """The chat templates of one checkpoint; rendering is sandboxed because templates are untrusted code."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], origin: str) -> None:
        """Compile ``sources`` (template name -> Jinja source, including ``default``).

        ``special_tokens`` are variables for all templates; ``origin`` names the checkpoint in errors. Raises
        CheckpointError for invalid Jinja.
        """
        self._special = dict(special_tokens)
        environment = _environment()
        self._templates: dict[str, jinja2.Template] = {}
        self._variables: dict[str, frozenset[str]] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                self._variables[name] = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
            except jinja2.TemplateError as error:
                raise CheckpointError(f"the chat template {name!r} of {origin} is not valid Jinja: {error}") from None
        self.sources = dict(sources)
        """Template sources by name."""

    @classmethod
    def find(cls, folder: Path) -> "ChatTemplate | None":
        """Read the templates of a checkpoint; None without a default template. Raises CheckpointError if unreadable."""
        config = _read_config(folder / _CONFIG)
        sources = _sources(folder, config)
        if "default" not in sources:
            return None
        return cls(sources, _special_tokens(config), str(folder))

    def reads(self, name: str, *, tools: bool = False) -> bool:
        """Return whether the template uses the variable ``name``; ``tools`` selects the template for tool use."""
        return name in self._variables[self._pick(tools)]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render the prompt, including special tokens as text; encode the result without adding special tokens.

        ``continue_final_message`` leaves the last message open for continuation. Raises RequestError if the template
        rejects the messages.
        """
        chat = [_with_reasoning(message) for message in messages]
        if continue_final_message:
            chat[-1] = chat[-1] | {"content": str(chat[-1].get("content") or "") + _CUT + " "}
        try:
            text = self._templates[self._pick(bool(tools))].render(
                messages=chat,
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **(self._special | variables),
            )
        except Exception as error:  # noqa: BLE001  (a template may raise any exception; report it as a request error)
            raise RequestError(f"the chat template rejects these messages: {error}", param="messages") from None
        return _cut(text) if continue_final_message else text

    def _pick(self, tools: bool) -> str:
        return "tool_use" if tools and "tool_use" in self._templates else "default"


def _environment() -> ImmutableSandboxedEnvironment:
    """Create the same environment as transformers (`_compile_jinja_template` in utils/chat_template_utils.py)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """The tag ``{% generation %}...{% endgeneration %}``, which marks training targets; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Parse the body into its own scope, as in transformers' call block."""
        line = next(parser.stream).lineno
        return [jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode plain JSON; Jinja's built-in filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _with_reasoning(message: Message) -> Message:
    """Return ``message`` with its reasoning under both keys that templates use: ``reasoning_content``, ``thinking``."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


def _cut(text: str) -> str:
    """Return the text before the cut mark, without trailing whitespace if the template strips messages.

    Raises RequestError if the template does not render the last message unchanged.
    """
    head, mark, tail = text.rpartition(_CUT)
    if not mark:
        raise RequestError(
            "the last message cannot be continued: the chat template does not render it unchanged", param="messages"
        )
    return head if tail.startswith(" ") else head.rstrip()


def _sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Read the template sources by name; files take precedence over tokenizer_config.json. Raises CheckpointError."""
    stored = config.get("chat_template")
    if isinstance(stored, str):
        stored = [{"name": "default", "template": stored}]
    try:
        sources = {str(entry["name"]): str(entry["template"]) for entry in stored or []}
    except (TypeError, KeyError):
        rule = 'must be a string or a list of {"name": ..., "template": ...}'
        raise CheckpointError(f"{folder / _CONFIG}: chat_template {rule}") from None
    files = {path.stem: path for path in sorted((folder / _MORE).glob("*.jinja"))}
    if (folder / _FILE).exists():
        files["default"] = folder / _FILE
    try:
        return sources | {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"a chat template of {folder} cannot be read: {error}") from None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return special tokens by name, such as ``bos_token``; config values are strings or ``{"content": string}``."""
    values = {name: config.get(name) for name in _SPECIAL}
    tokens = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: value for name, value in tokens.items() if isinstance(value, str)}


def _read_config(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}
