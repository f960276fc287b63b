"""Router: which DP replica computes a request."""

from collections.abc import Sequence
from typing import NamedTuple

from tapscope.core.errors import UsageError
from tapscope.engine.runners.prefix_index import Block
from tapscope.engine.runners.replica_client import Replica

REQUEST_TOKENS = 256
"""One more request under way keeps a request away as much as so many tokens of its prompt attract it."""


class Choice(NamedTuple):
    """Where a request goes."""

    replica: Replica
    reason: str
    """``pinned``: the request names it; ``prefix``: it has the longest part of the prompt; ``load``: none has more."""


def choose(replicas: Sequence[Replica], wanted: int | None = None, blocks: Sequence[Block] = ()) -> Choice:
    """The ``wanted`` replica, else the one with the fewest requests under way, less what it has of the prompt's
    ``blocks``.

    Among equals it is the one with the fewest tokens under way, then with the fewest prefixes, then the first. Raises
    UsageError for a replica that does not exist.
    """
    if wanted is not None:
        if not 0 <= wanted < len(replicas):
            there = "one replica, 0" if len(replicas) == 1 else f"{len(replicas)} replicas, 0 to {len(replicas) - 1}"
            raise UsageError(f"data_parallel_rank={wanted}: this server has {there}")
        return Choice(replicas[wanted], "pinned")
    matched = [replica.prefixes.num_matched(blocks) for replica in replicas]

    def cost(number: int) -> tuple[int, int, int]:
        replica = replicas[number]
        return replica.num_requests * REQUEST_TOKENS - matched[number], replica.num_tokens, len(replica.prefixes)

    best = min(range(len(replicas)), key=cost)
    is_there = matched[best] > 0 and matched[best] == max(matched)
    return Choice(replicas[best], "prefix" if is_there else "load")
