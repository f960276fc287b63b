"""Faults: forks and spawned processes while a recording is open."""

import multiprocessing
import os
import random
from pathlib import Path
from typing import Any

from fault_checks import verify
from fault_jobs import alone
from fault_list import fault
from fault_model import Chain, expected, given

from tapscope.sources import open_run

SHAPE: dict[str, Any] = {"rows": 8, "width": 16, "layers": 3}


def _compute(model: Chain, rank: int, step: int) -> None:
    """One step, with the right result."""
    import torch

    with torch.no_grad():
        y = model(given(rank, step, 8, 16))
    assert y.numpy().tobytes() == expected(rank, step, ":out", **SHAPE).tobytes()


def check_values(path: Path, rank: int, steps: int) -> None:
    """The run is complete, has all these steps and the right bytes."""
    code, summary = verify(path)
    assert code == 0, summary
    with open_run(path) as run:
        assert len(run.records) == steps * 2 * (1 + SHAPE["layers"])
        for record in run.records:
            right = expected(rank, record.key.step, record.key.site, **SHAPE)
            assert run.array(record).tobytes() == right.tobytes(), record.key


def _in_child(body: Any) -> None:
    """Fork, run ``body`` in the child, and fail unless it succeeded."""
    import traceback

    pid = os.fork()
    if not pid:
        code = 1
        try:
            body()
            code = 0
        except BaseException:  # noqa: BLE001 - it must never come back as a second parent
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@fault("fork: the child computes and is silent", 1, 10)
def fork_silent(place: Path, rng: random.Random) -> None:
    alone(_fork, str(place), rng.randrange(1, 5), False)


@fault("fork: the child has a dumper of its own", 1, 10)
def fork_own(place: Path, rng: random.Random) -> None:
    alone(_fork, str(place), rng.randrange(1, 5), True)


def _fork(folder: str, before: int, own: bool) -> None:
    from tapscope.dumper import Dumper

    place, model = Path(folder), Chain(3)

    def child() -> None:
        for step in range(5):
            _compute(model, 0, step)
        if own:
            with Dumper(model, place / "child", keep="full"):
                for step in range(4):
                    _compute(model, 0, step)

    with Dumper(model, place / "run", keep="full") as dumper:
        for step in range(before):
            _compute(model, 0, step)
        _in_child(child)
        with dumper.step() as info:  # a fork in the middle of a step
            _in_child(child) if not own else None
            _compute(model, 0, info.step)
        _compute(model, 0, before + 1)
    check_values(place / "run", 0, before + 2)
    if own:
        check_values(place / "child", 0, 4)


@fault("spawn: the child records the other rank", 1, 5)
def spawned(place: Path, rng: random.Random) -> None:
    alone(_spawn, str(place / "run"))


def _spawn(path: str) -> None:
    from tapscope.core.observe import RankInfo
    from tapscope.dumper import Dumper

    model = Chain(3)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    with Dumper(model, path, info=RankInfo(rank=0, world_size=2), keep="full"):
        _compute(model, 0, 0)
        child = multiprocessing.get_context("spawn").Process(target=_record_rank_1, args=(path,))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        _compute(model, 0, 1)
    assert verify(Path(path))[0] == 0
    with open_run(path) as run:
        assert run.ranks == (0, 1)
        for record in run.records:
            key = record.key
            assert run.array(record).tobytes() == expected(key.rank, key.step, key.site, **SHAPE).tobytes()


def _record_rank_1(path: str) -> None:
    from tapscope.core.observe import RankInfo
    from tapscope.dumper import Dumper

    model = Chain(3)
    with Dumper(model, path, info=RankInfo(rank=1, world_size=2), keep="full"):
        for step in range(2):
            _compute(model, 1, step)
