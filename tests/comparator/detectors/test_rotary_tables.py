"""Rotary tables: a wrong frequency of a single pair of columns, which the floor of a whole row hides."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import Report
from tapscope.core.observe import RowSpan

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
LENGTH, PAIRS = 40, 16
FREQUENCIES = 10000.0 ** -(np.arange(PAIRS) / PAIRS)
SLOW, FAST = 10, 3


def scaled(pair: int, factor: float) -> Array:
    """Return the frequencies with that of one pair multiplied."""
    found = FREQUENCIES.copy()
    found[pair] *= factor
    return found


def write(folder: Path, values: tuple[Array, Array], dtype: type) -> Path:
    with RunFactory(folder) as run:
        run.step(grid=(LENGTH,), rows=[RowSpan("a", 0, LENGTH, 0, 0)], token_ids=range(LENGTH))
        for port, value in zip(("out[0]", "out[1]"), values, strict=True):
            run.site(f"rotary_emb:{port}", cls="LlamaRotaryEmbedding")
            run.put(f"rotary_emb:{port}", value.astype(np.float32).astype(dtype))
    return folder


def tables(frequencies: Array, scale: float = 1.0) -> tuple[Array, Array]:
    angle = np.tile(np.arange(LENGTH)[:, None] * frequencies, 2)
    return scale * np.cos(angle), scale * np.sin(angle)


def diff_tables(tmp_path: Path, frequencies: Array, disabled: frozenset[str] = frozenset()) -> Report:
    """Compare float32 tables with bfloat16 ones."""
    baseline = write(tmp_path / "b", tables(FREQUENCIES), np.float32)
    return diff(baseline, write(tmp_path / "t", tables(frequencies), ml_dtypes.bfloat16), disabled=disabled)


@pytest.mark.parametrize(("pair", "factor"), [(SLOW, 0.5), (SLOW, 1.02), (FAST, 1.01)])
def test_rotary_tables_frequency_of_one_pair_is_named(tmp_path: Path, pair: int, factor: float) -> None:
    report = diff_tables(tmp_path / "on", scaled(pair, factor))
    assert report.first_divergence is not None
    finding = report.first_divergence.finding
    assert (finding.test, report.first_divergence.module) == ("rotary_table", "rotary_emb")
    assert finding.notes[0].startswith(f"an element of column {pair} ")
    without = diff_tables(tmp_path / "off", scaled(pair, factor), frozenset({"rotary_tables"}))
    assert without.exit_code == 0, "the floor alone finds it: this example does not test the detector"


def test_rotary_tables_of_one_dtype_show_smaller_changes(tmp_path: Path) -> None:
    baseline = write(tmp_path / "b", tables(FREQUENCIES), ml_dtypes.bfloat16)
    target = write(tmp_path / "t", tables(scaled(FAST, 1.0026)), ml_dtypes.bfloat16)
    assert diff(baseline, target).exit_code == 1
    assert diff(baseline, target, disabled=frozenset({"rotary_tables"})).exit_code == 0


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_rotary_tables_frequencies_rounded_with_the_model_are_close(tmp_path: Path, dtype: type) -> None:
    """`model.to(dtype)` also rounds the frequencies."""
    rounded = FREQUENCIES.astype(np.float32).astype(dtype).astype(np.float64)
    baseline = write(tmp_path / "b", tables(FREQUENCIES), np.float32)
    assert diff(baseline, write(tmp_path / "t", tables(rounded), dtype)).exit_code == 0


@pytest.mark.parametrize("scale", [1.0, 1.2])
def test_rotary_tables_rounding_is_close(tmp_path: Path, scale: float) -> None:
    """Tables are cast to bfloat16, with frequencies that differ by one float32 ulp; YaRN scales both tables."""
    other = np.nextafter(FREQUENCIES.astype(np.float32), np.float32(2.0)).astype(np.float64)
    baseline = write(tmp_path / "b", tables(FREQUENCIES, scale), np.float32)
    assert diff(baseline, write(tmp_path / "t", tables(other, scale), ml_dtypes.bfloat16)).exit_code == 0


def test_rotary_tables_other_outputs_have_their_floor(tmp_path: Path) -> None:
    """Rotated queries and keys carry errors of their inputs."""
    draw = np.random.default_rng(0)
    queries, keys = draw.standard_normal((2, LENGTH, 2 * PAIRS))
    error = 1.0 + 0.003 * draw.standard_normal((2, LENGTH, 2 * PAIRS))
    baseline = write(tmp_path / "b", (queries, keys), np.float32)
    target = write(tmp_path / "t", (queries * error[0], keys * error[1]), ml_dtypes.bfloat16)
    assert diff(baseline, target).exit_code == 0
