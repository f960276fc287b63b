"""A mask that shows or hides other places is said in places, not in sizes."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import Report
from tapscope.core.observe import RowSpan

Array = np.ndarray[Any, Any]
PROMPT, STEPS = 9, 3


def band(length: int, rows: int, window: int) -> Array:
    """[rows, length] bool: what the last rows see of the last ``window`` positions."""
    return np.tri(rows, length, length - rows, dtype=bool) & ~np.tri(rows, length, length - rows - window, dtype=bool)


def floats(dtype: Any) -> Any:
    return lambda seen: np.where(seen, 0.0, np.finfo(np.float32).min).astype(np.float32).astype(dtype)


def write(path: Path, window: int, held: Any) -> None:
    """The mask of a prompt and of some steps behind it, each wider than the one before."""
    with RunFactory(path) as run:
        for step in range(STEPS):
            rows, start = (PROMPT, 0) if not step else (1, PROMPT + step - 1)
            run.step(grid=(1, rows), rows=[RowSpan("a", start, rows, 0, 0)], token_ids=range(start, start + rows))
            given = np.ones((1, rows, 4), np.float32)
            run.put("model.layers.0:in[hidden_states]", given)
            run.put("model.layers.0:in[attention_mask]", held(band(start + rows, rows, window))[None, None])
            run.put("model.layers.0:out", given * (1.0 if window == 4 else 1.5))


def diff_masks(tmp_path: Path, window: int, one: Any, two: Any) -> Report:
    write(tmp_path / "b", 4, one)
    write(tmp_path / "t", window, two)
    return diff(tmp_path / "b", tmp_path / "t")


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (floats(np.float32), floats(np.float32)),
        (floats(np.float32), floats(ml_dtypes.bfloat16)),
        (np.asarray, np.asarray),
    ],
    ids=["fp32", "bf16", "bool"],
)
@pytest.mark.parametrize(
    ("window", "said"), [(5, "shows 1 place more in each of 7 rows"), (2, "hides 17 places more in 9 rows")]
)
def test_masks_different_window_states_its_places(tmp_path: Path, one: Any, two: Any, window: int, said: str) -> None:
    first = diff_masks(tmp_path, window, one, two).first_divergence
    assert first is not None
    assert first.site == "model.layers.0:in[attention_mask]"
    assert first.explanation is not None
    assert first.explanation.name == "mask"
    query = 4 if window == 5 else 2
    where = f"query position {query}, key position 0 ([0,0,{query},0])"
    assert said in first.explanation.sentence
    assert where in first.explanation.sentence


def test_masks_with_different_fill_values_are_equal(tmp_path: Path) -> None:
    def lower(seen: Array) -> Array:
        return np.where(seen, 0.0, -1e4).astype(np.float32)

    report = diff_masks(tmp_path, 4, floats(np.float32), lower)
    assert all(d.explanation is None or d.explanation.name != "mask" for d in report.divergences)


@pytest.mark.parametrize("others", [(), ("position_ids",)])
def test_masks_missing_in_one_run_are_reported_unless_the_call_differs(tmp_path: Path, others: tuple[str, ...]) -> None:
    for name, size in (("b", 1.0), ("t", 1.5)):
        with RunFactory(tmp_path / name) as run:
            run.step(grid=(1, PROMPT), rows=[RowSpan("a", 0, PROMPT, 0, 0)], token_ids=range(PROMPT))
            given = np.ones((1, PROMPT, 4), np.float32)
            run.put("model.layers.0:in[hidden_states]", given)
            for each in ("attention_mask", *others) if name == "b" else ():
                run.put(f"model.layers.0:in[{each}]", floats(np.float32)(band(PROMPT, PROMPT, 4))[None, None])
            run.put("model.layers.0:out", given * size)
    first = diff(tmp_path / "b", tmp_path / "t").first_divergence
    assert first is not None
    assert first.module == "model.layers.0"
    assert ("in[attention_mask] was given in the baseline only" in first.evidence) is (not others)
