"""Copy a checkpoint and add noise to one of its tensors: `python examples/damage.py FROM TO TENSOR [--noise 0.1]`."""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def damage(source: Path, target: Path, tensor: str, noise: float = 0.1) -> None:
    """Copy ``source`` to ``target``, adding Gaussian noise of ``noise`` times the RMS of ``tensor`` to that tensor."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    weights = load_file(file)
    torch.manual_seed(0)
    weight = weights[tensor]
    weights[tensor] = weight + torch.randn_like(weight) * weight.square().mean().sqrt() * noise
    save_file(weights, file, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("tensor")
    parser.add_argument("--noise", type=float, default=0.1)
    args = parser.parse_args()
    damage(args.source, args.target, args.tensor, args.noise)
    print(f"{args.target}: {args.tensor} has {args.noise:.0%} noise added")


if __name__ == "__main__":
    main()
