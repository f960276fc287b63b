"""Token grid inference: derive the token grids of steps without a row table from the recorded arguments of the
model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tapscope.comparator.runs.grids import TokenGrids, draft_steps_of, group_ranks
from tapscope.core import formatting
from tapscope.core.errors import DataError
from tapscope.core.observe import StepInfo
from tapscope.run_format.record import FORWARD, Record
from tapscope.run_format.run import Run

if TYPE_CHECKING:
    from tapscope.core.token_rows import Arguments

Array = np.ndarray[Any, Any]
_NAMES = {
    "input_ids": "ids",
    "positions": "positions",
    "position_ids": "positions",
    "seq_lens": "lengths",
    "cu_seqlens_q": "bounds",
    "cu_seqlens_q_padded": "padded",
    "cu_seqlens": "bounds",
    "rids": "names",
    "req_pool_indices": "slots",
    "attention_mask": "mask",
}
"""Argument name of the model in SGLang, vLLM, Megatron-core or Hugging Face -> meaning."""

_Call = dict[str, Record]
"""Meaning -> record, for one call on one rank."""


def inferred_grids(run: Run, recorded_steps: frozenset[int], steps: frozenset[int] | None) -> TokenGrids:
    """Return inferred grids of the steps that are not in ``recorded_steps``, the steps with a row table.

    A recorded step is inferred again if the token ids of several microbatches were recorded: its row table covers only
    the first model call of the step. Exempt are steps of a draft model, in which the microbatch is the number of the
    draft.
    """
    near = np.flatnonzero(run.records.of_sites(lambda site: site.startswith((":in[", ":tap[")))).tolist()
    meanings = ((_meaning(record), record) for record in map(run.records.__getitem__, near))
    arguments = [(what, r) for what, r in meanings if what and (steps is None or r.key.step in steps)]
    several = {record.key.step for what, record in arguments if what == "ids" and record.key.micro} - draft_steps_of(
        run
    )
    calls: dict[int, dict[tuple[int, int], _Call]] = {}
    for what, record in arguments:
        key = record.key
        if key.step not in recorded_steps or key.step in several:
            calls.setdefault(key.rank, {}).setdefault((key.step, key.micro), {}).setdefault(what, record)
    return _grids(run, calls)


def repeated_call_notes(run: Run, recorded_steps: frozenset[int]) -> list[str]:
    """Return a sentence on steps with a row table in which the model was called several times within one microbatch."""
    records = run.records
    later = records.which(lambda kind: kind.occurrence and kind.pass_ == FORWARD).tolist()
    again = sorted({int(records.step[at]) for at in later if records.site_at(at).startswith(":in[")} & recorded_steps)
    if not again:
        return []
    steps = formatting.plural(len(again), "step")
    return [
        f"{run.name} calls its model several times in {steps}, e.g. {again[0]}, and records the rows of the first "
        "call: the other calls are assumed to have the same rows; wrap each in dumper.micro(i)"
    ]


def _meaning(record: Record) -> str | None:
    """Return the meaning of a record for the rows; None unless it is an argument of the model's first forward call."""
    site, key = record.key.site, record.key
    return None if key.pass_ != FORWARD or key.occurrence else meaning_of(site)


def meaning_of(site: str) -> str | None:
    """Return the meaning of a model argument for the rows, see ``_NAMES``; None for any other site."""
    name = site.partition("[")[2].removesuffix("]").removeprefix("packed_seq_params.")
    return _NAMES.get(name) if site.startswith((":in[", ":tap[")) else None


