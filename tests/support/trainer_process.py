"""A trainer in its own process: `python trainer_process.py URL`, one command per input line, one response each."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tapscope.core.errors import TapscopeError
from tapscope.engine.trainer import Trainer


def main() -> None:
    trainer = Trainer(sys.argv[1])
    for line in sys.stdin:
        verb, *words = json.loads(line)
        try:
            answer = COMMANDS[verb](trainer, *words)
        except TapscopeError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


def join(trainer: Trainer) -> None:
    trainer.join()


def update(trainer: Trainer, folder: str, names: list[str] | None, version: str) -> dict:
    """Send the weights of a checkpoint, or some of them."""
    held = load_file(Path(folder) / "model.safetensors")
    return trainer.update([(name, held.get(name, torch.zeros(3))) for name in names or held], version=version)


def compare(trainer: Trainer, folder: str, changed: str | None) -> dict:
    """Compare the weights of a checkpoint, with two elements of ``changed`` swapped."""
    held = load_file(Path(folder) / "model.safetensors")
    if changed is not None:
        flat = held[changed].view(-1)
        flat[[0, 1]] = flat[[1, 0]].clone()
    return trainer.compare(held.items())


def close(trainer: Trainer) -> None:
    trainer.close()


COMMANDS = {"join": join, "update": update, "compare": compare, "close": close}

if __name__ == "__main__":
    main()
