"""Flags that `dump` and `serve` share, and the settings they mean."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapscope.core.errors import UsageError
from tapscope.core.site import parse_ranges

if TYPE_CHECKING:
    from tapscope.dumper import DumperConfig


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """What model, in what form."""
    parser.add_argument("model", metavar="MODEL", help="directory of a Hugging Face checkpoint")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="default: auto, as saved"
    )
    add_kv_flags(parser)
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
    text = "groups of ranks that hold different experts; divides --tp (default: 1)"
    parser.add_argument("--ep", type=int, default=1, metavar="N", help=text)


def add_kv_flags(parser: "argparse._ActionsContainer") -> None:
    """In what type the engine keeps keys and values."""
    choices = ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
    text = "type of the KV cache; fp8 is fp8_e4m3 (default: auto, as the checkpoint says, else as --dtype)"
    parser.add_argument("--kv-cache-dtype", default="auto", choices=choices, metavar="TYPE", help=text)
    text = "JSON file with the scales of an FP8 KV cache (default: the checkpoint's)"
    parser.add_argument("--quantization-param-path", metavar="FILE", help=text)


def add_selection_flags(parser: argparse.ArgumentParser, *, keep: str) -> None:
    """What is kept of which sites."""
    parser.add_argument(
        "--site", action="append", default=[], metavar="GLOB", help="only sites that match (repeatable)"
    )
    parser.add_argument("--skip", action="append", default=[], metavar="GLOB", help="not sites that match (repeatable)")
    parser.add_argument("--layers", metavar="0-3,27", help="only these layers; not together with --site")
    text = f"what is kept of a tensor (default: {keep})"
    parser.add_argument("--keep", choices=("off", "stats", "full"), default=keep, help=text)
    parser.add_argument("--force", action="store_true", help="replace the run that lies there")


def rules(args: argparse.Namespace) -> dict[str, Any]:
    """``keep`` and ``rules`` of a DumperConfig; raises UsageError or SiteError."""
    skipped = [f"{glob}=off" for glob in args.skip]
    if args.site and args.layers:
        raise UsageError("--site and --layers do not go together; write --site 'layers.3.*:out' for ports of one layer")
    if args.layers:
        layers = sorted(parse_ranges(args.layers))
        wanted = [f"{glob}={args.keep}" for n in layers for glob in (f"layers.{n}", f"layers.{n}.*")]
    else:
        wanted = [f"{glob}={args.keep}" for glob in args.site]
    return {"keep": "off" if wanted else args.keep, "rules": skipped + wanted}


def config(args: argparse.Namespace, **settings: Any) -> "DumperConfig":
    """The DumperConfig that the flags mean."""
    from tapscope.dumper import DumperConfig

    return DumperConfig().updated(rules(args) | settings)


def checkpoint_name(model: str) -> str:
    """Last part of the model's path, for the names of runs."""
    return Path(model).resolve().name
