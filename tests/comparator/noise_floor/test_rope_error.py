"""Rotary tables: an angle is rounded relative to its size, so late positions have larger errors."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import Report
from tapscope.core.observe import RowSpan

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
LENGTH = 1500
FREQUENCIES = (10000.0 ** -(np.arange(0, 32, 2) / 32)).astype(np.float32)


def single(frequencies: Array) -> Array:
    """Return angles [positions, frequencies], computed as in transformers."""
    return np.arange(LENGTH, dtype=np.float32)[:, None] * frequencies


def double(frequencies: Array) -> Array:
    return np.arange(LENGTH, dtype=np.float64)[:, None] * frequencies.astype(np.float64)


def an_ulp_off(frequencies: Array) -> Array:
    """Return angles for frequencies that differ by one ulp, as from another library's power function."""
    return single(np.nextafter(frequencies, np.float32(2.0)))


def diff_tables(tmp_path: Path, angles: Callable[[Array], Array], frequencies: Array) -> Report:
    for name, table in (("b", single(FREQUENCIES)), ("t", angles(frequencies))):
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(LENGTH,), rows=[RowSpan("a", 0, LENGTH, 0, 0)], token_ids=range(LENGTH))
            for port, turn in (("out[0]", np.cos), ("out[1]", np.sin)):
                run.site(f"rotary_emb:{port}", cls="LlamaRotaryEmbedding")
                run.put(f"rotary_emb:{port}", turn(np.concatenate((table, table), 1)).astype(np.float32))
    return diff(tmp_path / "b", tmp_path / "t")


@pytest.mark.parametrize("angles", [double, an_ulp_off])
def test_rope_error_angle_rounding_of_late_positions_is_close(tmp_path: Path, angles: Callable[[Array], Array]) -> None:
    assert diff_tables(tmp_path, angles, FREQUENCIES).exit_code == 0


@pytest.mark.parametrize("factor", [1.001, 0.999])
def test_rope_error_wrong_frequencies_are_named(tmp_path: Path, factor: float) -> None:
    first = diff_tables(tmp_path, single, FREQUENCIES * np.float32(factor)).first_divergence
    assert first is not None
    assert first.module == "rotary_emb"
