"""What must hold of a run whose job was hurt."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from fault_jobs import Ranks
from fault_model import expected, sites
from fault_worker import Spec
from safetensors import safe_open

from tapscope import cli
from tapscope.run_format.repair import repair_run
from tapscope.run_format.run import Run
from tapscope.sources import open_run


def check_values(run: Run, spec: Spec) -> None:
    """Every value that is there is the right one, bit for bit."""
    for record in run.records:
        if record.entry is None:
            continue
        key = record.key
        right = expected(key.rank, key.step, key.site, spec.rows, spec.width, spec.layers)
        assert run.array(record).tobytes() == right.tobytes(), f"{key} holds other bytes"


def check_acknowledged(run: Run, spec: Spec, marks: list[dict[str, Any]]) -> int:
    """All values of steps that were acknowledged are there; gives the number of these steps."""
    last = max((mark["acked"] for mark in marks if "acked" in mark), default=-1)
    found: dict[int, set[str]] = {}
    for record in run.records:
        if record.key.rank == spec.rank and record.entry is not None:
            found.setdefault(record.key.step, set()).add(record.key.site)
    for step in range(last + 1):
        line = run.steps.get(step, {}).get(spec.rank)
        assert line is not None, f"rank {spec.rank}: step {step} was acknowledged and has no line"
        assert line.counts is not None, f"rank {spec.rank}: step {step} was acknowledged and has no end"
        assert line.counts.failed == 0, f"rank {spec.rank}: {line.counts.failed} values failed in step {step}"
        there = found.get(step, set())
        assert len(there) == line.counts.seen - line.counts.dropped, f"rank {spec.rank}: step {step} lacks values"
        if not line.counts.dropped and not line.counts.left_out:
            assert there == sites(spec.layers), f"rank {spec.rank}: step {step} lacks {sites(spec.layers) - there}"
    return last + 1


def verify(path: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and summary of `tapscope verify --json`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(["verify", str(path), "--json"])
    return code, json.loads(out.getvalue().splitlines()[-1])


def check_whole(ranks: Ranks) -> None:
    """Nothing is missing at all."""
    code, summary = verify(ranks.run)
    assert (code, summary["complete"]) == (0, True), summary["missing"]
    check_recorded(ranks, repair=False)


def check_damaged(ranks: Ranks, says: str) -> None:
    """The run is incomplete and says so; what was acknowledged is there; a repair makes every file whole."""
    code, summary = verify(ranks.run)
    assert (code, summary["complete"]) == (1, False)
    assert any(says in sentence for sentence in summary["missing"]), summary["missing"]
    assert summary["num_damaged"] == 0, summary
    check_recorded(ranks, repair=True)


def check_recorded(ranks: Ranks, *, repair: bool) -> None:
    """Values are right and acknowledged ones there, before a repair and after; files then open with safetensors."""
    for repaired in (False, True) if repair else (False,):
        if repaired:
            for done in repair_run(ranks.run):
                assert done.problems == [], done.problems
            assert not any(again.needed for again in repair_run(ranks.run)), "a second repair found something to do"
            check_files(ranks.run)
        with open_run(ranks.run) as run:
            bad = [each for each in run.problems if "missing" in each or "truncated" in each]
            assert bad == [], bad
            check_values(run, ranks.specs[0])
            for spec in ranks.specs:
                check_acknowledged(run, spec, ranks.marks(spec.rank))
            assert run.ledger().lost == 0 or not repaired, run.ledger().sentences()


def check_files(path: Path) -> None:
    """Every segment is a valid safetensors file that describes all of its bytes."""
    for file in path.glob("rank-*/seg-*.safetensors"):
        with safe_open(file, "np") as tensors:
            assert len(list(tensors.keys())) > 0
