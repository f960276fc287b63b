"""A recording whose steps with taps run from CUDA graphs, or eagerly on chosen ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tapscope.core.observe import RankInfo
from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine.execution.decode_graphs import DecodeGraphs
from tapscope.run_format.run import Run


@dataclass(frozen=True)
class Recording:
    """Observer factory for each rank; counts replays of graphs with taps in a file."""

    out: Path
    config: DumperConfig
    eager_ranks: tuple[int, ...] = ()
    """Ranks without tapped graphs: their steps are padded as if they had them."""

    def __call__(self, model: Any, info: RankInfo) -> Any:
        """Create the observer of a rank (:class:`tapscope.core.observe.ObserverFactory`)."""
        observer = make_observer(model, info, out=str(self.out), config=self.config)
        tapped, replay, close = DecodeGraphs.tapped, DecodeGraphs.replay, observer.close
        count = 0

        def counted(graphs: DecodeGraphs, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return replay(graphs, *args, **kwargs)

        def end() -> None:
            DecodeGraphs.tapped, DecodeGraphs.replay = tapped, replay  # type: ignore[method-assign]
            self._counter(info.rank).write_text(str(count))
            close()

        if info.rank in self.eager_ranks:
            DecodeGraphs.tapped = lambda graphs, size, observer: None  # type: ignore[method-assign]
        DecodeGraphs.replay = counted  # type: ignore[method-assign]
        observer.close = end
        return observer

    def replays(self, ranks: int) -> list[int]:
        """Return the number of tapped graphs that each of ``ranks`` ranks has replayed, after all have ended."""
        return [int(self._counter(rank).read_text()) for rank in range(ranks)]

    def _counter(self, rank: int) -> Path:
        return self.out.with_name(f"{self.out.name}-replays-{rank}")


def check_equal(run: Run, eager: Run) -> int:
    """Assert that two runs have the same records; return the number of compared tensors.

    Bytes, extremes and counts must be identical; sums and sketches must agree within rounding.
    """
    theirs = {record.key: record for record in eager.records}
    assert [record.key for record in run.records if record.key not in theirs] == []
    assert len(run.records) == len(theirs)
    count = 0
    for record in run.records:
        other = theirs[record.key]
        told = [(r.dtype, r.shape, r.dims, r.rows, r.hash, r.bag) for r in (record, other)]
        assert told[0] == told[1], record.key
        assert (record.entry is None) == (other.entry is None), record.key
        count += record.dtype is not None
        assert (record.sketch is None) == (other.sketch is None), record.key
        if record.sketch is not None and other.sketch is not None:
            assert record.sketch.by_rows == other.sketch.by_rows, record.key
            counters = [each.sketch(one) for each, one in ((run, record), (eager, other))]
            largest = float(np.abs(counters[1]).max())
            np.testing.assert_allclose(*counters, rtol=1e-4, atol=1e-5 * largest, err_msg=str(record.key))
        if record.stats is None or other.stats is None:
            assert record.stats is other.stats, record.key
            continue
        stats: Sequence[Any] = [
            [each.count, each.min, each.max, each.absmax, each.nan, each.posinf] for each in (record.stats, other.stats)
        ]
        assert stats[0] == stats[1], record.key
        sums = [[each.sum, each.sumsq] for each in (record.stats, other.stats)]
        np.testing.assert_allclose(*np.array(sums, float), rtol=1e-4, atol=1e-3, err_msg=str(record.key))
    return count
