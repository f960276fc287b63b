"""Time of one ``dump()`` call on the model's thread, in nanoseconds: best of several rounds.

    python benchmarks/dump_call.py [--rounds N]

Measured disabled, enabled without a rule that keeps the value, and with the value (a small tensor) kept as statistics
or in full, relative to an empty Python function with the same signature.
"""

import argparse
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tapscope.dumper import Dumper
from tapscope.dumper.process_dumper import ProcessDumper


def empty(name: str, value: Any, *, dims: str | None = None, grad: bool | None = None, **tags: Any) -> None:
    """Do nothing: measures Python's call overhead."""


def best_ns(call: Callable[[], object], rounds: int, number: int) -> float:
    return min(timeit.repeat(call, repeat=rounds, number=number)) / number * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    value = torch.ones(4, 128)

    def show(what: str, dump: Callable[..., object], number: int) -> None:
        plain = best_ns(lambda: dump("q", value), rounds, number)
        tagged = best_ns(lambda: dump("q", value, dims="t h[tp]", layer_id=3), rounds, number)
        print(f"{what:<42} {plain:8.0f} ns   with dims and layer_id {tagged:8.0f} ns")

    show("an empty function", empty, 200_000)
    show("disabled", ProcessDumper().dump, 200_000)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        with Dumper(None, out / "off", keep="off") as dumper:
            show("enabled, nothing is kept", dumper.dump, 200_000)
        with Dumper(None, out / "rules", keep="off", rules=["*:tap[k]=full", "layers.0-1:*=full"]) as dumper:
            show("enabled, no rule keeps it", dumper.dump, 200_000)
            with dumper.ctx(stage="prefill"):
                show("enabled, no rule keeps it, with a context", dumper.dump, 200_000)
        for keep in ("stats", "full"):
            with Dumper(None, out / keep, keep=keep) as dumper:
                show(f"kept: {keep}", dumper.dump, 1000)


if __name__ == "__main__":
    main()
