"""Response schemas for the OpenAPI description.

Responses are built as plain dictionaries; these classes only describe the main fields. A field whose default is
``UNSET`` is optional in the response.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class GenerateMeta(msgspec.Struct, kw_only=True):
    """Metadata of one generation, in SGLang's format."""

    id: str
    """The request's ``rid``, or a generated id."""
    prompt_tokens: int
    """Tokens of the prompt."""
    completion_tokens: int
    """Tokens generated so far."""
    cached_tokens: int
    """Prompt tokens served from the prefix cache."""
    finish_reason: dict[str, Any] | None
    """``type`` is ``stop`` (with ``matched``), ``length`` or ``abort``. None: not finished yet."""
    e2e_latency: float
    """Seconds from the arrival of the request to this response."""
    weight_version: str
    """Name of the weights in use."""
    dp_rank: int
    """DP replica that served the request."""
    output_token_logprobs: list[Any] | UnsetType = UNSET
    """[logprob, token id, string or null] for each generated token."""
    input_token_logprobs: list[Any] | UnsetType = UNSET
    """The same triples for prompt tokens from ``logprob_start_len`` on; the first token's logprob is null."""
    output_top_logprobs: list[Any] | UnsetType = UNSET
    """For each generated token, the triples of the most likely tokens."""
    input_top_logprobs: list[Any] | UnsetType = UNSET
    """For each prompt token, the triples of the most likely tokens."""
    output_token_ids_logprobs: list[Any] | UnsetType = UNSET
    """For each generated token, the triples of the tokens in ``token_ids_logprob``."""
    input_token_ids_logprobs: list[Any] | UnsetType = UNSET
    """For each prompt token, the triples of the tokens in ``token_ids_logprob``."""
    output_full_logprobs: list[Any] | UnsetType = UNSET
    """For each generated token, the logprobs of the whole vocabulary (ours)."""
    hidden_states: list[Any] | UnsetType = UNSET
    """[tokens, hidden] of the prompt, then one [hidden] for each generated token that was fed back to the model."""
    routed_experts: str | UnsetType = UNSET
    """Expert ids of every position but the last: int32 in base64."""
    routed_experts_shape: list[int] | UnsetType = UNSET
    """Shape of ``routed_experts``: [positions, layers, k] (ours)."""


class GenerateAnswer(msgspec.Struct, kw_only=True):
    """One generation; the response to a batch, or with ``n`` above 1, is a list of generations."""

    text: str | None
    """The generated text; None without a tokenizer."""
    output_ids: list[int]
    """The generated token ids."""
    meta_info: GenerateMeta
    """Metadata of the generation."""


class CachedTokens(msgspec.Struct, kw_only=True):
    """Breakdown of the prompt tokens."""

    cached_tokens: int
    """Prompt tokens served from the prefix cache."""


class OpenAIUsage(msgspec.Struct, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    """Prompt tokens, counted once for all ``n`` choices."""
    completion_tokens: int
    """Generated tokens of all choices, reasoning included."""
    total_tokens: int
    """Sum of prompt and completion tokens."""
    prompt_tokens_details: CachedTokens
    """Breakdown of the prompt tokens."""


class TokenEntry(msgspec.Struct, kw_only=True):
    """A generated token and the most likely alternatives."""

    token: str
    """The token as a string."""
    logprob: float
    """Log-probability of the token before temperature and filters; -9999 if it is masked."""
    bytes: list[int]
    """UTF-8 bytes of the token."""
    top_logprobs: list[dict[str, Any]]
    """The most likely tokens, with the same fields except ``top_logprobs``."""


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs of a choice."""

    content: list[TokenEntry]
    """One entry for each generated token."""


class ChatReply(msgspec.Struct, kw_only=True):
    """The assistant's message."""

    content: str | None
    """Text of the message. None: the message has only tool calls."""
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    """Calls with ``id``, ``function.name`` and ``function.arguments`` (a JSON string)."""
    reasoning_content: str | UnsetType = UNSET
    """Reasoning that precedes the content (vLLM, SGLang)."""


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of ``n`` messages."""

    index: int
    """Index of the choice, from 0."""
    message: ChatReply
    """The assistant's message."""
    logprobs: ChatLogprobs | None
    """None: not requested."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    """Why the generation ended."""
    stop_reason: str | int | UnsetType = UNSET
    """The stop string, or the token of ``stop_token_ids``, that ended the generation (vLLM)."""
    token_ids: list[int] | UnsetType = UNSET
    """Generated token ids, with ``return_token_ids`` (vLLM)."""


class ChatAnswer(msgspec.Struct, kw_only=True):
    """A chat completion."""

    id: str
    """Id of the response."""
    created: int
    """Unix time in seconds."""
    model: str
    """Name of the served model."""
    choices: list[ChatChoice]
    """The ``n`` messages."""
    usage: OpenAIUsage
    """Token counts."""
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    """For each prompt token, a map from token id to ``logprob``, ``rank`` and ``decoded_token`` (vLLM)."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Token ids of the prompt, with ``return_token_ids`` (vLLM)."""


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs of a choice: parallel lists with one entry per token."""

    tokens: list[str]
    """The tokens as strings."""
    token_logprobs: list[float | None]
    """Log-probabilities of the tokens; null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None] | None
    """For each token, a map from string to logprob of it and the most likely tokens. None: not requested."""
    text_offset: list[int]
    """Offset of each token in the text, in characters."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One of ``n`` completions of a prompt; choices are numbered prompt by prompt."""

    index: int
    """Index of the choice, from 0."""
    text: str
    """The generated text; with ``echo`` it follows the prompt."""
    logprobs: CompletionLogprobs | None
    """None: not requested."""
    finish_reason: Literal["stop", "length"]
    """Why the generation ended."""
    stop_reason: str | int | UnsetType = UNSET
    """The stop string, or the token of ``stop_token_ids``, that ended the generation (vLLM)."""
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    """For each prompt token, a map from token id to ``logprob``, ``rank`` and ``decoded_token`` (vLLM)."""
    token_ids: list[int] | UnsetType = UNSET
    """Generated token ids, with ``return_token_ids`` (vLLM)."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Token ids of the prompt, with ``return_token_ids`` (vLLM)."""


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """Completions of all prompts."""

    id: str
    """Id of the response."""
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
    """Index of the input, from 0."""
    embedding: list[float] | str
    """Unit vector, as numbers or in base64."""


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    """Tokens of all inputs."""
    total_tokens: int
    """Equal to ``prompt_tokens``."""


