"""--pattern: how the tensor files of a directory are named."""

import argparse
from pathlib import Path


def add_pattern_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag."""
    parser.add_argument(
        "--pattern",
        metavar="PATTERN",
        help="how .pt, .npz, .npy or .safetensors files of a directory are named, e.g. '{step}/rank{rank}/{name}.pt'; "
        "also accepted within the path: 'dump/{step}/{name}.pt'",
    )


def with_pattern(path: str | Path, args: argparse.Namespace) -> str:
    """The path of a run with the pattern of its files."""
    return str(path) if args.pattern is None else f"{str(path).rstrip('/')}/{args.pattern}"
