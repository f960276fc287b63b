"""One rank of a toy job in its own process: `python rank_worker.py RUN RANK WORLD [JSON settings]`.

Runs steps until a file named RUN.stop appears; prints one line when its Dumper is open.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

from tapscope.core.errors import TapscopeError
from tapscope.core.observe import RankInfo
from tapscope.dumper import Dumper


def build() -> nn.Module:
    """Build a model of two named layers."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({"0": nn.Linear(8, 8), "1": nn.Linear(8, 8)})

    class Toy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers.values():
                x = layer(x)
            return x

    return Toy()


def main(run: Path, rank: int, world: int, settings: dict[str, object]) -> int:
    """Run steps until the stop file appears."""
    torch.set_num_threads(1)
    pause = float(settings.pop("pause_s", 0.02))
    info = RankInfo(rank=rank, world_size=world, mesh={"tp": world}, coords={"tp": rank})
    model = build()
    stop = run.with_name(run.name + ".stop")
    try:
        with Dumper(model, run, info=info, **settings) as dumper:
            print("open", dumper.http, flush=True)
            while not stop.exists():
                with torch.no_grad(), dumper.step(phase="toy"):
                    model(torch.full((3, 8), float(rank)))
                time.sleep(pause)
            print("steps", dumper.next_step, flush=True)
    except TapscopeError as error:
        print(type(error).__name__, error, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    settings = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), settings))
