"""Faults: what is done to a watched model."""

import copy
import gc
import pickle
import random
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_checks import verify
from fault_jobs import alone
from fault_list import fault
from fault_model import Chain, expected, given
from faults_process import SHAPE, check_values

from tapscope.sources import open_run


def _compute(model: Any, step: int) -> None:
    with torch.no_grad():
        y = model(given(0, step, 8, 16))
    assert y.numpy().tobytes() == expected(0, step, ":out", **SHAPE).tobytes()


@fault("deepcopy and pickle of a watched model", 1, 10)
def copied(place: Path, rng: random.Random) -> None:
    alone(_copy, str(place / "run"), rng.randrange(2, 6))


def _copy(path: str, steps: int) -> None:
    from tapscope.dumper import Dumper

    model = Chain(3)
    with Dumper(model, path, keep="full"):
        for step in range(steps):
            _compute(model, step)
            _compute(copy.deepcopy(model), 77)  # plain models: nothing of them is recorded
            _compute(pickle.loads(pickle.dumps(model)), 78)  # noqa: S301 - our own bytes
    check_values(Path(path), 0, steps)


@fault("exceptions inside forward", 1, 20)
def exceptions(place: Path, rng: random.Random) -> None:
    alone(_raise, str(place / "run"), rng.randrange(1 << 30))


class Fails(torch.nn.Module):
    """A layer that raises when told to."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return self.layer(x)


def _raise(path: str, seed: int) -> None:
    from tapscope.dumper import Dumper

    rng, model, aborted = random.Random(seed), Chain(3), {}
    fails = [Fails(layer) for layer in model.layers]
    model.layers = torch.nn.ModuleList(fails)
    with Dumper(model, path, keep="full") as dumper:
        for step in range(20):
            error = rng.choice(
                [None, ValueError("x"), KeyboardInterrupt(), SystemExit(3), StopIteration(), MemoryError()]
            )
            for each in fails:
                each.error = None
            rng.choice(fails).error = error
            if error is None:
                _compute(model, step)
                continue
            aborted[step] = type(error).__name__
            with pytest.raises(type(error)) as caught:
                _compute(model, step)
            assert caught.value is error  # the very one comes through
        assert dumper.next_step == 20
    with open_run(path) as run:
        account = run.ledger()
        assert {step: name for _, step, name in account.aborted_steps} == aborted
        assert (account.lost, account.dropped, account.failed) == (0, 0, 0)
        for record in run.records:
            site = record.key.site.replace(".layer:", ":")
            assert run.array(record).tobytes() == expected(0, record.key.step, site, **SHAPE).tobytes()


@fault("threads that call forward at once", 1, 20)
def threads(place: Path, rng: random.Random) -> None:
    alone(_threads, str(place / "run"), rng.randrange(2, 9), rng.choice([0, 4 << 20]))


def _threads(path: str, number: int, shm_bytes: int) -> None:
    from tapscope.dumper import Dumper

    model, calls, wrong = Chain(3), 30, []
    queue = {"queue_bytes": 300_000, "block_timeout_s": 30.0, "shm_bytes": shm_bytes}

    def call(thread: int) -> None:
        for count in range(calls):
            try:
                _compute(model, thread * 1000 + count)
            except BaseException as error:  # noqa: BLE001 - said below
                wrong.append(error)

    with Dumper(model, path, keep="full", **queue):
        workers = [threading.Thread(target=call, args=(thread,)) for thread in range(number)]
        for each in workers:
            each.start()
        for each in workers:
            each.join()
    assert not wrong, wrong[:3]
    assert verify(Path(path))[0] == 0
    right = {expected(0, t * 1000 + n, s, **SHAPE).tobytes() for t in range(number) for n in range(calls) for s in _ALL}
    with open_run(path) as run:
        assert len(run.records) == number * calls * len(_ALL)
        keys = [record.key for record in run.records]
        assert len(set(keys)) == len(keys)
        assert {run.array(record).tobytes() for record in run.records} == right


_ALL = [f"{path}:{port}" for path in ("", "layers.0", "layers.1", "layers.2") for port in ("in[x]", "out")]


@fault("a hook removed by others", 1, 10)
def hook_removed(place: Path, rng: random.Random) -> None:
    alone(_remove_hook, str(place / "run"), rng.randrange(3), rng.choice(["_forward_hooks", "_forward_pre_hooks"]))


def _remove_hook(path: str, layer: int, which: str) -> None:
    from tapscope.dumper import Dumper

    model = Chain(3)
    with Dumper(model, path, keep="full") as dumper:
        for step in range(4):
            if step == 2:
                getattr(model.layers[layer], which).clear()
            _compute(model, step)
        assert dumper.next_step == 4
    with open_run(path) as run:
        assert run.ledger().lost == 0
        said = [event.fields for event in run.events() if event.kind == "failed" and "hook" in event.fields["reason"]]
        assert len(said) == 1, "a hook that is gone is said once"
        assert said[0]["where"].startswith(f"layers.{layer}"), said
        for record in run.records:
            right = expected(0, record.key.step, record.key.site, **SHAPE)
            assert run.array(record).tobytes() == right.tobytes()


@fault("the model freed while attached", 1, 10)
def freed(place: Path, rng: random.Random) -> None:
    alone(_free, str(place / "run"), rng.randrange(1, 4))


def _free(path: str, times: int) -> None:
    from tapscope.dumper import Dumper

    refs, layers = [], []
    with Dumper(None, path, keep="full") as dumper:
        for _ in range(times):
            model = Chain(3)
            dumper.attach(model)
            for _ in range(3):
                _compute(model, dumper.next_step)
            refs.append(weakref.ref(model))
            layers += [weakref.ref(layer) for layer in model.layers]
            del model
            gc.collect()
            assert all(ref() is None for ref in refs + layers), "the dumper keeps a model alive"
    check_values(Path(path), 0, 3 * times)
