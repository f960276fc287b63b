"""Updating: new weights for every DP replica, or for none."""

from typing import Any

from tapscope.core.errors import LiveError, RankLostError, TapscopeError
from tapscope.engine.runners.engine_client import EngineClient


async def update_weights(client: EngineClient, folder: str, *, partial: bool) -> dict[str, Any]:
    """Have every replica check ``folder``, then all of them load it; gives what they answer, added up.

    Raises what a replica refuses it with, before any has changed. One that cannot load what it has checked leaves
    weights that differ: LiveError then, and no request is taken until a whole checkpoint has come everywhere.
    """
    several = len(client.replicas) > 1
    if several:
        await client.call_all("check_weights", folder=folder, partial=partial)
    client.forget_prefixes()
    answers = await client.ask_all("update_weights", folder=folder, partial=partial)
    refused = {number: answer for number, answer in enumerate(answers) if isinstance(answer, TapscopeError)}
    if not refused:
        client.discord = client.discord if partial else None
        return {"num_live": sum(answer["num_live"] for answer in answers if not isinstance(answer, TapscopeError))}
    number, error = next(iter(refused.items()))
    if not several or isinstance(error, RankLostError):
        raise error
    if len(refused) < len(answers):
        who = ", ".join(map(str, refused))
        client.discord = (
            f"the DP replicas have different weights: {who} kept the old ones ({error}), the others have new ones; "
            "send a whole checkpoint to /update_weights_from_disk, or restart the server"
        )
        raise LiveError(client.discord)
    raise type(error)(client.replicas[number].named(str(error)))
