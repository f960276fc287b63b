"""Triton's interpreter without redundant work.

The results are unchanged: tests/kernels/triton/test_quick_interpreter.py.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_np_dtype = interpreter._get_np_dtype
_patch_lang = interpreter._patch_lang
_unwrap_if_constexpr = core._unwrap_if_constexpr
_init_block = core.block_type.__init__
_init_tensor = core.tensor.__init__
_broadcast = TritonSemantic.broadcast_impl_value
_PLAIN = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}


def install() -> None:
    """Patch the interpreter for the rest of this process; call before the first kernel runs."""
    options = interpreter.interpreter_builder.options
    if not options.debug:  # only in debug mode does it assert the 64-bit recomputation of every integer sum
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    for package in (tl, core, tl.tensor, tl.math, core.tensor_descriptor_base):
        builtins(package)
    interpreter._get_np_dtype = np_dtype
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang
    core._unwrap_if_constexpr = unwrap_if_constexpr
    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor
    TritonSemantic.broadcast_impl_value = broadcast


def np_dtype(kind: Any) -> np.dtype[Any]:
    """Return the numpy dtype of a Triton type; the original builds a table of all types per lookup."""
    if isinstance(kind, tl.block_type):
        kind = kind.element_ty
    return np.dtype(np.uint64) if isinstance(kind, tl.pointer_type) else _of_scalar(kind)


@functools.cache
def _of_scalar(kind: Any) -> np.dtype[Any]:
    return _np_dtype(kind)


def patch_lang(fn: Any) -> Any:
    """Patch the language once; the original patches everything again for every function call."""
    if all(is_replaced(package) for package in _packages(fn)):
        return interpreter._LangPatchScope()
    return _patch_lang(fn)


@functools.cache
def _packages(fn: Any) -> tuple[Any, ...]:
    """Return the packages whose members the original replaces for a kernel or a function."""
    languages = [value for value in fn.__globals__.values() if value is tl or value is core]
    return (*languages, *([tl.math] if tl in languages else []), tl.tensor, core.tensor_descriptor_base)


def is_replaced(package: Any) -> bool:
    name, member, _ = builtins(package)[0]
    return getattr(package, name) is not member


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Replace the built-ins; the original lists and sorts all members of the language, and wraps each of them."""
    for name, member, interpreted in builtins(package):
        if getattr(package, name) is member:
            scope.set_attr(package, name, interpreted)


@functools.cache
def builtins(package: Any) -> list[tuple[str, Any, Callable[..., Any]]]:
    """Return (name, member, replacement) of the language's built-in functions."""
    return [
        (name, member, _interpreted(member)) for name, member in inspect.getmembers(package) if core.is_builtin(member)
    ]


def _interpreted(member: Any) -> Callable[..., Any]:
    """Return the function without the wrapper that checks for a ``_semantic``."""
    while core.is_builtin(member) and hasattr(member, "__wrapped__"):
        member = member.__wrapped__

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    return call


def unwrap_if_constexpr(value: Any) -> Any:
    """Unwrap a constexpr; the original tests four classes in turn."""
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return value if kind in _PLAIN else _unwrap_if_constexpr(value)


_blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}


def init_block(self: Any, element_ty: Any, shape: Any) -> None:
    """Initialize a block type; the original validates and formats the shape of every value."""
    values = shape.values if type(shape) is core.tuple else shape
    key = tuple([value.value if type(value) is core.constexpr else value for value in values])
    known = _blocks.get(key)
    if known is None:
        _init_block(self, element_ty, shape)
        _blocks[key] = self.shape, self.numel, str(self.shape)
        return
    self.element_ty = element_ty
    self.shape, self.numel, text = known
    self.name = f"<{text}, {element_ty}>"


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """Initialize a tensor; the original creates a shape of constants for every value."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_of_tensor(tuple(type.shape.values) if type.is_block() else ())


@functools.cache
def _shape_of_tensor(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(int(np.prod(shape, dtype=object)))


def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Broadcast two values; the original compares shapes element by element although each shape is one shared
    object."""
    one, two = lhs.type, rhs.type
    if one.is_block():
        if two.is_block() and one.shape is two.shape:
            return lhs, rhs
    elif not two.is_block():
        return lhs, rhs
    return _broadcast(self, lhs, rhs)
