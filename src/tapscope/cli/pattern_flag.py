"""--pattern: the naming scheme of the tensor files in a directory."""

import argparse
from pathlib import Path


def add_pattern_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--pattern`` to ``parser``."""
    parser.add_argument(
        "--pattern",
        metavar="PATTERN",
        help="how .pt, .npz, .npy or .safetensors files of a directory are named, e.g. '{step}/rank{rank}/{name}.pt'; "
        "also accepted within the path: 'dump/{step}/{name}.pt'",
    )


def with_pattern(path: str | Path, args: argparse.Namespace) -> str:
    """Return the path of a run with the pattern of ``--pattern`` appended, if given."""
    return str(path) if args.pattern is None else f"{str(path).rstrip('/')}/{args.pattern}"
