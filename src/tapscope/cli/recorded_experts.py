"""`tapscope dump --experts-from RUN`: read the recorded expert ids of a run, by request and position."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tapscope.core.errors import DataError
from tapscope.core.site import layer_of
from tapscope.sources import open_run

if TYPE_CHECKING:
    from tapscope.engine.requests.per_token_outputs import RoutedExperts
    from tapscope.run_format.record import Record
    from tapscope.run_format.run import Run

_CHOICES = re.compile(r"\.(experts:in\[top_k_index\]|(gate|router):out\[2\])$")
"""Sites with expert ids [tokens, k], in transformers and in the engine."""


def read_experts(path: Path, num_layers: int, top_k: int) -> "dict[str, RoutedExperts]":
    """Return request -> expert ids [positions, layers, k]; -1 marks positions without a record.

    If a position was computed several times, the latest visit counts. Raises DataError if the run has no expert ids or
    was recorded with another model.
    """
    from tapscope.engine.requests.per_token_outputs import RoutedExperts

    with open_run(path) as run:
        lengths = {request: max(known) + 1 for request, known in run.tokens().items() if known}
        ids_of = {name: np.full((count, num_layers, top_k), -1, dtype=np.int32) for name, count in lengths.items()}
        records = _id_records(run)
        for record in records:
            layer = layer_of(record.key.site)
            ids = run.array(record)
            ids = ids.reshape(-1, ids.shape[-1])
            if layer is None or layer >= num_layers or ids.shape[1] != top_k:
                raise DataError(
                    f"{path}: {record.key.site} has {ids.shape[1]} experts of layer {layer}; the model has {top_k} "
                    f"in each of {num_layers} layers"
                )
            for span, _ in run.steps[record.key.step][record.key.rank].own_rows():
                positions = slice(span.position, span.position + span.count)
                ids_of[span.request][positions, layer] = ids[span.slot : span.slot + span.count]
    if not records:
        raise DataError(f"{path} has no expert ids; record '*experts:in[top_k_index]' or '*gate:out[2]' in full")
    return {name: RoutedExperts.from_rows(rows) for name, rows in ids_of.items()}


def _id_records(run: "Run") -> "list[Record]":
    """Return one record with values per step and layer, ordered by step; any rank will do, as routers are equal on all
    ranks."""
    chosen: dict[tuple[int, int, int | None], Record] = {}
    for record in run.records:
        is_whole = record.entry is not None and record.rows is None and record.slice is None
        if is_whole and _CHOICES.search(record.key.site) and (record.dtype or "").startswith("int"):
            chosen.setdefault((record.key.step, record.key.micro, layer_of(record.key.site)), record)
    return [chosen[key] for key in sorted(chosen, key=lambda key: key[:2])]
