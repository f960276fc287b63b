"""Forks: the position at which the tokens of one request diverge between two runs."""

from collections.abc import Sequence

from msgspec import Struct

from tapscope.comparator.alignment.request_history import Request
from tapscope.comparator.alignment.requests import RequestPair, num_equal
from tapscope.core.formatting import listed


class Fork(Struct, frozen=True):
    """The first position at which two runs of one request hold different tokens."""

    index: int
    """Index of the paired requests."""
    request: str
    """Its name in the baseline."""
    position: int
    baseline_token: int
    target_token: int
    in_prompt: bool
    """Whether the tokens diverge within the prompt: the runs were given different prompts."""
    baseline_text: str = ""
    """What the token decodes to, if a tokenizer is known."""
    target_text: str = ""


def find_forks(
    left: Sequence[Request], right: Sequence[Request], pairs: Sequence[RequestPair]
) -> tuple[tuple[Fork, ...], list[str]]:
    """Where the paired requests diverge, and notes on requests whose tokens are unknown."""
    forks, unknown = [], []
    for index, pair in enumerate(pairs):
        one, two = left[pair.baseline], right[pair.target]
        if not pair.shift and one.tokens and one.tokens == two.tokens:
            continue
        positions, mine, other = one.tokens.shared(two.tokens, pair.shift)
        if not len(positions):
            unknown.append(one.label)
        elif (at := num_equal(mine, other)) < len(positions):
            # What one run was given, the other may have generated: only the part given to both is the prompt.
            given = min(one.prompt_end, two.prompt_end - pair.shift)
            position = positions.item(at)
            forks.append(Fork(index, one.label, position, mine.item(at), other.item(at), position < given))
    notes = [f"token ids unknown, so prefixes were not checked, for requests {listed(unknown)}"] if unknown else []
    return tuple(forks), notes
