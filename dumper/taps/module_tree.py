"""Tree: the modules of a model by their paths, and which of them torch.compile turns into graphs."""

import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn


class Member(NamedTuple):
    """A module of a model. ``torch.compile(module)`` gives a wrapper of the module: the two are one member."""

    shell: nn.Module
    """What is called: the wrapper, or else the module itself."""
    core: nn.Module
    """What has the parameters, the children and the signature."""

    @property
    def is_compiled(self) -> bool:
        """Whether a call runs a graph of torch.compile, made by the wrapper or in place by ``module.compile()``."""
        return self.shell is not self.core or is_compiled_in_place(self.shell)


def members(model: nn.Module, *, repeated: bool = False) -> dict[str, Member]:
    """Path -> member, the root first. Paths are those of the uncompiled model: ``_orig_mod`` is no part of them.

    A module that is at several paths is at the first, or with ``repeated`` at each.
    """
    paths: dict[str, str] = {}
    shells: set[str] = set()
    found: dict[str, Member] = {}
    for raw, module in model.named_modules(remove_duplicate=not repeated):
        parent, _, name = raw.rpartition(".")
        above = paths.get(parent, "")
        if is_wrapper(module):
            shells.add(raw)
        if raw and parent in shells:
            paths[raw] = above
            continue
        path = paths[raw] = f"{above}.{name}" if above else name
        found[path] = Member(module, core_of(module))
    return found


def is_wrapper(module: nn.Module) -> bool:
    """Whether torch.compile made the module around another one; torch._dynamo is not imported for the question."""
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


def outermost(paths: Iterable[str]) -> list[str]:
    """Those of the paths that are inside no other, in their order."""
    found = dict.fromkeys(paths)
    return [path for path in found if not any(above in found for above in parents(path))]


def parents(path: str) -> Iterator[str]:
    """The modules that hold the module at ``path``, the root last."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def is_inside(path: str, module: str) -> bool:
    """Whether ``path`` is the module or below it."""
    return not module or path == module or path.startswith(f"{module}.")
