"""ToolFormat: tool call formats of model families, by name, and their detection from a chat template."""

from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex
from typing import NamedTuple

from tapscope.engine.api import harmony_parser, xml_call_parser
from tapscope.engine.api.harmony_parser import HarmonyParser
from tapscope.engine.api.tagged_call_parser import DEEPSEEK, KIMI_K2, MISTRAL, TaggedCallParser
from tapscope.engine.api.tool_parsers import CALL_CLOSE, CALL_OPEN, PYTHON_TAG, HermesParser, LlamaParser, ToolParser
from tapscope.engine.api.tools import Tools
from tapscope.engine.api.xml_call_parser import XmlCallParser


class CallGrammar(NamedTuple):
    """Text layout of a constrained call: ``begin``, tool name, ``between``, JSON arguments, ``end``."""

    trigger: str
    """Text after which the output must be a call."""
    begin: str
    between: str
    end: str


def _any_id(name: str, index: int) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A tool call format: detection, parser and grammar."""

    name: str
    evidence: tuple[str, ...]
    """Strings that identify the format in a chat template; one of them suffices."""
    tags: tuple[str, ...]
    """Strings that the parser needs; the detokenizer must not skip them where they are special tokens."""
    make_parser: Callable[[Tools], ToolParser]
    grammars: tuple[CallGrammar, ...] = ()
    """Alternative layouts of a call; empty if arguments are not JSON and hence no schema can constrain them."""
    call_id: Callable[[str, int], str] = _any_id
    """Function from a call's name and index to the call id that the chat template requires; empty: any id."""


_HARMONY_CALL = f"{harmony_parser.CHANNEL}commentary to=functions."
_GPT_OSS = ToolFormat(
    name="gpt_oss",
    evidence=(harmony_parser.CHANNEL,),
    tags=harmony_parser.TAGS,
    make_parser=lambda tools: HarmonyParser(),
    grammars=(CallGrammar(_HARMONY_CALL, _HARMONY_CALL, f" <|constrain|>json{harmony_parser.MESSAGE}", "<|call|>"),),
)
_QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    evidence=(xml_call_parser.QWEN3_CODER.argument_open,),
    tags=(CALL_OPEN, CALL_CLOSE),
    make_parser=lambda tools: XmlCallParser(xml_call_parser.QWEN3_CODER, tools),
)
_GLM45 = ToolFormat(
    name="glm45",
    evidence=(xml_call_parser.GLM45.argument_open,),
    tags=(CALL_OPEN, CALL_CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    make_parser=lambda tools: XmlCallParser(xml_call_parser.GLM45, tools),
)
_HERMES = ToolFormat(
    name="hermes",
    evidence=(CALL_OPEN,),
    tags=(CALL_OPEN, CALL_CLOSE),
    make_parser=lambda tools: HermesParser(),
    grammars=(CallGrammar(CALL_OPEN, f'{CALL_OPEN}\n{{"name": "', '", "arguments": ', f"}}\n{CALL_CLOSE}"),),
)
_KIMI_K2 = ToolFormat(
    name="kimi_k2",
    evidence=(KIMI_K2.begin,),
    tags=KIMI_K2.all,
    make_parser=lambda tools: TaggedCallParser(KIMI_K2),
    grammars=(CallGrammar(KIMI_K2.begin, f"{KIMI_K2.begin}functions.", f":0{KIMI_K2.separator}", KIMI_K2.ends[0]),),
    call_id=lambda name, index: f"functions.{name}:{index}",
)
_DEEPSEEK = ToolFormat(
    name="deepseek",
    evidence=(DEEPSEEK.begin,),
    tags=DEEPSEEK.all,
    make_parser=lambda tools: TaggedCallParser(DEEPSEEK),
    grammars=(CallGrammar(DEEPSEEK.begin, DEEPSEEK.begin, DEEPSEEK.separator, DEEPSEEK.ends[0]),),
)
_MISTRAL = ToolFormat(
    name="mistral",
    evidence=(MISTRAL.begin,),
    tags=(*MISTRAL.all, "[CALL_ID]"),
    make_parser=lambda tools: TaggedCallParser(MISTRAL),
    grammars=(CallGrammar(MISTRAL.begin, MISTRAL.begin, MISTRAL.separator, ""),),
    call_id=lambda name, index: token_hex(5)[:9],
)
_LLAMA3 = ToolFormat(
    name="llama3",
    evidence=(PYTHON_TAG, "<|start_header_id|>"),
    tags=(PYTHON_TAG,),
    make_parser=lambda tools: LlamaParser(tools.names),
    grammars=(
        CallGrammar('{"name"', '{"name": "', '", "parameters": ', "}"),
        CallGrammar(PYTHON_TAG, f'{PYTHON_TAG}{{"name": "', '", "parameters": ', "}"),
    ),
)
TOOL_FORMATS = {
    form.name: form for form in (_GPT_OSS, _QWEN3_CODER, _GLM45, _HERMES, _KIMI_K2, _DEEPSEEK, _MISTRAL, _LLAMA3)
}
"""Tool call formats by name, in order of detection: the first one with evidence in the chat template wins."""


def tool_format_of(template: str) -> ToolFormat | None:
    """Detect the tool call format from the way a chat template renders earlier calls; None if not recognized."""
    matching = (form for form in TOOL_FORMATS.values() if any(text in template for text in form.evidence))
    return next(matching, None)
