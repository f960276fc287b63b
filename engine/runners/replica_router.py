"""Route requests to DP replicas by load and cached prefix."""

from collections.abc import Sequence
from typing import NamedTuple

from tapscope.core.errors import UsageError
from tapscope.engine.runners.prefix_index import Block
from tapscope.engine.runners.replica_client import Replica

REQUEST_TOKENS = 256
"""Cost of a live request in tokens. One more request is outweighed by more cached prompt tokens than this."""


class Choice(NamedTuple):
    """The replica chosen for a request and the reason."""

    replica: Replica
    reason: str
    """``pinned``: named by the request; ``prefix``: longest cached prefix; ``load``: lowest load."""


def choose(replicas: Sequence[Replica], wanted: int | None = None, blocks: Sequence[Block] = ()) -> Choice:
    """Return the ``wanted`` replica, or the one with the lowest cost.

    The cost of a replica is its live requests, each counted as :data:`REQUEST_TOKENS`, minus the cached tokens of
    ``blocks``. Ties are broken by the fewest live tokens, then the fewest indexed blocks, then the lowest number.
    Raises UsageError if ``wanted`` is out of range.
    """
    if wanted is not None:
        if not 0 <= wanted < len(replicas):
            known = "one replica, 0" if len(replicas) == 1 else f"{len(replicas)} replicas, 0 to {len(replicas) - 1}"
            raise UsageError(f"data_parallel_rank={wanted}: this server has {known}")
        return Choice(replicas[wanted], "pinned")
    matched = [replica.prefixes.num_matched(blocks) for replica in replicas]

    def cost(number: int) -> tuple[int, int, int]:
        replica = replicas[number]
        return replica.num_requests * REQUEST_TOKENS - matched[number], replica.num_tokens, len(replica.prefixes)

    best = min(range(len(replicas)), key=cost)
    has_prefix = matched[best] > 0 and matched[best] == max(matched)
    return Choice(replicas[best], "prefix" if has_prefix else "load")
