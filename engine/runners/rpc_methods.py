"""METHODS: functions that clients may call on the engine between two steps. Arguments and results are JSON values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapscope.engine.engine import Engine, PauseMode


def state(engine: Engine) -> dict[str, Any]:
    """Settings and load."""
    return engine.state()


def flush_cache(engine: Engine) -> dict[str, Any]:
    """Empty the prefix cache except for pages that running requests hold."""
    return {"num_pages": engine.scheduler.flush()}


def pause_generation(engine: Engine, mode: PauseMode) -> dict[str, Any]:
    """Compute no further steps; returns the number of live requests, which wait."""
    return {"num_live": engine.pause_generation(mode)}


def continue_generation(engine: Engine) -> dict[str, Any]:
    """Compute steps again; raises LiveError while memory is released."""
    return {"num_live": engine.continue_generation()}


def check_weights(engine: Engine, folder: str, partial: bool) -> dict[str, Any]:
    """Raise the error that :func:`update_weights` would raise; nothing is changed."""
    engine.weights.check(Path(folder), partial=partial)
    return {}


def update_weights(engine: Engine, folder: str | None, partial: bool) -> dict[str, Any]:
    """Replace the weights, by those received if ``folder`` is None; raises CheckpointError or UsageError, with the old
    ones in place.
    """
    num_live = len(engine.scheduler.running) + engine.num_waiting
    engine.update_weights(None if folder is None else Path(folder), partial=partial)
    return {"num_live": num_live}


def init_weights_update_group(engine: Engine, **arguments: Any) -> dict[str, Any]:
    """Join a trainer's process group; raises UsageError."""
    engine.weights.join_group(**arguments)
    return {}


def destroy_weights_update_group(engine: Engine, group: str) -> dict[str, Any]:
    """Leave a trainer's process group; raises UsageError."""
    engine.weights.leave_group(group)
    return {}


def receive_weights(
    engine: Engine, names: list[str], dtypes: list[str], shapes: list[list[int]], group: str
) -> dict[str, Any]:
    """Receive and check what a trainer broadcasts, without loading it; raises UsageError or CheckpointError."""
    engine.weights.receive(names, dtypes, shapes, group)
    return {}


def forget_received_weights(engine: Engine) -> dict[str, Any]:
    """Forget what :func:`receive_weights` received."""
    engine.weights.forget_received()
    return {}


def weights_digest(engine: Engine, names: list[str] | None) -> dict[str, Any]:
    """dtype, shape and digest of each weight; raises UsageError or CheckpointError."""
    return engine.weights.digests(names)


def release_memory(engine: Engine, tags: list[str] | None) -> dict[str, Any]:
    """Give back the memory of weights or KV cache; raises UsageError."""
    return {"released": engine.weights.release_memory(tags)}


def resume_memory(engine: Engine, tags: list[str] | None) -> dict[str, Any]:
    """Allocate that memory again; raises UsageError."""
    return {"released": engine.weights.resume_memory(tags)}


def load_adapter(engine: Engine, name: str, folder: str) -> dict[str, Any]:
    """Load a LoRA adapter; raises UsageError or CheckpointError."""
    engine.load_adapter(name, Path(folder))
    return {}


def unload_adapter(engine: Engine, name: str) -> dict[str, Any]:
    """Unload a LoRA adapter; raises UsageError. Returns the number of live requests that finish with it."""
    return {"num_live": engine.unload_adapter(name)}


def reopen(engine: Engine, run: str) -> dict[str, Any]:
    """Continue the observers in another run; returns the first step in it for each rank."""
    engine.reopen(Path(run))
    first = engine.config.dp_rank * engine.config.tp
    return {str(first + rank): engine.scheduler.num_steps for rank in range(engine.config.tp)}


def start_profile(engine: Engine) -> dict[str, Any]:
    """Record the coming steps with torch's profiler; raises UsageError."""
    engine.start_profile()
    return {}


def stop_profile(engine: Engine, name: str) -> dict[str, Any]:
    """Write the recorded traces; returns their paths. Raises UsageError, OutputError."""
    return {"traces": engine.stop_profile(name)}


METHODS: dict[str, Callable[..., dict[str, Any]]] = {
    method.__name__: method
    for method in (
        init_weights_update_group,
        destroy_weights_update_group,
        receive_weights,
        forget_received_weights,
        weights_digest,
        release_memory,
        resume_memory,
        state,
        flush_cache,
        pause_generation,
        continue_generation,
        check_weights,
        update_weights,
        load_adapter,
        unload_adapter,
        reopen,
        start_profile,
        stop_profile,
    )
}
