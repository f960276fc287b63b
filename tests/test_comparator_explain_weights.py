"""Weights that differ are told by what they leave in the outputs: of one expert, of columns of the input."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import RunFactory

from tapscope.comparator import compare
from tapscope.comparator.explain.experts import columns_apart, common
from tapscope.observe import RowRun
from tapscope.run import open_run

Array = np.ndarray[Any, Any]
LENGTHS = {"a": 14, "b": 9, "c": 17}
ROWS, WIDTH, HIDDEN, EXPERTS, TOP = sum(LENGTHS.values()), 24, 40, 6, 2
RNG = np.random.default_rng(7)
GIVEN = RNG.standard_normal((ROWS, WIDTH))
CHOSEN = np.argsort(RNG.standard_normal((ROWS, EXPERTS)), axis=1)[:, :TOP]
SHARES = RNG.dirichlet(np.ones(TOP), ROWS)
UP = RNG.standard_normal((EXPERTS, HIDDEN, WIDTH)) / 5
DOWN = RNG.standard_normal((EXPERTS, WIDTH, HIDDEN)) / 5


def experts(up: Array = UP, down: Array = DOWN) -> Array:
    """What a mixture of experts makes of every row."""
    each = np.stack([np.tanh(GIVEN @ up[e].T) @ down[e].T for e in range(EXPERTS)], axis=1)
    return (np.take_along_axis(each, CHOSEN[:, :, None], axis=1) * SHARES[:, :, None]).sum(axis=1)


def stated(path: Path, module: str, sides: tuple[dict[str, Array], dict[str, Array]]) -> str:
    """The cause that is stated of two runs of one module, whose sites are by port."""
    for name, ports in zip(("b", "t"), sides, strict=True):
        with RunFactory(path / name) as run:
            rows, slot = [], 0
            for request, count in LENGTHS.items():
                rows.append(RowRun(request, 0, count, 0, slot))
                slot += count
            run.step(grid=(slot,), rows=rows, token_ids=range(slot))
            for port, values in ports.items():
                run.put(f"{module}:{port}", values, dims="t h")
    with open_run(path / "b") as one, open_run(path / "t") as two:
        first = compare(one, two).first_divergence
    assert first is not None
    assert first.module == module
    return "" if first.explanation is None else first.explanation.text


def of_experts(path: Path, after: Array) -> str:
    sides = [
        {"in[hidden_states]": GIVEN.astype(np.float32), "in[top_k_index]": CHOSEN, "out": out.astype(np.float32)}
        for out in (experts(), after)
    ]
    return stated(path, "layers.1.mlp.experts", (sides[0], sides[1]))


def changed(weights: Array, expert: int, rows: slice) -> Array:
    found = weights.copy()
    found[expert, rows] = found[expert, rows][::-1] + 0.1
    return found


def test_the_one_expert_whose_rows_are_off_is_named(tmp_path: Path) -> None:
    said = of_experts(tmp_path, experts(up=changed(UP, 3, slice(8, 12))))
    count = int((CHOSEN == 3).any(axis=1).sum())
    assert (
        said
        == f"the weights of expert 3 differ, or what it computes: all {count} rows that chose it are off, and no other"
    )


def test_single_columns_of_one_expert_are_rows_of_its_down_projection(tmp_path: Path) -> None:
    said = of_experts(tmp_path, experts(down=changed(DOWN, 1, slice(4, 7))))
    assert said.startswith("the down projection of expert 1 differs in its rows 4–6: all ")


def test_two_experts_and_other_rows_are_no_expert(tmp_path: Path) -> None:
    both = changed(changed(UP, 3, slice(8, 12)), 4, slice(0, 8))
    assert of_experts(tmp_path / "two", experts(up=both)) == ""
    after = experts()
    after[RNG.permutation(ROWS)[:9]] += RNG.standard_normal((9, WIDTH))
    assert "expert" not in of_experts(tmp_path / "rows", after)


def test_an_expert_that_nearly_all_rows_chose_is_not_named() -> None:
    error = np.full(20, 1e-6)
    error[:6] = 0.5
    chosen = np.where(np.arange(20) < 18, 1, 2)[:, None]
    assert common(chosen, error, None) is None
    chosen = np.stack([chosen[:, 0], np.where(np.arange(20) < 6, 3, 4)], axis=1)
    assert common(chosen, error, None) == 3


def test_equal_rows_count_once() -> None:
    error, chosen = np.where(np.arange(20) < 5, 0.5, 1e-6), np.where(np.arange(20) < 5, 0, 1)[:, None]
    given = RNG.standard_normal((20, 8))
    assert common(chosen, error, given) == 0
    given[:5] = given[0] * (1 + 1e-5 * np.arange(5)[:, None])  # one prefix that all requests share
    assert common(chosen, error, given) is None


@pytest.mark.parametrize(("level", "expected"), [(1e-6, [2, 5]), (0.3, None)])
def test_columns_are_apart_where_the_rest_is_as_in_other_rows(level: float, expected: list[int] | None) -> None:
    error, others = level * RNG.standard_normal((9, 12)), 1e-6 * RNG.standard_normal((11, 12))
    error[:, [2, 5]] = 0.5
    found = columns_apart(error, others)
    assert (None if found is None else found.tolist()) == expected