def _grids(run: Run, calls: Mapping[int, Mapping[tuple[int, int], _Call]]) -> TokenGrids:
    if not calls:
        return TokenGrids(())
    from tapscope.core.token_rows import RowReader  # lazy import (3 ms): most hosts record their rows

    infos: dict[tuple[int, int], dict[int, Any]] = {}
    num_ambiguous = num_assumed = 0
    for rank, by_place in calls.items():
        reader = RowReader()
        for (step, micro), call in sorted(by_place.items()):
            shard = run.coords(rank).get("cp", 0), run.mesh.get("cp", 1)
            given = _arguments(run, call)
            if given is not None and run.manifest.get("framework") == "megatron" and _has_no_places(given, shard):
                given = replace(given, positions=_zigzag_positions(given.ids.shape[1], shard))
                num_assumed += 1
            line = run.steps.get(step, {}).get(rank)
            info = reader.read(step, line.info.phase if line else "forward", given, shard) if given else None
            if given is not None and _is_idle(given):
                info = StepInfo(step=step, phase="idle", grid=given.ids.shape)
            if info is not None and (info.rows or info.phase == "idle"):
                infos.setdefault((step, micro), {})[rank] = info
        num_ambiguous = max(num_ambiguous, reader.num_ambiguous)
    several = {step for step, micro in infos if micro}
    grids = [
        grid
        for (step, micro), by_rank in sorted(infos.items())
        for grid in group_ranks(run, step, micro if step in several else None, by_rank)
    ]
    notes = [f"rows of {run.name} are inferred from the recorded arguments of its model"] if grids else []
    if grids and num_assumed:
        notes.append(
            f"{run.name} has no positions: each rank of cp is assumed to hold two chunks of a sequence, as in Megatron"
        )
    doubts = []
    if num_ambiguous:
        rows = formatting.plural(num_ambiguous, "row")
        doubts.append(f"{rows} of {run.name} may belong to several requests, none of them named: record rids as well")
    return TokenGrids(tuple(grids), tuple(notes), tuple(doubts))


def _arguments(run: Run, call: _Call) -> "Arguments | None":
    """Return the values of one call; None if its token ids are not on disk."""
    from tapscope.core.token_rows import Arguments

    values = {what: value for what, record in call.items() if (value := _value(run, record)) is not None}
    if not isinstance(values.get("ids"), np.ndarray):
        return None
    lengths, real = values.get("lengths"), None
    if lengths is None and isinstance(values.get("bounds"), np.ndarray):
        lengths = np.diff(values["bounds"].reshape(-1))
        if isinstance(values.get("padded"), np.ndarray) and values["padded"].size == lengths.size + 1:
            lengths, real = np.diff(values["padded"].reshape(-1)), lengths
    names = values.get("names")
    if names is None and isinstance(values.get("slots"), np.ndarray):
        names = values["slots"].reshape(-1).tolist()
    return Arguments(
        ids=values["ids"],
        positions=_array(values.get("positions")),
        lengths=_array(lengths),
        real_lengths=real,
        names=tuple(map(str, names)) if isinstance(names, Sequence) else (),
        mask=_array(values.get("mask")),
    )


def _is_idle(given: "Arguments") -> bool:
    """Return whether a data-parallel rank has no request in this step and only takes part in collectives of the
    others."""
    return given.ids.ndim == 1 and (not given.ids.size or (given.lengths is not None and not given.lengths.size))


def _has_no_places(given: "Arguments", shard: tuple[int, int]) -> bool:
    """Return whether no argument tells which part of its padded sequences a context-parallel rank holds."""
    is_cut = shard[1] > 1 and given.ids.ndim == 2 and given.ids.shape[1] % 2 == 0
    return is_cut and given.positions is None and given.lengths is None


def _zigzag_positions(count: int, shard: tuple[int, int]) -> Array:
    """Return the positions [count] of a rank's two chunks of a sequence: one from the start, one from the end."""
    place, size = shard
    chunk = np.arange(count // 2)
    return np.concatenate([place * len(chunk) + chunk, (2 * size - 1 - place) * len(chunk) + chunk])


def _array(value: Any) -> Array | None:
    return value if isinstance(value, np.ndarray) else None


def _value(run: Run, record: Record) -> Any:
    """Return the array or plain value of a record; None if it was not stored."""
    if record.dtype is None:
        return record.value.get("value") if isinstance(record.value, dict) else None
    try:
        return None if record.entry is None else np.asarray(run.array(record))
    except DataError:
        return None
