"""The interpreter that tests use does what Triton's own does."""

import inspect
from typing import Any

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
