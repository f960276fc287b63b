"""What is measured of a pair of sites, through real runs."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from factories import RunFactory

from tapscope.comparator import CompareOptions, Finding, Report, Verdict, compare
from tapscope.observe import RowRun
from tapscope.run import open_run

ROWS = 6


def write(path: Path, values: dict[str, Any], keep: str = "full", mesh: dict[str, int] | None = None) -> Path:
    """A run of one step; a site is an array, or (dims, one array a rank)."""
    with RunFactory(path, mesh=mesh) as run:
        run.step(grid=(ROWS,), rows=[RowRun("chat", 0, ROWS, 0, 0)], token_ids=range(ROWS))
        for site, value in values.items():
            dims, arrays = value if isinstance(value, tuple) else ("t h", {0: value})
            run.put(site, arrays, dims=dims, keep=keep)
    return path


def report(baseline: Path, target: Path, **options: Any) -> Report:
    with open_run(baseline) as one, open_run(target) as two:
        return compare(one, two, CompareOptions(**options))


def finding(tmp_path: Path, baseline: Any, target: Any, keep: str = "full", **options: Any) -> Finding:
    """The finding on one site."""
    one = write(tmp_path / "base", {"a:out": baseline}, keep)
    two = write(tmp_path / "target", {"a:out": target}, keep)
    return report(one, two, **options).findings[0]


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_rel_is_that_of_sglang(tmp_path: Path) -> None:
    a, b = normal(ROWS, 32), normal(ROWS, 32) * np.float32(1.25)
    numbers = finding(tmp_path, a, b).numbers
    assert numbers is not None
    x, y = a.astype(np.float64), b.astype(np.float64)
    assert numbers.rel == pytest.approx(1 - 2 * (x * y).sum() / (x * x + y * y).sum(), rel=1e-6)
    assert numbers.rel == pytest.approx(0.25**2 / (1 + 1.25**2), rel=1e-6)


# ---- digests


@pytest.mark.parametrize("keep", ["full", "stats"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int64])
def test_the_same_elements_in_another_order_are_permuted_and_never_pass(tmp_path: Path, keep: str, dtype: Any) -> None:
    value = (normal(ROWS, 8) * 100).astype(dtype)
    swapped = value.copy()
    swapped[[1, 4]] = value[[4, 1]]
    found = finding(tmp_path, value, swapped, keep)
    assert found.verdict is Verdict.DIFFERS
    assert found.notes[0] == "permuted: the same elements in another order"


def test_a_permutation_within_the_floor_is_no_rounding(tmp_path: Path) -> None:
    value = normal(ROWS, 64)
    value[2, 10] = value[2, 11] * np.float32(1 + 2**-20)
    swapped = value.copy()
    swapped[2, [10, 11]] = value[2, [11, 10]]
    found = finding(tmp_path, value, swapped)
    assert (found.verdict, found.test) == (Verdict.DIFFERS, "permuted")


def test_bags_add_up_over_shards(tmp_path: Path) -> None:
    value = normal(ROWS, 8)
    turned = value[:, ::-1]
    one = write(tmp_path / "base", {"a:out": value})
    shards = {0: turned[:, :4], 1: turned[:, 4:]}
    two = write(tmp_path / "target", {"a:out": ("t h[tp]", shards)}, mesh={"tp": 2})
    found = report(one, two).findings[0]
    assert found.verdict is Verdict.DIFFERS
    assert found.notes[0].startswith("permuted")


def test_rounding_is_not_called_a_permutation(tmp_path: Path) -> None:
    value = normal(ROWS, 64)
    found = finding(tmp_path, value, value * np.float32(1 + 2**-23))
    assert found.verdict is Verdict.CLOSE
    assert not any("permuted" in note for note in found.notes)


def test_integers_of_which_only_unequal_hashes_are_known_do_not_pass(tmp_path: Path) -> None:
    value = np.arange(ROWS)[:, None] * np.ones(4, np.int64)
    moved = value.copy()
    moved[0, :2] += (1, 0)
    moved[1, :2] -= (1, 0)
    moved[2, 2], moved[2, 3] = moved[2, 2] + 3, moved[2, 3] - 3
    assert moved.sum() == value.sum()
    assert finding(tmp_path, value, moved, "stats").verdict is Verdict.DIFFERS


def test_equal_statistics_with_unequal_hashes_are_close_and_said(tmp_path: Path) -> None:
    value = normal(ROWS, 8)
    moved = value.copy()
    moved[0, 0], moved[0, 1] = np.nextafter(value[0, 0], np.float32(9)), value[0, 1]
    found = finding(tmp_path, value, moved, "stats")
    assert found.verdict is Verdict.CLOSE
    assert finding(tmp_path / "same", value, value, "stats").verdict is Verdict.SAME


# ---- threads


def test_the_report_does_not_depend_on_the_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [8, 70_000, 16, 90_000, 80_000, 8]
    values = {f"layers.{i}:out": normal(ROWS, size, seed=i) for i, size in enumerate(sizes)}
    spoiled = {site: value * np.float32(1.5 if "3" in site else 1 + 2**-22) for site, value in values.items()}
    spoiled["layers.4:out"] = spoiled["layers.4:out"][:, :-1]
    one, two = write(tmp_path / "base", values), write(tmp_path / "target", spoiled)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, n=threads: set(range(n)), raising=False)
        found.append(list(report(one, two).to_json()))
    assert found[0] == found[1]
    assert sum(line.get("verdict") == "differs" for line in found[0]) == 1
