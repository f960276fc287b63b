"""Tables of a rotary embedding: an angle is rounded relative to itself, so late positions are off by more."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from factories import RunFactory

from tapscope.comparator import Report, compare
from tapscope.core.observe import RowSpan
from tapscope.sources import open_run

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
LENGTH = 1500
FREQUENCIES = (10000.0 ** -(np.arange(0, 32, 2) / 32)).astype(np.float32)


def single(frequencies: Array) -> Array:
    """[positions, frequencies] as transformers works angles out."""
    return np.arange(LENGTH, dtype=np.float32)[:, None] * frequencies


def double(frequencies: Array) -> Array:
    return np.arange(LENGTH, dtype=np.float64)[:, None] * frequencies.astype(np.float64)


def an_ulp_off(frequencies: Array) -> Array:
    """Another library's power function."""
    return single(np.nextafter(frequencies, np.float32(2.0)))


def diff(tmp_path: Path, angles: Callable[[Array], Array], frequencies: Array) -> Report:
    for name, table in (("b", single(FREQUENCIES)), ("t", angles(frequencies))):
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(LENGTH,), rows=[RowSpan("a", 0, LENGTH, 0, 0)], token_ids=range(LENGTH))
            for port, turn in (("out[0]", np.cos), ("out[1]", np.sin)):
                run.site(f"rotary_emb:{port}", cls="LlamaRotaryEmbedding")
                run.put(f"rotary_emb:{port}", turn(np.concatenate((table, table), 1)).astype(np.float32))
    with open_run(tmp_path / "b") as one, open_run(tmp_path / "t") as two:
        return compare(one, two)


@pytest.mark.parametrize("angles", [double, an_ulp_off])
def test_what_the_rounding_of_an_angle_does_to_late_positions_is_no_fault(
    tmp_path: Path, angles: Callable[[Array], Array]
) -> None:
    assert diff(tmp_path, angles, FREQUENCIES).exit_code == 0


@pytest.mark.parametrize("factor", [1.001, 0.999])
def test_frequencies_that_are_off_by_a_thousandth_are_one(tmp_path: Path, factor: float) -> None:
    first = diff(tmp_path, single, FREQUENCIES * np.float32(factor)).first_divergence
    assert first is not None
    assert first.module == "rotary_emb"
