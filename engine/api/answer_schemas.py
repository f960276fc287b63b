"""Schemas of the engine's answers, for the OpenAPI description.

Answers are built as plain dictionaries; these classes describe their main fields. A field that may be ``UNSET`` is
absent unless it applies.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class GenerateMeta(msgspec.Struct, kw_only=True):
    """Facts about one generation, in SGLang's format."""

    id: str
    """The ``rid`` of the request, or a new id."""
    prompt_tokens: int
    """Tokens of the prompt."""
    completion_tokens: int
    """Tokens generated so far."""
    cached_tokens: int
    """Tokens of the prompt that came from the prefix cache."""
    finish_reason: dict[str, Any] | None
    """``type`` is ``stop`` (with ``matched``), ``length`` or ``abort``. None: not finished."""
    e2e_latency: float
    """Seconds from the request to this answer."""
    weight_version: str
    """Name of the weights in use."""
    dp_rank: int
    """DP replica that served the request."""
    output_token_logprobs: list[Any] | UnsetType = UNSET
    """[logprob, token id, string or null] of each generated token."""
    input_token_logprobs: list[Any] | UnsetType = UNSET
    """The same of the prompt from ``logprob_start_len`` on; the first token's logprob is null."""
    output_top_logprobs: list[Any] | UnsetType = UNSET
    """Such entries of the most likely tokens, at each generated token."""
    input_top_logprobs: list[Any] | UnsetType = UNSET
    """The same of the prompt."""
    output_token_ids_logprobs: list[Any] | UnsetType = UNSET
    """Such entries of ``token_ids_logprob``, at each generated token."""
    input_token_ids_logprobs: list[Any] | UnsetType = UNSET
    """The same of the prompt."""
    output_full_logprobs: list[Any] | UnsetType = UNSET
    """Logprobs of the whole vocabulary at each generated token (ours)."""
    hidden_states: list[Any] | UnsetType = UNSET
    """The prompt's [tokens, hidden], then [hidden] of each generated token that was computed."""
    routed_experts: str | UnsetType = UNSET
    """Experts of every position but the last, base64 of int32."""
    routed_experts_shape: list[int] | UnsetType = UNSET
    """[positions, layers, k] (ours)."""


class GenerateAnswer(msgspec.Struct, kw_only=True):
    """One generation; of a batch, or with ``n`` above 1, a list of them."""

    text: str | None
    """The generated text; None without a tokenizer."""
    output_ids: list[int]
    """The generated token ids."""
    meta_info: GenerateMeta
    """Facts about the generation."""


class CachedTokens(msgspec.Struct, kw_only=True):
    """Part of the prompt's tokens."""

    cached_tokens: int
    """Tokens of the prompt that came from the prefix cache."""


class OpenAIUsage(msgspec.Struct, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    """Tokens of the prompt, once for all ``n`` choices."""
    completion_tokens: int
    """Generated tokens of all choices, reasoning included."""
    total_tokens: int
    """The sum."""
    prompt_tokens_details: CachedTokens
    """Part of the prompt's tokens."""


class TokenEntry(msgspec.Struct, kw_only=True):
    """A generated token and the most likely ones."""

    token: str
    """The token as a string."""
    logprob: float
    """Its log-probability before temperature and filters; -9999: impossible."""
    bytes: list[int]
    """Its UTF-8 bytes."""
    top_logprobs: list[dict[str, Any]]
    """The same of the most likely tokens."""


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs of a choice."""

    content: list[TokenEntry]
    """One entry for each generated token."""


class ChatReply(msgspec.Struct, kw_only=True):
    """The assistant's message."""

    content: str | None
    """Text of the message. None: only tool calls."""
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    """Calls with ``id``, ``function.name`` and ``function.arguments``, which is JSON text."""
    reasoning_content: str | UnsetType = UNSET
    """Reasoning before the content (vLLM, SGLang)."""


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of ``n`` messages."""

    index: int
    """Number of the choice."""
    message: ChatReply
    """The assistant's message."""
    logprobs: ChatLogprobs | None
    """None: not requested."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    """Why the generation ended."""
    stop_reason: str | int | UnsetType = UNSET
    """Stop string, or token of ``stop_token_ids``, that ended it (vLLM)."""
    token_ids: list[int] | UnsetType = UNSET
    """Generated tokens, with ``return_token_ids`` (vLLM)."""


class ChatAnswer(msgspec.Struct, kw_only=True):
    """A chat completion."""

    id: str
    """Id of the answer."""
    created: int
    """Unix time in seconds."""
    model: str
    """Name of the served model."""
    choices: list[ChatChoice]
    """``n`` messages."""
    usage: OpenAIUsage
    """Token counts."""
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    """For each prompt token a map of token id to ``logprob``, ``rank``, ``decoded_token`` (vLLM)."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Tokens of the prompt, with ``return_token_ids`` (vLLM)."""


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs of a choice: lists with one entry for each token."""

    tokens: list[str]
    """The tokens as strings."""
    token_logprobs: list[float | None]
    """Their log-probabilities; null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None] | None
    """String -> logprob of the token and the most likely ones. None: none requested."""
    text_offset: list[int]
    """Position of each token in the text, in characters."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One of ``n`` completions of a prompt; choices are numbered prompt by prompt."""

    index: int
    """Number of the choice."""
    text: str
    """Generated text, after the prompt with ``echo``."""
    logprobs: CompletionLogprobs | None
    """None: not requested."""
    finish_reason: Literal["stop", "length"]
    """Why the generation ended."""
    stop_reason: str | int | UnsetType = UNSET
    """Stop string, or token of ``stop_token_ids``, that ended it (vLLM)."""
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    """For each prompt token a map of token id to ``logprob``, ``rank``, ``decoded_token`` (vLLM)."""
    token_ids: list[int] | UnsetType = UNSET
    """Generated tokens, with ``return_token_ids`` (vLLM)."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Tokens of the prompt, with ``return_token_ids`` (vLLM)."""


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """Completions of all prompts."""

    id: str
    """Id of the answer."""
    created: int
    """Unix time in seconds."""
    model: str
    """Name of the served model."""
    choices: list[CompletionChoice]
    """``n`` completions of each prompt, prompt by prompt."""
    usage: OpenAIUsage
    """Token counts."""


