"""Log-probabilities in OpenAI's two formats (chat and completions) and in vLLM's ``prompt_logprobs`` format."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from tapscope.engine.requests.token_logprob import TokenLogprob
from tapscope.engine.text.tokenizer import Tokenizer

_MIN_LOGPROB = -9999.0  # replaces -inf, which JSON lacks; OpenAI uses the same value for masked tokens


def chat_logprobs(
    entries: Iterable[TokenLogprob], tokenizer: Tokenizer, *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """Return ``choices[].logprobs.content``; with ``as_ids`` tokens are written as ``token_id:ID``, as in vLLM."""
    return [
        _token(tokenizer, entry.token_id, entry.logprob, as_ids)
        | {"top_logprobs": [_token(tokenizer, token, value, as_ids) for token, value in entry.top]}
        for entry in entries
    ]


def prompt_logprobs(
    entries: Iterable[TokenLogprob | None], tokenizer: Tokenizer | None
) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's ``prompt_logprobs``: for each prompt token, a map by token id; null for the first token.

    Each map starts with the prompt token itself. Its rank is null if it is not among the most likely tokens.
    """
    return [None if entry is None else _by_token_id(entry, tokenizer) for entry in entries]


def _by_token_id(entry: TokenLogprob, tokenizer: Tokenizer | None) -> dict[str, dict[str, Any]]:
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
    return {
        str(token): {
            "logprob": _finite(value),
            "rank": ranks.get(token),
            "decoded_token": None if tokenizer is None else _text(tokenizer, token),
        }
        for token, value in ((entry.token_id, entry.logprob), *entry.top)
    }


def completion_logprobs(
    entries: Sequence[TokenLogprob | None],
    token_ids: Sequence[int],
    tokenizer: Tokenizer | None,
    offset: int,
    *,
    as_ids: bool = False,
) -> tuple[dict[str, Any], int]:
    """Return ``choices[].logprobs`` of a completion and the text offset after the last token.

    The first token starts at ``offset``. With ``as_ids``, or without a tokenizer, tokens are written as
    ``token_id:ID``, as in vLLM.

    As in OpenAI and vLLM, ``top_logprobs`` contains the token itself in addition to the most likely tokens, unless it
    is one of them. If several tokens decode to the same string (for example, incomplete characters), the most likely
    one is kept: lm-evaluation-harness uses the maximum of the values to decide whether a token is greedy. The first
    token of an echoed prompt has no logprob; its entry is null. Offsets count the characters of each token decoded
    separately, so a character split over two tokens counts as two.
    """
    tokens = [_text(tokenizer, token) for token in token_ids]
    offsets = list(accumulate((len(token) for token in tokens), initial=offset))
    shown = None if as_ids else tokenizer
    top = [None if entry is None or not entry.top else _by_text(entry, shown) for entry in entries]
    values = {
        "tokens": [_text(shown, token) for token in token_ids],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": top if any(top) else None,
        "text_offset": offsets[:-1],
    }
    return values, offsets[-1]


def _by_text(entry: TokenLogprob, tokenizer: Tokenizer | None) -> dict[str, float]:
    values: dict[str, float] = {}
    for token, value in ((entry.token_id, entry.logprob), *entry.top):
        text = _text(tokenizer, token)
        values[text] = max(_finite(value), values.get(text, _MIN_LOGPROB))
    return values


def _token(tokenizer: Tokenizer, token_id: int, logprob: float, as_ids: bool) -> dict[str, Any]:
    content = tokenizer.token_bytes(token_id)
    text = _text(None, token_id) if as_ids else content.decode(errors="replace")
    return {"token": text, "logprob": _finite(logprob), "bytes": list(content)}


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """Return a token as a string, or as ``token_id:ID`` if ``tokenizer`` is None, as in vLLM."""
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(value: float) -> float:
    return max(value, _MIN_LOGPROB)
