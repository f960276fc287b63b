"""The modules of a model by path, and which of them torch.compile turns into graphs."""

import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn


class Member(NamedTuple):
    """A module of a model. ``torch.compile(module)`` returns a wrapper of the module: both are one member."""

    shell: nn.Module
    """What is called: the wrapper, or else the module itself."""
    core: nn.Module
    """What has the parameters, the children and the signature."""

    @property
    def is_compiled(self) -> bool:
        """Whether a call runs a graph of torch.compile, made by the wrapper or in place by ``module.compile()``."""
        return self.shell is not self.core or is_compiled_in_place(self.shell)


def members(model: nn.Module, *, repeated: bool = False) -> dict[str, Member]:
    """Path -> member, the root first. Paths are those of the uncompiled model, without ``_orig_mod``.

    A module at several paths is listed at the first, or with ``repeated`` at each.
    """
    named = dict(model.named_modules(remove_duplicate=not repeated))
    if not any(map(is_wrapper, named.values())):
        return {path: Member(module, module) for path, module in named.items()}
    paths: dict[str, str] = {}
    shells: set[str] = set()
    by_path: dict[str, Member] = {}
    for raw, module in named.items():
        parent, _, name = raw.rpartition(".")
        above = paths.get(parent, "")
        if is_wrapper(module):
            shells.add(raw)
        if raw and parent in shells:
            paths[raw] = above
            continue
        path = paths[raw] = f"{above}.{name}" if above else name
        by_path[path] = Member(module, core_of(module))
    return by_path


def is_wrapper(module: nn.Module) -> bool:
    """Whether the module is a wrapper made by torch.compile; does not import torch._dynamo."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def core_of(module: nn.Module) -> nn.Module:
    """The module inside the wrappers of torch.compile."""
    while is_wrapper(module):
        module = module._modules["_orig_mod"]  # type: ignore[assignment]
    return module


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module.__dict__.get("_compiled_call_impl") is not None


def has_own_call(module: nn.Module) -> bool:
    """Whether the module's class defines ``__call__`` and so may pass by its hooks, as vLLM's decoders do."""
    call = type(module).__call__
    return call is not nn.Module.__call__ and not is_wrapper(module)


def outermost(paths: Iterable[str]) -> list[str]:
    """The paths that are not inside another one, in order."""
    unique = dict.fromkeys(paths)
    return [path for path in unique if not any(above in unique for above in parents(path))]


def parents(path: str) -> Iterator[str]:
    """The modules that contain the module at ``path``, the root last."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def is_inside(path: str, module: str) -> bool:
    """Whether ``path`` is the module or below it."""
    return not module or path == module or path.startswith(f"{module}.")
