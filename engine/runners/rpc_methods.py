"""METHODS: engine functions that clients may call between two steps. Arguments and results are JSON values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapscope.engine.engine import Engine, PauseMode


def state(engine: Engine) -> dict[str, Any]:
    """Return the engine's settings and load."""
    return engine.state()


def flush_cache(engine: Engine) -> dict[str, Any]:
    """Evict all prefix cache pages that no running request holds; return the number of freed pages."""
    return {"num_pages": engine.scheduler.flush()}


def pause_generation(engine: Engine, mode: PauseMode) -> dict[str, Any]:
    """Stop running steps; return the number of live requests, which wait."""
    return {"num_live": engine.pause_generation(mode)}


def continue_generation(engine: Engine) -> dict[str, Any]:
    """Resume running steps; return the number of live requests. Raises LiveError while memory is released."""
    return {"num_live": engine.continue_generation()}


def check_weights(engine: Engine, folder: str, partial: bool) -> dict[str, Any]:
    """Raise the error that :func:`update_weights` would raise, without changing any weights."""
    engine.weights.check(Path(folder), partial=partial)
    return {}


def update_weights(engine: Engine, folder: str | None, partial: bool) -> dict[str, Any]:
    """Load new weights from ``folder``, or the received ones if ``folder`` is None; return the number of live requests.

    Raises CheckpointError or UsageError and then keeps the old weights.
    """
    num_live = len(engine.scheduler.running) + engine.num_waiting
    engine.update_weights(None if folder is None else Path(folder), partial=partial)
    return {"num_live": num_live}


def init_weights_update_group(engine: Engine, **arguments: Any) -> dict[str, Any]:
    """Join a trainer's process group. Raises UsageError."""
    engine.weights.join_group(**arguments)
    return {}


def destroy_weights_update_group(engine: Engine, group: str) -> dict[str, Any]:
    """Leave a trainer's process group. Raises UsageError."""
    engine.weights.leave_group(group)
    return {}


def receive_weights(
    engine: Engine, names: list[str], dtypes: list[str], shapes: list[list[int]], group: str
) -> dict[str, Any]:
    """Receive and check tensors broadcast by a trainer, without loading them. Raises UsageError or CheckpointError."""
    engine.weights.receive(names, dtypes, shapes, group)
    return {}


def forget_received_weights(engine: Engine) -> dict[str, Any]:
    """Discard the tensors received by :func:`receive_weights`."""
    engine.weights.forget_received()
    return {}


def weights_digest(engine: Engine, names: list[str] | None) -> dict[str, Any]:
    """Return dtype, shape and digest of each weight. Raises UsageError or CheckpointError."""
    return engine.weights.digests(names)


def release_memory(engine: Engine, tags: list[str] | None) -> dict[str, Any]:
    """Free the memory of the weights or the KV cache; return the released tags. Raises UsageError."""
    return {"released": engine.weights.release_memory(tags)}


def resume_memory(engine: Engine, tags: list[str] | None) -> dict[str, Any]:
    """Allocate released memory again; return the tags that are still released. Raises UsageError."""
    return {"released": engine.weights.resume_memory(tags)}


def load_adapter(engine: Engine, name: str, folder: str) -> dict[str, Any]:
    """Load a LoRA adapter. Raises UsageError or CheckpointError."""
    engine.load_adapter(name, Path(folder))
    return {}


def unload_adapter(engine: Engine, name: str) -> dict[str, Any]:
    """Unload a LoRA adapter; return the number of live requests that still use it. Raises UsageError."""
    return {"num_live": engine.unload_adapter(name)}


def reopen(engine: Engine, run: str) -> dict[str, Any]:
    """Switch the observers to another run; return, for each rank, its first step in that run."""
    engine.reopen(Path(run))
    first = engine.config.dp_rank * engine.config.tp
    return {str(first + rank): engine.scheduler.num_steps for rank in range(engine.config.tp)}


def start_profile(engine: Engine) -> dict[str, Any]:
    """Start recording the following steps with the PyTorch profiler. Raises UsageError."""
    engine.start_profile()
    return {}


def stop_profile(engine: Engine, name: str) -> dict[str, Any]:
    """Stop profiling, write the traces and return their paths. Raises UsageError, OutputError."""
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
