"""Fault: changes over HTTP in any order, as fast as they are answered, while two ranks compute."""

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fault_checks import check_values
from fault_jobs import Ranks
from fault_list import fault
from jobs import ask, wait_until

from tapscope.run_format.run import Run
from tapscope.sources import open_run

_RULES = ["layers.1:out=full", "layers.*:in*=off", "layers.9=full", "*=stats", ":out=full"]
_AT_LEAST = 6
"""Changes that must take effect before a storm is one; every answer has its own time limit."""
_PLAIN = {"enabled": True, "mode": "all", "keep": "full", "rules": [], "filter": None}


def _request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """One of many; some are refused."""
    keep = rng.choice(["off", "stats", "full"])
    rules = rng.sample(_RULES, rng.randrange(3))
    return rng.choice(
        [
            ("configure", {"keep": keep, "rules": rules}),
            ("configure", {"enabled": rng.random() < 0.7}),
            ("configure", {"mode": rng.choice(["all", "core", "off"])}),
            ("configure", {"filter": rng.choice([None, "step % 2 == 0", "x("])}),
            ("capture", {"steps": rng.randrange(1, 6), "replace": rng.random() < 0.5}),
            ("reset", {}),
            ("reset", {"run": rng.choice(["a", "b", "../c"])}),
            ("configure", {"queue_bytes": 1}),
        ]
    )


@fault("storms of changes over HTTP", 1, 10)
def storm(place: Path, rng: random.Random) -> None:
    settings = {"control": "127.0.0.1:0", "block_timeout_s": 20.0}
    statuses: Counter[int] = Counter()
    with Ranks(place / "run", 2, settings=settings) as ranks:
        url = f"http://{ranks.opened().mark('http')}/dumper"
        deadline = time.monotonic() + rng.uniform(2.0, 4.0)
        while time.monotonic() < deadline or statuses[200] < _AT_LEAST:  # a busy machine answers slowly
            verb, body = _request(rng)
            status, answer = ask(f"{url}/{verb}", body)
            statuses[status] += 1
            assert status in (200, 400, 409), (verb, body, status, answer)
        status, answer = ask(f"{url}/configure", _PLAIN)
        assert status == 200
        wait_until(lambda: {r["epoch"] for r in ask(f"{url}/state")[1]["ranks"]} == {answer["epoch"]}, "both apply it")
        last = Path(ask(f"{url}/state")[1]["run"])
        ranks.end()
        runs = [path.parent for path in place.glob("*/run.json")]
        assert last in runs
        for path in runs:
            with open_run(path) as run:
                _check(run, ranks)
        with open_run(last) as run:
            assert all(any(record.entry for record in run.records if record.key.rank == rank) for rank in (0, 1))


def _check(run: Run, ranks: Ranks) -> None:
    account = run.ledger()
    assert (account.lost, account.dropped, account.failed, account.unfinished_steps) == (0, 0, 0, []), run.path
    assert run.problems == []
    assert account.lost_ranks == account.open_ranks == account.missing_ranks == []
    check_values(run, ranks.specs[0])
    _check_even(run)


def _check_even(run: Run) -> None:
    """In steps of one epoch all ranks kept the same; each rank's epochs only grow.

    A capture of n steps is n steps of each rank, which need not begin and end with the same one.
    """
    configs = [event.fields for event in run.events() if event.kind == "config"]
    captures = {fields["epoch"] for fields in configs if fields["capture_steps"]}
    kept: dict[tuple[int, int], set[tuple[str, bool]]] = {}
    for record in run.records:
        kept.setdefault((record.key.step, record.key.rank), set()).add((record.key.site, record.entry is not None))
    for step, by_rank in run.steps.items():
        epochs = {line.epoch for line in by_rank.values()}
        if len(by_rank) == 2 and len(epochs) == 1 and not epochs & captures:
            assert kept.get((step, 0)) == kept.get((step, 1)), f"{run.path}: ranks kept different sites in step {step}"
    for rank in run.ranks:
        own = [by_rank[rank].epoch for _, by_rank in sorted(run.steps.items()) if rank in by_rank]
        assert own == sorted(own), f"{run.path}: the epochs of rank {rank} go back"