class EmbeddingAnswer(msgspec.Struct, kw_only=True):
    """Embeddings of all inputs."""

    data: list[Embedding]
    """One embedding for each input."""
    model: str
    """Name of the served model."""
    pooling: Literal["last", "mean"]
    """The pooling method (ours)."""
    usage: EmbeddingUsage
    """Token counts."""


class ResponsesUsage(msgspec.Struct, kw_only=True):
    """Token counts."""

    input_tokens: int
    """Tokens of the prompt."""
    output_tokens: int
    """Generated tokens, reasoning included."""
    total_tokens: int
    """Sum of input and output tokens."""


class ResponsesAnswer(msgspec.Struct, kw_only=True):
    """A response and its effective settings."""

    id: str
    """Id of the response; responses are not stored."""
    created_at: int
    """Unix time in seconds."""
    status: Literal["completed", "incomplete"]
    """``incomplete``: cut off by ``max_output_tokens``."""
    incomplete_details: dict[str, Any] | None
    """``reason`` why the response is incomplete."""
    model: str
    """Name of the served model."""
    output: list[dict[str, Any]]
    """Items of ``type`` ``reasoning``, ``message`` or ``function_call``, in order."""
    usage: ResponsesUsage
    """Token counts."""


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Token counts."""

    input_tokens: int
    """Prompt tokens not served from the prefix cache."""
    cache_read_input_tokens: int
    """Prompt tokens served from the prefix cache."""
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
    """The stop sequence that ended the generation, if any."""
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
    """Maximum number of prompt and generated tokens of a request."""
    tokens: list[int]
    """Token ids."""
    token_strs: list[str] | None
    """The tokens as strings, with ``return_token_strs``."""


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """Text of token ids."""

    prompt: str
    """The text, special tokens included."""


class WeightsAnswer(msgspec.Struct, kw_only=True):
    """The weights in use after the update."""

    weight_version: str
    """Name of the weights in use."""
    num_live: int
    """Number of live requests, which continue with the new weights."""


class PauseAnswer(msgspec.Struct, kw_only=True):
    """State of all replicas after generation was paused or resumed."""

    num_live: int
    """Number of live requests of all replicas (ours)."""


class MemoryAnswer(msgspec.Struct, kw_only=True):
    """Memory that is currently released."""

    released: list[str]
    """Tags whose memory is currently released (ours)."""


class DigestAnswer(msgspec.Struct, kw_only=True):
    """Digests of all weights."""

    weight_version: str
    """Name of the weights in use."""
    weights: dict[str, dict[str, Any]]
    """Map from name to ``dtype``, ``shape`` and ``digest`` of the full weight; shard digests are summed over ranks."""


class AdaptersAnswer(msgspec.Struct, kw_only=True):
    """The currently loaded adapters."""

    loaded_adapters: dict[str, str]
    """Map from name to directory of each loaded adapter."""
    num_live: int | UnsetType = UNSET
    """After unloading: number of live requests that still use the adapter (ours)."""
