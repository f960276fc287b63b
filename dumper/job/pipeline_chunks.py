"""Pipeline chunks: determine the microbatch that a stage of ``torch.distributed.pipelining`` is computing.

A schedule (GPipe, 1F1B, interleaved, zero bubble) splits a batch into chunks and calls its stages in its own order.
Only the stage knows the chunk number, so its methods are wrapped while a Dumper is open. Before its first chunk, a
stage may run its module once on uninitialized memory to infer shapes; these values are not recorded.
"""

import contextlib
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

SHAPE_INFERENCE = -1
"""Value of :func:`current` while a stage infers shapes."""
_MODULE = "torch.distributed.pipelining.stage"
_CLASSES = ("_PipelineStageBase", "_PipelineStage", "PipelineStage")
_SHAPE_METHODS = ("_compute_outputs", "_shape_inference")
"""Methods that run the module on uninitialized memory, up to torch 2.13."""
_local = threading.local()
_lock = threading.Lock()
_wrapped: list[tuple[type, str, Any, Any]] = []
_num_users = 0


def current() -> int | None:
    """Return the number of the chunk that this thread computes, :data:`SHAPE_INFERENCE`, or None outside a stage."""
    return getattr(_local, "chunk", None)


def place_of(models: Sequence[nn.Module]) -> tuple[int, int] | None:
    """Return (size, rank) of the process group of the pipeline stage of one of ``models``; None without a stage.

    A module has no reference to its stage, so this searches all objects of the process, once per opened run.
    """
    base = getattr(sys.modules.get(_MODULE), _CLASSES[0], None)
    if base is None:
        return None
    for each in gc.get_objects():
        if issubclass(type(each), base) and any(vars(each).get("submod") is model for model in models):
            return int(each.group_size), int(each.group_rank)
    return None


def watch() -> None:
    """Wrap the methods of stages until a matching number of :func:`unwatch` calls.

    Does nothing if ``torch.distributed.pipelining`` is not imported.
    """
    global _num_users
    with _lock:
        _num_users += 1
        module = sys.modules.get(_MODULE)
        if _wrapped or module is None:
            return
        for owner in (getattr(module, name, None) for name in _CLASSES):
            for name in ("forward_one_chunk", *_SHAPE_METHODS):
                if isinstance(owner, type) and callable(original := vars(owner).get(name)):
                    wrapper = _wrapper_of(original, infers_shapes=name in _SHAPE_METHODS)
                    _wrapped.append((owner, name, original, wrapper))
                    setattr(owner, name, wrapper)


def unwatch() -> None:
    """Restore the original methods after the last user, except those that other code has wrapped since."""
    global _num_users
    with _lock:
        _num_users -= 1
        if _num_users:
            return
        for owner, name, original, wrapper in _wrapped:
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original)
        _wrapped.clear()


def _wrapper_of(original: Callable[..., Any], *, infers_shapes: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        number = SHAPE_INFERENCE if infers_shapes else args[0] if args else kwargs.get("fwd_chunk_id")
        with _computing(number):
            return original(self, *args, **kwargs)

    return method


@contextlib.contextmanager
def _computing(number: int | None) -> Iterator[None]:
    before = current()
    _local.chunk = number
    try:
        yield
    finally:
        _local.chunk = before
