"""Rows of a step that the shapes of forward's arguments determine."""

import pytest
import torch

from tapscope.core.observe import StepInfo
from tapscope.dumper.steps.input_rows import InputRows, host_values, rows_from_shapes, rows_from_values


@pytest.mark.parametrize("shape", [(1, 5), (3, 1), (2, 4), (2, 0)])
@pytest.mark.parametrize(("past", "phase"), [(0, "forward"), (7, "forward"), (7, "train")])
def test_rows_from_shapes_are_those_of_values_without_padding(shape: tuple[int, int], past: int, phase: str) -> None:
    call = InputRows(shape, {"ids": torch.zeros(shape, dtype=torch.int64)}, past, min(2, shape[1]))
    info = StepInfo(step=3, phase=phase, kind="dummy", epoch=2, row_sets={"own": (0,)})
    outline = rows_from_shapes(info, call)
    found = rows_from_values(outline, host_values(call.tensors), call=call)
    for name in ("step", "phase", "grid", "rows", "row_sets", "kind", "epoch"):
        assert getattr(outline, name) == getattr(found, name), name
    assert (outline.token_ids, len(found.token_ids)) == ((), shape[0] * shape[1])
    assert outline.phase == ("train" if phase == "train" else outline.phase)
    assert sum(row.count for row in outline.rows) == shape[0] * shape[1]
