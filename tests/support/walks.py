"""Count the three walks of docs/explanation/architecture.md: `python tests/support/walks.py`.

A walk is the sequence of tapscope modules that one value, one request or one comparison passes through, in call order,
from a profile of the calls between modules in the calling thread. A *hop* is a call into another module, a *return* a
hop into a module visited before.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn


class Walk:
    """Modules in call order while the block runs."""

    def __init__(self, every_thread: bool = False) -> None:
        self.modules: list[str] = []
        self.edges: list[tuple[str, str]] = []
        self._every_thread = every_thread

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code.co_name in ("<genexpr>", "<lambda>", "<listcomp>", "__init__"):
            return
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith("tapscope"):
            return
        caller = frame.f_back
        while caller is not None and not str(caller.f_globals.get("__name__", "")).startswith("tapscope"):
            caller = caller.f_back
        before = str(caller.f_globals["__name__"]) if caller is not None else ""
        if name != before:
            self.modules.append(name)
            self.edges.append((before, name))

    def __enter__(self) -> "Walk":
        if self._every_thread:
            threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    @property
    def order(self) -> list[str]:
        """Return each module once, in order of first entry."""
        return list(dict.fromkeys(self.modules))

    def summary(self) -> str:
        """Return one line of counts."""
        hops = list(dict.fromkeys(self.edges))
        seen: set[str] = set()
        returns = 0
        for _, callee in hops:
            returns += callee in seen
            seen.add(callee)
        packages = {".".join(name.split(".")[:3]) for name in self.order}
        return f"{len(self.order)} modules, {len(packages)} packages, {len(hops)} distinct hops, {returns} returns"


def value(folder: Path) -> Walk:
    """Record one output of one module in full, the second time it fires with this shape."""
    from tapscope import Dumper

    model = nn.Sequential(nn.Linear(8, 8))
    with torch.no_grad(), Dumper(model, out=folder / "run", keep="off", rules=["0:out=full"]) as dumper:
        with dumper.step():
            model(torch.ones(1, 8))
        with dumper.step(), Walk() as walk:
            model[0](torch.ones(1, 8))
            model[0](torch.ones(2, 4, 8))
    return walk


def request(folder: Path, checkpoint: Path) -> Walk:
    """Generate one request of two tokens."""
    from tapscope import LLM

    with LLM(checkpoint) as llm:
        llm.generate([[5, 6, 7]], max_new_tokens=2)
        with Walk() as walk:
            llm.generate([[8, 9, 7]], max_new_tokens=2)
    return walk


def comparison(folder: Path) -> Walk:
    """Compare two runs of a small model, one module of which is wrong."""
    from tapscope import Dumper, compare

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with torch.no_grad():
        with Dumper(model, out=folder / "a", keep="full"):
            model(torch.ones(4, 64))
        model[2].weight.mul_(1.5)
        with Dumper(model, out=folder / "b", keep="full"):
            model(torch.ones(4, 64))
    compare(str(folder / "a"), str(folder / "b"))  # warms up imports
    with Walk() as walk:
        str(compare(str(folder / "a"), str(folder / "b")))
    return walk


def main() -> None:
    """Print the three walks."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        os.environ["OMP_NUM_THREADS"] = "1"
        walks: dict[str, Callable[[], Walk]] = {"hook to queue": lambda: value(folder)}
        if len(sys.argv) > 1:
            walks["request to answer"] = lambda: request(folder, Path(sys.argv[1]))
        walks["two runs to a finding"] = lambda: comparison(folder)
        for name, walk in walks.items():
            done = walk()
            print(f"{name}: {done.summary()}")
            for module in done.order:
                print("   ", module.removeprefix("tapscope."))


if __name__ == "__main__":
    main()
