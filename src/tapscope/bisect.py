"""Bisect: find the smallest set of modules to switch so that two models agree."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapscope.core.errors import ConfigError, DataError, OutputError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "BisectState",
    "attention_modules",
    "bisect",
    "blocks",
    "check_related",
    "differing_modules",
    "recorded_masks",
    "switched_modules",
    "switched_weights",
]

_UNRELATED_COSINE = 0.5
"""Threshold on the cosine of two weight matrices: fine-tuning, quantization and rounding stay far above, random
matrices are near 0."""


def bisect(
    names: Sequence[str],
    agrees: Callable[[frozenset[str]], bool],
    max_runs: int | None = None,
    known: Mapping[frozenset[str], bool] | None = None,
) -> tuple[str, ...]:
    """Return the members of ``names`` that must be switched for ``agrees(switched)`` to be true, in input order.

    ::

        bisect(["embed", "attn", "mlp", "head"], lambda switched: {"attn", "head"} <= switched)  # ("attn", "head")

    Each member is found by a binary search for the shortest sufficient prefix, whose last name is required. The search
    takes at most k * (ceil(log2 n) + 1) + 2 calls for k of n names. The result is minimal if switching more modules
    never breaks agreement. ``known`` are results of an earlier search, which need no call.

    Raises DataError if switching all names does not suffice, or if more than ``max_runs`` calls are needed.
    """
    results = dict(known or {})
    num_known = len(results)

    def test(switched: frozenset[str]) -> bool:
        if switched not in results:
            if max_runs is not None and len(results) - num_known >= max_runs:
                so_far = ", ".join(needed) or "none"
                raise DataError(f"no answer after {max_runs} runs; found so far: {so_far}; raise --max-runs")
            results[switched] = agrees(switched)
        return results[switched]

    needed: list[str] = []
    rest = list(names)
    if test(frozenset()):
        return ()
    if not test(frozenset(rest)):
        raise DataError("the outputs differ even with every module switched; the cause is not in these modules")
    while not test(frozenset(needed)):
        low, high = 0, len(rest)  # rest[:low] does not suffice, rest[:high] does
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if test(frozenset([*rest[:middle], *needed])) else (middle, high)
        needed.append(rest[high - 1])
        rest = rest[: high - 1]
    return tuple(name for name in names if name in needed)


class BisectState:
    """The results of a search in a file with one JSON line each, so that an interrupted search can be resumed."""

    def __init__(self, path: Path, search: Mapping[str, object]) -> None:
        """``search`` identifies the search and is the first line of the file. An incomplete last line is dropped.

        Raises UsageError if the file belongs to another search, DataError if it is not a state file, OutputError if it
        cannot be accessed.
        """
        self._path = path
        self.answers: dict[frozenset[str], bool] = {}
        """Switched names -> whether the models agreed."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            whole = [json.loads(line) for line in lines if line.endswith("\n")]
            if not whole:
                path.write_text(json.dumps(search) + "\n", encoding="utf-8")
                return
            begun, *answers = whole
            self.answers = {frozenset(each["switched"]): bool(each["agrees"]) for each in answers}
            if len(whole) < len(lines):
                path.write_text("".join(lines[: len(whole)]), encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{path}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{path}: not a state file of bisect; give another file") from None
        other = next((key for key in search if not isinstance(begun, dict) or begun.get(key) != search[key]), None)
        if other is not None:
            raise UsageError(f"{path}: holds another search (not the same {other}); give another file")

    def add(self, switched: frozenset[str], agrees: bool) -> None:
        """Append a result to the file. Raises OutputError."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"switched": sorted(switched), "agrees": agrees}) + "\n")
        except OSError as error:
            raise OutputError(f"{self._path}: {error.strerror or error}") from None


def differing_modules(model: "nn.Module", reference: "nn.Module") -> list[str]:
    """Return the paths of modules whose own parameters differ, in registration order.

    Raises ConfigError for a module that the reference lacks, or whose parameters have another shape.
    """
    import torch

    others = dict(reference.named_modules())
    paths = []
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        other = dict(others[path].named_parameters(recurse=False)) if path in others else {}
        for name, value in own.items():
            if name not in other or other[name].shape != value.shape:
                what = f"parameter {path}.{name} of shape {list(value.shape)}"
                raise ConfigError(f"the reference has no {what}; bisect needs two checkpoints of one architecture")
        if not all(torch.equal(value, other[name].to(value.dtype)) for name, value in own.items()):
            paths.append(path)
    return paths


def check_related(model: "nn.Module", reference: "nn.Module") -> None:
    """Raise DataError if most weight matrices of the two models are unrelated, so that every module would matter.

    Two versions of a parameter with at least two axes are unrelated if their cosine similarity is below 0.5.
    """
    others = dict(reference.named_parameters())
    matrices = {name: value for name, value in model.named_parameters() if value.ndim > 1 and name in others}
    unrelated = [name for name, value in matrices.items() if _cosine(value, others[name]) < _UNRELATED_COSINE]
    if 2 * len(unrelated) > len(matrices):
        raise DataError(
            f"{len(unrelated)} of {len(matrices)} weight matrices have nothing in common with the reference's, "
            f"such as {unrelated[0]}; bisect needs two versions of one checkpoint"
        )


def _cosine(one: "torch.Tensor", other: "torch.Tensor") -> float:
    one, other = one.detach().flatten().float(), other.detach().flatten().float()
    norms = float(one.norm()) * float(other.norm())
    return float(one @ other) / norms if norms and math.isfinite(norms) else 1.0


@contextmanager
def switched_weights(model: "nn.Module", reference: "nn.Module", paths: frozenset[str]) -> Iterator[None]:
    """Context manager: the given modules of ``model`` run with the parameters of ``reference``, cast to their own
    dtype."""
    before = []
    others = dict(reference.named_modules())
    for path, module in model.named_modules():
        if path in paths:
            for name, value in module.named_parameters(recurse=False):
                before.append((value, value.data))
                value.data = others[path].get_parameter(name).data.to(value.device, value.dtype)
    try:
        yield
    finally:
        for value, data in reversed(before):
            value.data = data


def blocks(model: "nn.Module") -> list[str]:
    """Return the paths of a decoder's building blocks with parameters, inside and outside of its layers.

    Examples: ``model.embed_tokens``, ``model.layers.0.self_attn``, ``model.layers.0.mlp``, ``lm_head``. A layer is a
    member of a ModuleList; a module that contains a ModuleList is divided further.
    """
    from torch import nn

    def below(path: str, module: nn.Module) -> Iterator[str]:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            divided = any(isinstance(each, nn.ModuleList) for each in (module, *child.modules()))
            if divided and any(True for _ in child.children()):
                yield from below(inner, child)
            elif any(True for _ in child.parameters()):
                yield inner

    return list(below("", model))


@contextmanager
def recorded_masks(model: "nn.Module") -> Iterator[dict[str, list[Any]]]:
    """Context manager: record the ``attention_mask`` argument of each module call; yields module path -> masks."""
    masks: dict[str, list[Any]] = {}

    def recorder(path: str) -> Callable[[Any, Any, dict[str, Any]], None]:
        def keep(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
            if "attention_mask" in kwargs:
                masks.setdefault(path, []).append(kwargs["attention_mask"])

        return keep

    hooks = [
        module.register_forward_pre_hook(recorder(path), with_kwargs=True) for path, module in model.named_modules()
    ]
    try:
        yield masks
    finally:
        for hook in hooks:
            hook.remove()


def attention_modules(masks: Mapping[str, object]) -> list[str]:
    """Return the innermost modules that were called with a mask. Raises ConfigError if there are none."""
    paths = [path for path in masks if path and not any(each.startswith(f"{path}.") for each in masks)]
    if not paths:
        raise ConfigError("no module of this model is called with attention_mask; its attention cannot be switched")
    return paths


@contextmanager
def switched_modules(
    model: "nn.Module", reference: "nn.Module", paths: frozenset[str], masks: Mapping[str, Sequence[Any]]
) -> Iterator[None]:
    """Context manager: ``model`` calls the modules of ``reference`` at ``paths``, with the reference's dtype and
    attention.

    Floating-point inputs are cast to the dtype of the called module's parameters, outputs to the dtype of the replaced
    module. ``masks`` are the masks recorded from the reference (:func:`recorded_masks`), because each attention
    implementation has its own mask format.
    """
    replaced, hooks = [], []
    try:
        for path in sorted(paths):
            parent, _, name = path.rpartition(".")
            own, other = model.get_submodule(path), reference.get_submodule(path)
            inputs, outputs = _caster(other), _caster(own)
            hooks.append(other.register_forward_pre_hook(_cast_inputs(inputs), with_kwargs=True))
            hooks.append(other.register_forward_hook(_cast_outputs(outputs)))
            for below, _ in other.named_modules(prefix=path):
                if below in masks:
                    hooks.append(
                        reference.get_submodule(below).register_forward_pre_hook(
                            _with_masks(iter(masks[below])), with_kwargs=True
                        )
                    )
            replaced.append((model.get_submodule(parent), name, own))
            setattr(model.get_submodule(parent), name, other)
        yield
    finally:
        for holder, name, own in replaced:
            setattr(holder, name, own)
        for hook in hooks:
            hook.remove()


def _caster(module: "nn.Module") -> Callable[[Any], Any]:
    """Return a function that casts floating-point tensors, also in nested containers, to the dtype of the module's
    parameters."""
    import torch
    from torch.utils._pytree import tree_map_only

    dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), None)

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value if dtype is None or not value.is_floating_point() else value.to(dtype)

    return lambda values: tree_map_only(torch.Tensor, cast, values)


def _cast_inputs(cast: Callable[[Any], Any]) -> Callable[[Any, Any, dict[str, Any]], tuple[Any, dict[str, Any]]]:
    return lambda _module, args, kwargs: (cast(args), {name: cast(value) for name, value in kwargs.items()})


def _cast_outputs(cast: Callable[[Any], Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda _module, _args, output: cast(output)


def _with_masks(masks: Iterator[Any]) -> Callable[[Any, Any, dict[str, Any]], tuple[Any, dict[str, Any]]]:
    return lambda _module, args, kwargs: (args, kwargs | {"attention_mask": next(masks)})
