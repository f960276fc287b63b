"""Record numbers, with and without the C++ library."""

from typing import Any

import pytest

from tapscope.dumper.capture.record_queue import Numbers
from tapscope.kernels.native import library

FUNCTIONS = library.functions()
KINDS: list[Any] = [Numbers] if FUNCTIONS is None else [Numbers, FUNCTIONS.numbers]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_taken_one_by_one_and_many_in_a_row(kind: Any) -> None:
    numbers = kind()
    assert iter(numbers) is numbers
    assert [next(numbers), next(numbers), numbers.take(512), next(numbers), numbers.take(0), next(numbers)] == [
        0,
        1,
        2,
        514,
        515,
        515,
    ]
    with pytest.raises(TypeError):
        numbers.take("many")
