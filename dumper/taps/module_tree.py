"""Module tree: the modules of a model by path, with the wrappers of torch.compile resolved."""

import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn


class Member(NamedTuple):
    """A module of a model; a module and the wrapper that ``torch.compile(module)`` returns count as one member."""

    shell: nn.Module
    """The module that is called: the torch.compile wrapper if there is one, otherwise the module itself."""
    core: nn.Module
    """The module with the parameters, the children and the forward signature."""

    @property
    def is_compiled(self) -> bool:
        """Whether calls run compiled code, through a torch.compile wrapper or after ``module.compile()``."""
        return self.shell is not self.core or is_compiled_in_place(self.shell)


def members(model: nn.Module, *, repeated: bool = False) -> dict[str, Member]:
    """Return path -> member, the root first. Paths are those of the uncompiled model, without ``_orig_mod``.

    A module with several paths is listed under the first one, or with ``repeated`` under each.
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
    """Return whether the module is a wrapper made by torch.compile, without importing torch._dynamo."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def core_of(module: nn.Module) -> nn.Module:
    """Return the module inside any torch.compile wrappers."""
    while is_wrapper(module):
        module = module._modules["_orig_mod"]  # type: ignore[assignment]
    return module


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether the module was compiled by ``module.compile()``."""
    return module.__dict__.get("_compiled_call_impl") is not None


def has_own_call(module: nn.Module) -> bool:
    """Return whether the class overrides ``__call__`` and may therefore skip hooks, as vLLM's decoders do."""
    call = type(module).__call__
    return call is not nn.Module.__call__ and not is_wrapper(module)


def outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths that have no ancestor in ``paths``, without duplicates and in order."""
    unique = dict.fromkeys(paths)
    return [path for path in unique if not any(above in unique for above in parents(path))]


def parents(path: str) -> Iterator[str]:
    """Yield the paths of the modules that contain the module at ``path``, the root last."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def is_inside(path: str, module: str) -> bool:
    """Return whether ``path`` is ``module`` itself or one of its descendants."""
    return not module or path == module or path.startswith(f"{module}.")
