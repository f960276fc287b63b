"""A small sample of tests/faults/fuzz_files.py, whose rest is run by `make soak`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_files import KINDS, Fuzz
from memory_limit import Limited


@pytest.fixture(scope="module")
def limited() -> Iterator[Limited]:
    with Limited() as runner:
        yield runner


@pytest.mark.parametrize("kind", KINDS)
def test_readers_answer_damage_in_bounded_time_and_memory(tmp_path: Path, kind: str, limited: Limited) -> None:
    fuzz = Fuzz(tmp_path, limited)
    fuzz.attempt(0, kind)
    assert not fuzz.count.bad, "\n".join(fuzz.count.bad)
