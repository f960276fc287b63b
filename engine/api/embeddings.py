"""Request body and response of POST /v1/embeddings."""

import base64
import math
import struct
from dataclasses import dataclass
from typing import Any, Literal

from tapscope.core.convert import PositiveInt
from tapscope.core.errors import RequestError
from tapscope.engine.api.completions import Prompts, read_prompts
from tapscope.engine.api.request_model import SENDER_FIELDS, RequestModel
from tapscope.engine.api.sampling_fields import TruncatePromptTokens, truncated_length
from tapscope.engine.api.served_model import ServedModel
from tapscope.engine.api.usage import check_not_aborted
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.output import Output


class EmbeddingBody(RequestModel, kw_only=True, frozen=True):
    """The body of POST /v1/embeddings."""

    IGNORED = SENDER_FIELDS

    input: Prompts
    """A string, token ids, or a list of inputs."""
    model: str | None = None
    """Name of the model; MODEL:ADAPTER or ADAPTER selects a LoRA adapter. None: the served model."""
    encoding_format: Literal["float", "base64"] = "float"
    """``float``: numbers; ``base64``: little-endian float32."""
    pooling: Literal["last", "mean"] = "last"
    """``last``: the last token's final hidden state; ``mean``: the mean over all tokens (ours)."""
    add_special_tokens: bool = True
    """Let the tokenizer add special tokens, such as BOS (vLLM)."""
    truncate_prompt_tokens: TruncatePromptTokens | None = None
    """Keep this many tokens at the end of the prompt; -1: as many as fit (vLLM). None: all."""
    dimensions: PositiveInt | None = None
    """Number of leading elements to return, normalized again. None: all."""


PARAMS = SamplingParams(max_new_tokens=1, ignore_eos=True)
"""Sampling parameters of an embedding request, whose single generated token is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A validated request to POST /v1/embeddings."""

    prompts: tuple[tuple[int, ...], ...]
    is_base64: bool
    """Whether vectors are returned as base64 of little-endian float32 instead of numbers."""
    dimensions: int | None
    """Number of leading elements to return, normalized again (Matryoshka embeddings, arXiv:2205.13147); None: all."""
    pooling: str
    """``last``: the final hidden state of the last token; ``mean``: the mean over all tokens."""

    @classmethod
    def parse(cls, body: Any, model: ServedModel) -> "EmbeddingRequest":
        """Parse and validate decoded JSON; the RequestError names the field, its value and the valid values."""
        fields = EmbeddingBody.parse(body)
        model.check_name(fields.model)
        limit = truncated_length(fields.truncate_prompt_tokens, PARAMS.max_new_tokens, model)
        prompts, _ = read_prompts(
            fields.input, "input", model, add_special_tokens=fields.add_special_tokens, max_tokens=limit
        )
        for ids in prompts:
            if len(ids) >= model.max_positions:
                text = f"input has a prompt of {len(ids)} tokens; {model.name} embeds at most {model.max_positions - 1}"
                raise RequestError(text, param="input", code="context_length_exceeded")
        if fields.dimensions is not None and model.hidden_size and fields.dimensions > model.hidden_size:
            text = f"dimensions={fields.dimensions}: {model.name} has embeddings of {model.hidden_size} elements"
            raise RequestError(text, param="dimensions")
        return cls(
            prompts=prompts,
            dimensions=fields.dimensions,
            is_base64=fields.encoding_format == "base64",
            pooling=fields.pooling,
        )


class EmbeddingResponse:
    """Response builder that accepts the outputs of all prompts in any order."""

    def __init__(self, model: ServedModel, request: EmbeddingRequest) -> None:
        self._model = model
        self._request = request
        self._vectors: dict[int, tuple[float, ...]] = {}

    def take(self, index: int, output: Output) -> None:
        """Add an output of prompt ``index``. Raises AbortedError."""
        check_not_aborted(output)
        if output.embedding is not None:
            self._vectors[index] = _shortened(output.embedding, self._request.dimensions)

    def answer(self) -> dict[str, Any]:
        """Return the complete response, including the pooling method."""
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
            for index, vector in sorted(self._vectors.items())
        ]
        count = sum(map(len, self._request.prompts))
        usage = {"prompt_tokens": count, "total_tokens": count}
        head = {"object": "list", "data": data, "model": self._model.name}
        return head | {"pooling": self._request.pooling, "usage": usage}

    def _encoded(self, vector: tuple[float, ...]) -> str | list[float]:
        if not self._request.is_base64:
            return list(vector)
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _shortened(vector: tuple[float, ...], dimensions: int | None) -> tuple[float, ...]:
    """Return the first ``dimensions`` elements of ``vector``, normalized to norm 1; None: ``vector`` unchanged."""
    if dimensions is None:
        return vector
    norm = math.hypot(*vector[:dimensions]) or 1.0
    return tuple(value / norm for value in vector[:dimensions])
