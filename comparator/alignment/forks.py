"""Forks: the position at which the tokens of one request diverge between two runs."""

from collections.abc import Sequence

from msgspec import Struct

from tapscope.comparator.alignment.request_history import Request
from tapscope.comparator.alignment.requests import RequestPair, num_equal
from tapscope.core.formatting import listed


class Fork(Struct, frozen=True):
    """The first position at which the tokens of one request differ between the runs."""

    index: int
    """Index into the paired requests."""
    request: str
    """Name of the request in the baseline."""
    position: int
    baseline_token: int
    target_token: int
    in_prompt: bool
    """Whether the tokens diverge within the prompt, that is, the runs had different prompts."""
    baseline_text: str = ""
    """Decoded token; empty without a tokenizer."""
    target_text: str = ""


def find_forks(
    left: Sequence[Request], right: Sequence[Request], pairs: Sequence[RequestPair]
) -> tuple[tuple[Fork, ...], list[str]]:
    """Return the forks of the paired requests, and notes on requests whose tokens are unknown."""
    forks, unknown = [], []
    for index, pair in enumerate(pairs):
        one, two = left[pair.baseline], right[pair.target]
        if not pair.shift and one.tokens and one.tokens == two.tokens:
            continue
        positions, mine, other = one.tokens.shared(two.tokens, pair.shift)
        if not len(positions):
            unknown.append(one.label)
        elif (at := num_equal(mine, other)) < len(positions):
            # One run's prompt may include tokens that the other run generated: only the common part is the prompt.
            given = min(one.prompt_end, two.prompt_end - pair.shift)
            position = positions.item(at)
            forks.append(Fork(index, one.label, position, mine.item(at), other.item(at), position < given))
    notes = [f"token ids unknown, so prefixes were not checked, for requests {listed(unknown)}"] if unknown else []
    return tuple(forks), notes
