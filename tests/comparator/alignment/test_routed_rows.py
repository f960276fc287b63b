"""Rows of Megatron's experts meet by the routing maps of the ranks, whatever the experts get of padding."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import Finding, Verdict
from tapscope.core.observe import RowSpan

EXPERTS, LENGTHS, LENGTH, WIDTH = 4, (6, 4), 6, 8
Array = np.ndarray[Any, Any]
HIDDEN = np.random.default_rng(1).standard_normal((LENGTH, len(LENGTHS), WIDTH)).astype(np.float32)
FLAGS = np.argsort(np.random.default_rng(2).random((LENGTH, len(LENGTHS), EXPERTS)), axis=2) < 2
"""[s, b, experts]"""
BLOCK = "decoder.layers.0.mlp"


def with_padding_at(experts: tuple[int, int]) -> Array:
    """The flags with all padding of the second sequence sent to two experts."""
    flags = FLAGS.copy()
    flags[LENGTHS[1] :, 1] = np.isin(np.arange(EXPERTS), experts)
    return flags


def write(path: Path, flags: Array, *, ep: int = 1, wrong: bool = False) -> Path:
    """A run in which each of ``ep`` ranks has one sequence, or one rank has both."""
    held = [[rank] for rank in range(ep)] if ep > 1 else [[0, 1]]
    grids = [(len(some), LENGTH) for some in held]
    rows = [tuple(RowSpan(str(i), 0, LENGTHS[i], 0, at * LENGTH) for at, i in enumerate(some)) for some in held]
    ids = [[10 * i + k for i in some for k in range(LENGTHS[i])] for some in held]
    with RunFactory(path, mesh={"ep": ep} if ep > 1 else None, framework="megatron") as run:
        apart = {r: {"grid": grids[r], "rows": rows[r], "token_ids": ids[r]} for r in range(ep)}
        run.step(grid=grids[0], rows=rows[0], token_ids=ids[0], apart=apart)
        hidden = {rank: HIDDEN[:, some] for rank, some in enumerate(held)}
        run.put(f"{BLOCK}:in[hidden_states]", hidden, dims="s b h")
        maps = {rank: flags[:, some].reshape(-1, EXPERTS) for rank, some in enumerate(held)}
        run.put(f"{BLOCK}.router:out[1]", maps, dims="(s*b) e")
        tokens = np.concatenate([each.reshape(-1, WIDTH) for each in hidden.values()])
        gathered, here = np.concatenate(list(maps.values())), EXPERTS // ep
        if ep == 1:
            run.put(f"{BLOCK}.experts:in[tokens_per_expert]", gathered.sum(0))
        for expert in range(EXPERTS):
            rank, local = divmod(expert, here)
            values = tokens[gathered[:, expert]] * (1 + expert)
            if wrong and expert == 2:
                values[np.flatnonzero(gathered[gathered[:, expert]][:, expert])[0]] *= 1.5
            run.put(f"{BLOCK}.experts.local_experts.{local}:out[0]", {rank: values})
            run.put(f"{BLOCK}.experts.local_experts.{local}:in[per_token_scale]", {rank: values[:, 0]})
    return path


def of_experts(findings: tuple[Finding, ...]) -> list[Finding]:
    return [one for one in findings if ".local_experts." in one.site]


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 2)])
def test_routed_rows_of_tokens_are_compared_without_padding(tmp_path: Path, sizes: tuple[int, int]) -> None:
    left = write(tmp_path / "left", with_padding_at((0, 1)), ep=sizes[0])
    report = diff(left, write(tmp_path / "right", with_padding_at((2, 3)), ep=sizes[1]))
    assert report.exit_code == 0, str(report)
    found = of_experts(report.findings)
    assert {one.verdict for one in found} == {Verdict.SAME}
    assert len(found) == 2 * EXPERTS
    tokens = FLAGS[:, 0].sum() + FLAGS[: LENGTHS[1], 1].sum()
    assert sum(one.rows.num_compared for one in found) == 2 * tokens


def test_routed_row_that_differs_is_named_with_its_token(tmp_path: Path) -> None:
    left = write(tmp_path / "left", with_padding_at((0, 1)), ep=2)
    report = diff(left, write(tmp_path / "right", with_padding_at((0, 3)), ep=2, wrong=True))
    (wrong,) = [one for one in of_experts(report.findings) if one.verdict.is_bad and one.site.endswith("out[0]")]
    assert wrong.site == f"{BLOCK}.experts.local_experts.2:out[0]"
    assert wrong.worst is not None
    assert FLAGS[wrong.worst.position or 0, int(wrong.worst.request or 0), 2]


def test_numbers_of_rows_that_do_not_follow_from_the_map_are_compared(tmp_path: Path) -> None:
    def counted(path: Path, number: int) -> Path:
        with RunFactory(path) as run:
            run.step(grid=(1, LENGTH), rows=[RowSpan("0", 0, LENGTH, 0, 0)], token_ids=range(LENGTH))
            run.put(f"{BLOCK}.router:out[1]", FLAGS[:, 0], dims="(s*b) e")
            counts = FLAGS[:, 0].sum(0)
            counts[0] += number
            run.put(f"{BLOCK}.experts:in[tokens_per_expert]", counts)
        return path

    assert diff(counted(tmp_path / "right", 0), counted(tmp_path / "wrong", 1)).exit_code == 1
