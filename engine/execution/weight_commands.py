"""Commands of rank 0 that change a rank's weights between two steps; each returns an error message or None."""

from pathlib import Path
from typing import Any

from tapscope.core.errors import CheckpointError, UsageError
from tapscope.core.wire import Message
from tapscope.engine.checkpoint.received_weights import ReceivedWeights, WeightSource
from tapscope.engine.checkpoint.weight_digest import model_digests
from tapscope.engine.distributed.heartbeat import Activity
from tapscope.engine.distributed.weight_group import WeightGroup
from tapscope.engine.execution.model_runner import ModelRunner


def change_weights(runner: ModelRunner, message: Message) -> str | None:
    """Check or load the weights of a folder, or those received from a trainer, on every rank alike."""
    change = runner.load_weights if message["apply"] else runner.check_weights
    source: WeightSource | None = runner.received if message["folder"] is None else Path(message["folder"])
    assert source is not None, "rank 0 has let this rank receive weights"
    try:
        with runner.heartbeat.during(Activity.LOADING):
            change(source, partial=message["partial"])
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{source} cannot be read: {error}"
    if message["apply"]:
        runner.received = None
    return None


def join_group(runner: ModelRunner, message: Message) -> str | None:
    """Join the process group of a trainer."""
    try:
        with runner.heartbeat.during(Activity.LOADING):
            group = WeightGroup(
                message["address"],
                message["port"],
                rank=message["first_rank"] + runner.model.tp.rank,
                world_size=message["world_size"],
                name=message["group"],
                backend=message["backend"],
                timeout_s=message["timeout_s"],
            )
    except UsageError as error:
        return str(error)
    runner.weight_groups[group.name] = group
    return None


def leave_group(runner: ModelRunner, message: Message) -> str | None:
    """Leave the process group of a trainer; a no-op on a rank that could not join."""
    group = runner.weight_groups.pop(message["group"], None)
    if group is not None:
        group.close()
    return None


def receive_weights(runner: ModelRunner, message: Message) -> str | None:
    """Receive tensors from a trainer, without loading them; an empty list of names discards those received."""
    runner.received = None
    if not message["names"]:
        return None
    group = runner.weight_groups[message["group"]]
    try:
        with runner.heartbeat.during(Activity.LOADING):
            runner.received = ReceivedWeights(group.receive(message["names"], message["dtypes"], message["shapes"]))
    except UsageError as error:
        return str(error)
    return None


def change_memory(runner: ModelRunner, message: Message) -> str | None:
    """Release or resume the memory of parts of the engine."""
    try:
        with runner.heartbeat.during(Activity.LOADING):
            if message["release"]:
                runner.memory.release(message["tags"])
            else:
                runner.memory.resume(message["tags"])
                if not runner.memory.released:
                    runner.recapture_graphs()
    except (OSError, RuntimeError) as error:  # no disk space to save weights, or no memory to resume
        done = "released" if message["release"] else "resumed"
        return f"the memory of {', '.join(message['tags'])} cannot be {done}: {error}"
    return None


def digest_weights(runner: ModelRunner, message: Message) -> list[Any]:
    """Return digests of this rank's shards of the weights, as a query's value for rank 0; raises UsageError."""
    with runner.heartbeat.during(Activity.LOADING):
        return [list(shard) for shard in model_digests(runner.model, message["names"])]
