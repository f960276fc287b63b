"""The interpreter used by the tests behaves like Triton's own."""

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tapscope.kernels import triton as kernels

if kernels.why_not(torch.device("cpu")) is not None:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

import quick_interpreter
import triton.language as tl
from triton.runtime import interpreter

SCALARS = [each for each in vars(tl).values() if type(each) is tl.dtype and each not in (tl.void,)]


class Scope:
    def __init__(self) -> None:
        self.names: list[str] = []

    def set_attr(self, package: Any, name: str, value: Any) -> None:
        self.names.append(name)


@pytest.mark.parametrize("package", [tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base])
def test_quick_interpreter_replaces_what_the_original_replaces(package: Any) -> None:
    scope = Scope()
    quick_interpreter.patch_builtin(package, interpreter.interpreter_builder, scope)
    assert scope.names == [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def test_quick_interpreter_knows_the_same_types() -> None:
    known = 0
    for scalar in SCALARS:
        for kind in (scalar, tl.block_type(scalar, [4]), tl.pointer_type(scalar)):
            try:
                expected = quick_interpreter._np_dtype(kind)
            except KeyError:
                with pytest.raises(KeyError):
                    quick_interpreter.np_dtype(kind)
            else:
                assert quick_interpreter.np_dtype(kind) == expected
                known += 1
    assert known > 40
    assert quick_interpreter.np_dtype(tl.block_type(tl.pointer_type(tl.int8), [4])) == "uint64"


def test_original_does_not_assert_what_it_computes_twice() -> None:
    assert not interpreter.InterpreterOptions().debug


def test_quick_interpreter_makes_the_same_types() -> None:
    for scalar in (tl.float32, tl.int1, tl.pointer_type(tl.int8)):
        for shape in ([4], [1, 8], [tl.constexpr(2), 4, 1], tl.core.tuple([16, 2])):
            own = object.__new__(tl.block_type)
            quick_interpreter._init_block(own, scalar, shape)
            for made in (tl.block_type(scalar, shape), tl.block_type(scalar, shape)):  # the second is cached
                assert (made.name, made.numel, made.shape.values) == (own.name, own.numel, own.shape.values)
                assert made == own
    for shape, error in (([3], ValueError), ([], TypeError), ([1 << 30], ValueError)):
        with pytest.raises(error):
            tl.block_type(tl.int8, shape)


@pytest.mark.parametrize("kind", [tl.float32, tl.block_type(tl.pointer_type(tl.int8), [4, 2])])
def test_quick_interpreter_makes_the_same_tensors(kind: Any) -> None:
    own, made = object.__new__(tl.tensor), tl.tensor(None, kind)
    quick_interpreter._init_tensor(own, None, kind)
    assert vars(made).keys() == vars(own).keys()
    assert (made.type, made.dtype, made.numel.value) == (own.type, own.dtype, own.numel.value)
    assert [size.value for size in made.shape] == [size.value for size in own.shape]


@pytest.mark.parametrize(
    "value", [3, None, "x", tl.constexpr(3), tl.constexpr(tl.float32), [tl.constexpr(1), 2], (1, tl.constexpr(2))]
)
def test_quick_interpreter_unwraps_the_same_values(value: Any) -> None:
    assert quick_interpreter.unwrap_if_constexpr(value) == quick_interpreter._unwrap_if_constexpr(value)


def test_quick_interpreter_broadcasts_alike() -> None:
    def of(data: Any, kind: Any) -> Any:
        return tl.tensor(interpreter.TensorHandle(data, kind.scalar), kind)

    numbers = np.arange(8, dtype=np.float32)
    values = [
        of(numbers[:1], tl.float32),
        of(numbers.reshape(4, 2), tl.block_type(tl.float32, [4, 2])),
        of(numbers[:4].reshape(4, 1), tl.block_type(tl.float32, [4, 1])),
        of(numbers[:2], tl.block_type(tl.float32, [2])),
    ]
    for pair in itertools.product(values, values):
        found = interpreter.interpreter_semantic.broadcast_impl_value(*pair)
        expected = quick_interpreter._broadcast(interpreter.interpreter_semantic, *pair)
        for one, two in zip(found, expected, strict=True):
            assert one.type == two.type
            assert np.array_equal(one.handle.data, two.handle.data)


def test_quick_interpreter_replaces_a_language_once() -> None:
    """Nested calls find the language already patched; the outermost call restores the originals."""

    def kernel() -> Any:
        return tl.load

    packages = quick_interpreter._packages(kernel)
    assert tl in packages
    assert not quick_interpreter.is_replaced(tl)
    scope = quick_interpreter.patch_lang(kernel)
    try:
        assert all(map(quick_interpreter.is_replaced, packages))
        inner = quick_interpreter.patch_lang(kernel)
        assert not inner._changes
    finally:
        scope.restore()
    assert not quick_interpreter.is_replaced(tl)
