"""Router: which DP replica computes a request."""

from collections.abc import Sequence

from tapscope.engine.server.replica import Replica
from tapscope.errors import UsageError


def choose(replicas: Sequence[Replica], wanted: int | None = None) -> Replica:
    """The ``wanted`` replica, else the one with the fewest requests under way, of those with the fewest tokens.

    Among equals it is the first: who asks alone meets the prefix cache that his last request has filled. Raises
    UsageError for a replica that does not exist.
    """
    if wanted is None:
        return min(replicas, key=lambda replica: (replica.num_requests, replica.num_tokens))
    if not 0 <= wanted < len(replicas):
        there = "one replica, 0" if len(replicas) == 1 else f"{len(replicas)} replicas, 0 to {len(replicas) - 1}"
        raise UsageError(f"data_parallel_rank={wanted}: this server has {there}")
    return replicas[wanted]
