"""ChatTemplate: messages to a prompt by the checkpoint's own Jinja template, as transformers renders it.

Where templates lie (Hugging Face's layout): ``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja``, or
``chat_template`` of tokenizer_config.json, a text or a list of ``{"name": ..., "template": ...}``.
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

Message = dict[str, Any]
"""``role``, ``content``, and for an assistant also ``tool_calls`` and ``reasoning_content``."""

_FILE = "chat_template.jinja"
_MORE = "additional_chat_templates"
_CONFIG = "tokenizer_config.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CUT = "\ue000tapscope cuts here\ue000"  # private-use characters: neither template nor user writes this


class ChatTemplate:
    """The chat templates of one checkpoint; rendering is sandboxed, for a template is somebody else's program."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], origin: str) -> None:
        """``sources`` by name, ``default`` among them; raises CheckpointError for one that is no Jinja."""
        self._special = dict(special_tokens)
        environment = _environment()
        self._templates: dict[str, jinja2.Template] = {}
        self._variables: dict[str, frozenset[str]] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                self._variables[name] = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
            except jinja2.TemplateError as error:
                raise CheckpointError(f"the chat template {name!r} of {origin} is no readable Jinja: {error}") from None
        self.sources = dict(sources)
        """Template texts by name."""

    @classmethod
    def find(cls, folder: Path) -> "ChatTemplate | None":
        """The templates of a checkpoint, or None when it has none; raises CheckpointError for unreadable ones."""
        config = _read_config(folder / _CONFIG)
        sources = _sources(folder, config)
        if "default" not in sources:
            return None
        return cls(sources, _special_tokens(config), str(folder))

    def reads(self, name: str, *, tools: bool = False) -> bool:
        """Whether the template looks at the variable ``name``."""
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
        """The prompt, special tokens spelled out: encode it without adding any.

        ``continue_final_message`` leaves the last message open, to be gone on with. Raises RequestError when the
        template refuses these messages.
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
        except Exception as error:  # noqa: BLE001  (whatever a template does wrong belongs to this request alone)
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from None
        return _cut(text) if continue_final_message else text

    def _pick(self, tools: bool) -> str:
        return "tool_use" if tools and "tool_use" in self._templates else "default"


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives a template (`_compile_jinja_template` of utils/chat_template_utils.py)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks a trainer's targets; to a prompt it adds nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The body alone, in a scope of its own as transformers' call block gives it."""
        line = next(parser.stream).lineno
        return [jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _with_reasoning(message: Message) -> Message:
    """Templates read an assistant's thoughts under either of two names."""
    thoughts = message.get("reasoning_content")
    return message if thoughts is None else {"thinking": thoughts, **message}


def _cut(text: str) -> str:
    """What stands before the mark; a template that strips the message also loses the blanks before it."""
    head, mark, tail = text.rpartition(_CUT)
    if not mark:
        raise RequestError(
            "the last message cannot be continued: the chat template does not print it whole", param="messages"
        )
    return head if tail.startswith(" ") else head.rstrip()


def _sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name; files win over tokenizer_config.json."""
    stored = config.get("chat_template")
    if isinstance(stored, str):
        stored = [{"name": "default", "template": stored}]
    try:
        sources = {str(entry["name"]): str(entry["template"]) for entry in stored or []}
    except (TypeError, KeyError):
        rule = 'must be a text or a list of {"name": ..., "template": ...}'
        raise CheckpointError(f"{folder / _CONFIG}: chat_template {rule}") from None
    files = {path.stem: path for path in sorted((folder / _MORE).glob("*.jinja"))}
    if (folder / _FILE).exists():
        files["default"] = folder / _FILE
    try:
        return sources | {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"a chat template of {folder} cannot be read: {error}") from None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, as text: a config writes each as text or as ``{"content": text}``."""
    found = {name: config.get(name) for name in _SPECIAL}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: value for name, value in texts.items() if isinstance(value, str)}


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no readable JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return config
