"""Verbs: what a client may ask of the engine between two steps, beside requests. Values in and out are JSON's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapscope.engine.engine import Engine


def state(engine: Engine) -> dict[str, Any]:
    """Settings and load."""
    return engine.state()


def flush_cache(engine: Engine) -> dict[str, Any]:
    """Empty the prefix cache, but for what running requests hold."""
    return {"num_pages": engine.scheduler.flush()}


def check_weights(engine: Engine, folder: str, partial: bool) -> dict[str, Any]:
    """Raise what :func:`update_weights` would refuse; nothing is changed."""
    engine.check_weights(Path(folder), partial=partial)
    return {}


def update_weights(engine: Engine, folder: str, partial: bool) -> dict[str, Any]:
    """Replace the weights; raises CheckpointError, UsageError with the old ones in place."""
    num_live = len(engine.scheduler.running) + engine.num_waiting
    engine.update_weights(Path(folder), partial=partial)
    return {"num_live": num_live}


def reopen(engine: Engine, run: str) -> dict[str, Any]:
    """Have the observers go on in another run; gives the step from which each rank's does."""
    engine.reopen(Path(run))
    first = engine.config.dp_rank * engine.config.tp
    return {str(first + rank): engine.scheduler.num_steps for rank in range(engine.config.tp)}


VERBS: dict[str, Callable[..., dict[str, Any]]] = {
    "state": state,
    "flush_cache": flush_cache,
    "check_weights": check_weights,
    "update_weights": update_weights,
    "reopen": reopen,
}
