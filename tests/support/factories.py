"""Runs created without a model: the real writer, with values chosen by the test."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from tapscope.core.json_values import plain_value
from tapscope.core.observe import RowSpan, StepInfo
from tapscope.kernels.native import summarize_array
from tapscope.run_format import ledger, record
from tapscope.run_format.directory import create_run
from tapscope.run_format.record import Key, Record
from tapscope.run_format.segment import SEGMENT_BYTES
from tapscope.run_format.writer import RankWriter


class RunFactory:
    """Writes a run step by step::

    with RunFactory(tmp_path / "base", mesh={"tp": 2}) as run:
        run.step(rows=[RowSpan("0", 0, 5, 0, 0)], token_ids=range(5), grid=(5,))
        run.put("layers.0.mlp:out", {0: left, 1: right}, dims="t h[tp]")     # a dict gives one array a rank
        run.put("norm:out", whole)                                            # an array goes to rank 0
    """

    def __init__(
        self,
        path: Path,
        *,
        mesh: Mapping[str, int] | None = None,
        never_fired: Sequence[str] = (),
        segment_bytes: int = SEGMENT_BYTES,
        **manifest: Any,
    ) -> None:
        self.never_fired = list(never_fired)
        self.path = path
        self.mesh = dict(mesh or {})
        world = int(np.prod(list(self.mesh.values()))) if self.mesh else 1
        create_run(path, {"world_size": world, "mesh": self.mesh, "framework": "torch", "model": "toy", **manifest})
        self.writers = {rank: RankWriter(path, rank, segment_bytes=segment_bytes) for rank in range(world)}
        self._seq = dict.fromkeys(self.writers, 0)
        self._fired: dict[tuple[int, str, int, int], int] = {}
        self._counts: dict[int, ledger.StepCounts] = {}
        self._info: StepInfo | None = None
        for rank, writer in self.writers.items():
            coords = dict(zip(self.mesh, np.unravel_index(rank, tuple(self.mesh.values())), strict=True))
            coords = {axis: int(at) for axis, at in coords.items()}
            writer.event("open", rank=rank, world_size=world, mesh=self.mesh, coords=coords)

    def __enter__(self) -> "RunFactory":
        return self

    def __exit__(self, *exc: object) -> None:
        self.end_step()
        for writer in self.writers.values():
            writer.event("close", never_fired=self.never_fired)
            writer.close()

    def step(
        self,
        *,
        phase: str = "prefill",
        grid: Sequence[int] = (),
        rows: Sequence[RowSpan] = (),
        token_ids: Sequence[int] = (),
        row_sets: Mapping[str, Sequence[int]] | None = None,
        apart: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open the next step (and close the previous one); ``apart`` overrides fields of single ranks."""
        number = self._info.step + 1 if self._info else 0
        self.end_step()
        self._info = StepInfo(
            step=number,
            phase=phase,
            grid=tuple(grid),
            rows=tuple(rows),
            token_ids=tuple(token_ids),
            row_sets=row_sets or {},
        )
        self._counts = {rank: ledger.StepCounts() for rank in self.writers}
        for rank, writer in self.writers.items():
            writer.line(ledger.begin_line(replace(self._info, **(apart or {}).get(rank, {})), 0))

    def end_step(self) -> None:
        """Close the open step, if any."""
        for rank, counts in self._counts.items():
            assert self._info is not None
            self.writers[rank].line(ledger.end_line(self._info.step, counts))
        self._counts = {}

    def site(self, site: str, cls: str = "Linear", params: Mapping[str, Sequence[int]] | None = None) -> None:
        """Write the site's line on every rank."""
        for writer in self.writers.values():
            writer.line(
                {"type": "site", "site": site, "class": cls, "params": {k: list(v) for k, v in (params or {}).items()}}
            )

    def put(
        self,
        site: str,
        values: np.ndarray[Any, Any] | Mapping[int, np.ndarray[Any, Any]],
        *,
        dims: str | None = None,
        rows: Sequence[tuple[int, int]] | None = None,
        keep: str = "full",
        micro: int = 0,
        model: str = "",
    ) -> None:
        """Record one firing of the site."""
        assert self._info is not None, "call step() first"
        by_rank = values if isinstance(values, Mapping) else {0: values}
        for rank, array in by_rank.items():
            self._put(site, rank, np.asarray(array), dims, rows, keep, micro, model)

    def put_value(self, site: str, value: Any) -> None:
        """Record a non-tensor value on rank 0."""
        assert self._info is not None, "call step() first"
        plain = plain_value(value)
        place = 0, site, self._info.step, 0
        occurrence = self._fired.get(place, 0)
        self._fired[place] = occurrence + 1
        item = Record(Key(site, self._info.step, 0, occurrence), self._seq[0], None, (), value=plain)
        self._seq[0] += 1
        self._counts[0].seen += 1
        self._counts[0].sent += 1
        self.writers[0].lines(record.encode(item) + b"\n")

    def _put(
        self, site: str, rank: int, array: Any, dims: str | None, rows: Any, keep: str, micro: int, model: str
    ) -> None:
        assert self._info is not None
        contiguous = np.ascontiguousarray(array).reshape(array.shape)
        summary = summarize_array(contiguous)
        place = rank, f"{model}/{site}", self._info.step, micro
        occurrence = self._fired.get(place, 0)
        self._fired[place] = occurrence + 1
        key = Key(site, self._info.step, rank, occurrence, micro, model=model)
        dtype = contiguous.dtype.name
        item = Record(
            key,
            self._seq[rank],
            dtype,
            contiguous.shape,
            dims,
            None if rows is None else tuple(rows),
            *summary,
        )
        self._seq[rank] += 1
        self._counts[rank].seen += 1
        self._counts[rank].sent += 1
        line = record.encode(item)
        if keep == "full":
            payload = contiguous.reshape(-1).view(np.uint8)
            self.writers[rank].record(line, key.tensor_name, dtype, contiguous.shape, payload)
        else:
            self.writers[rank].lines(line + b"\n")
