"""Log-probabilities in OpenAI's two formats, of chat and of completions."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from tapscope.engine.requests.token_logprob import TokenLogprob
from tapscope.engine.text.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity; a masked token's log-probability is written as OpenAI writes it


def chat_logprobs(entries: Iterable[TokenLogprob], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """``choices[].logprobs.content``."""
    return [
        _token(tokenizer, entry.token_id, entry.logprob)
        | {"top_logprobs": [_token(tokenizer, token, value) for token, value in entry.top]}
        for entry in entries
    ]


def completion_logprobs(
    entries: Sequence[TokenLogprob | None], token_ids: Sequence[int], tokenizer: Tokenizer | None, offset: int
) -> tuple[dict[str, Any], int]:
    """(``choices[].logprobs`` of completions, offset after the last token); the first token begins at ``offset``.

    The first token of an echoed prompt has no logprob and is null. Offsets count characters of each token decoded on
    its own, so that a character split over two tokens counts as two.
    """
    tokens = [_text(tokenizer, token) for token in token_ids]
    offsets = list(accumulate((len(token) for token in tokens), initial=offset))
    top = [None if entry is None else {_text(tokenizer, t): _finite(v) for t, v in entry.top} for entry in entries]
    values = {
        "tokens": tokens,
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": top if any(top) else None,
        "text_offset": offsets[:-1],
    }
    return values, offsets[-1]


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    content = tokenizer.token_bytes(token_id)
    return {"token": content.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(content)}


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token as a string; its id if there is no tokenizer, as in vLLM."""
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(value: float) -> float:
    return max(value, _LEAST)