class Embedding(msgspec.Struct, kw_only=True):
    """The embedding of one input."""

    index: int
    """Number of the input."""
    embedding: list[float] | str
    """Unit vector, as numbers or in base64."""


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    """Tokens of all inputs."""
    total_tokens: int
    """The same."""


class EmbeddingAnswer(msgspec.Struct, kw_only=True):
    """Embeddings of all inputs."""

    data: list[Embedding]
    """One embedding for each input."""
    model: str
    """Name of the served model."""
    pooling: Literal["last", "mean"]
    """The pooling that was used (ours)."""
    usage: EmbeddingUsage
    """Token counts."""


class ResponsesUsage(msgspec.Struct, kw_only=True):
    """Token counts."""

    input_tokens: int
    """Tokens of the prompt."""
    output_tokens: int
    """Generated tokens, reasoning included."""
    total_tokens: int
    """The sum."""


class ResponsesAnswer(msgspec.Struct, kw_only=True):
    """A response, with the settings that applied."""

    id: str
    """Id of the response, which is not stored."""
    created_at: int
    """Unix time in seconds."""
    status: Literal["completed", "incomplete"]
    """``incomplete``: ended by ``max_output_tokens``."""
    incomplete_details: dict[str, Any] | None
    """``reason`` of an incomplete response."""
    model: str
    """Name of the served model."""
    output: list[dict[str, Any]]
    """Items of ``type`` ``reasoning``, ``message`` or ``function_call``, in order."""
    usage: ResponsesUsage
    """Token counts."""


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Token counts."""

    input_tokens: int
    """Tokens of the prompt that were computed."""
    cache_read_input_tokens: int
    """Tokens of the prompt that came from the prefix cache."""
    output_tokens: int
    """Generated tokens, reasoning included."""


class MessagesAnswer(msgspec.Struct, kw_only=True):
    """The assistant's message."""

    id: str
    """Id of the message."""
    model: str
    """Name of the served model."""
    content: list[dict[str, Any]]
    """Blocks of ``type`` ``thinking``, ``text`` or ``tool_use``."""
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    """Why the generation ended."""
    stop_sequence: str | None
    """The stop sequence that ended it, if any."""
    usage: MessagesUsage
    """Token counts."""


class CountAnswer(msgspec.Struct, kw_only=True):
    """The length of a prompt."""

    input_tokens: int
    """Tokens of the prompt."""


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """Tokens of a prompt."""

    count: int
    """Number of tokens."""
    max_model_len: int
    """Maximum length of prompt and generated tokens."""
    tokens: list[int]
    """Token ids."""
    token_strs: list[str] | None
    """The tokens as strings, with ``return_token_strs``."""


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """Text of token ids."""

    prompt: str
    """The text, special tokens included."""


class WeightsAnswer(msgspec.Struct, kw_only=True):
    """The weights that are in use now."""

    weight_version: str
    """Name of the weights in use."""
    num_live: int
    """Live requests, which continue with the new weights."""


class PauseAnswer(msgspec.Struct, kw_only=True):
    """The state of all replicas after a pause, or its end."""

    num_live: int
    """Live requests of all replicas (ours)."""


class MemoryAnswer(msgspec.Struct, kw_only=True):
    """What is released now."""

    released: list[str]
    """Tags whose memory is released now (ours)."""


class DigestAnswer(msgspec.Struct, kw_only=True):
    """Digests of all weights."""

    weight_version: str
    """Name of the weights in use."""
    weights: dict[str, dict[str, Any]]
    """Name -> ``dtype``, ``shape`` and ``digest`` of the whole weight, summed over the ranks."""


class AdaptersAnswer(msgspec.Struct, kw_only=True):
    """The adapters that are loaded now."""

    loaded_adapters: dict[str, str]
    """Name -> directory of each loaded adapter."""
    num_live: int | UnsetType = UNSET
    """After unloading: live requests that still use the adapter (ours)."""
