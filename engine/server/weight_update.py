"""Updates the weights of all DP replicas."""

from typing import Any

from tapscope.core.errors import LiveError, RankLostError, TapscopeError
from tapscope.engine.runners.engine_client import EngineClient


async def update_weights(client: EngineClient, folder: str, *, partial: bool) -> dict[str, Any]:
    """Check ``folder`` on every replica, then load it on all; returns their merged results.

    Raises a replica's error before any weights have changed. If a replica fails to load what it has checked, the
    replicas' weights differ: raises LiveError, and requests are refused until a whole checkpoint is loaded on all.
    """
    several = len(client.replicas) > 1
    if several:
        await client.call_all("check_weights", folder=folder, partial=partial)
    client.forget_prefixes()
    answers = await client.ask_all("update_weights", folder=folder, partial=partial)
    refused = {number: answer for number, answer in enumerate(answers) if isinstance(answer, TapscopeError)}
    if not refused:
        client.weights_conflict = client.weights_conflict if partial else None
        return {"num_live": sum(answer["num_live"] for answer in answers if not isinstance(answer, TapscopeError))}
    number, error = next(iter(refused.items()))
    if not several or isinstance(error, RankLostError):
        raise error
    if len(refused) < len(answers):
        who = ", ".join(map(str, refused))
        client.weights_conflict = (
            f"the DP replicas have different weights: {who} kept the old ones ({error}), the others have new ones; "
            "send a whole checkpoint to /update_weights_from_disk, or restart the server"
        )
        raise LiveError(client.weights_conflict)
    raise type(error)(client.replicas[number].named(str(error)))
