"""Flags shared by `dump` and `serve`, and the settings derived from them."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapscope.cli import diagnostics
from tapscope.core.cuda_coredump import enable_cuda_coredumps
from tapscope.core.errors import ConfigError, UsageError
from tapscope.core.site import parse_ranges

if TYPE_CHECKING:
    from tapscope.dumper import DumperConfig


def add_model_flags(parser: argparse.ArgumentParser, *, nargs: str | None = None) -> None:
    """Add the flags for the checkpoint, its dtype and its parallelism."""
    parser.add_argument("model", metavar="MODEL", nargs=nargs, help="directory of a Hugging Face checkpoint")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of the weights (default: auto, as in the checkpoint)",
    )
    add_kv_flags(parser)
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
    text = "expert-parallel groups; must divide --tp (default: 1)"
    parser.add_argument("--ep", type=int, default=1, metavar="N", help=text)
    text = "a setting of the engine, such as max_num_seqs=8 or cuda_graphs=off (repeatable)"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=text)


_ENGINE_FLAGS = ("dtype", "kv_cache_dtype", "quantization_param_path", "dp", "tp", "ep", "max_model_len")


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings given by the flags of :func:`add_model_flags` and by ``--set``.

    Raises ConfigError, also for a name that is set twice.
    """
    settings: dict[str, Any] = {name: getattr(args, name) for name in _ENGINE_FLAGS if hasattr(args, name)}
    given: dict[str, str] = {}
    for text in args.set:
        name, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--set {text!r}: expected NAME=VALUE, such as max_num_seqs=8")
        if name in _ENGINE_FLAGS and hasattr(args, name):
            raise ConfigError(f"--set {text!r}: use the flag --{name.replace('_', '-')}")
        if name in ("model", "dp", "dp_rank"):
            raise ConfigError(f"--set {text!r}: {name} cannot be set here")
        if name in given:
            raise ConfigError(f"--set {text!r}: {name} was set before, by --set {given[name]!r}; set it once")
        given[name] = text
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value  # not JSON: a plain string
    return settings


def add_kv_flags(parser: "argparse._ActionsContainer") -> None:
    """Add the flags for the dtype and the scales of the KV cache."""
    choices = ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
    text = "dtype of the KV cache; fp8 means fp8_e4m3 (default: auto, as in the checkpoint, else --dtype)"
    parser.add_argument("--kv-cache-dtype", default="auto", choices=choices, metavar="DTYPE", help=text)
    text = "JSON file with the scales of an FP8 KV cache (default: the checkpoint's)"
    parser.add_argument("--quantization-param-path", metavar="FILE", help=text)


_SPECULATIVE = {
    "speculative_algorithm": (
        "NAME",
        str,
        "speculative decoding: NGRAM, STANDALONE, NEXTN, EAGLE, EAGLE3 (default: off)",
    ),
    "speculative_draft_model_path": ("DIR", str, "draft checkpoint of STANDALONE, or head of EAGLE and EAGLE3"),
    "speculative_num_steps": ("N", int, "draft tokens in sequence, or levels of a draft tree"),
    "speculative_eagle_topk": ("N", int, "branches of a draft tree; 1: a chain (default: 1)"),
    "speculative_num_draft_tokens": ("N", int, "rows verified for a request: its last token and the draft tokens"),
    "speculative_ngram_min_match_window_size": ("N", int, "shortest match in tokens (default: 2)"),
    "speculative_ngram_max_match_window_size": ("N", int, "longest match in tokens (default: 12)"),
}
"""Setting -> (metavar, type, help) of its flag; SGLang's names."""


def add_speculative_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for speculative decoding."""
    group = parser.add_argument_group("speculative decoding")
    for name, (metavar, kind, text) in _SPECULATIVE.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, default=None, help=text)


def speculative_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the speculative-decoding settings that were given on the command line."""
    return {name: value for name in _SPECULATIVE if (value := getattr(args, name)) is not None}


def add_adapter_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for LoRA adapters, under the names used by SGLang and vLLM."""
    group = parser.add_argument_group("LoRA adapters")
    text = "PEFT adapters to load; requests select them as MODEL:NAME"
    group.add_argument("--lora-paths", "--lora-modules", nargs="+", metavar="NAME=DIR", default=None, help=text)
    text = "serve adapters that are loaded later, by POST /load_lora_adapter"
    group.add_argument("--enable-lora", action="store_true", help=text)
    text = "different adapters in one step (default: 8)"
    group.add_argument("--max-loras-per-batch", "--max-loras", type=int, metavar="N", default=None, help=text)
    text = "maximum rank of an adapter (default: the largest of --lora-paths, at least 16)"
    group.add_argument("--max-lora-rank", type=int, metavar="N", default=None, help=text)


def adapter_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the LoRA settings that were given on the command line."""
    names = ("lora_paths", "max_loras_per_batch", "max_lora_rank")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return given | ({"enable_lora": True} if args.enable_lora else {})


def add_selection_flags(parser: argparse.ArgumentParser, *, keep: str, against: bool = True) -> None:
    """Add the flags for site selection and capture level; with ``against``, also those for the live comparison."""
    parser.add_argument(
        "--site", action="append", default=[], metavar="GLOB", help="capture only matching sites (repeatable)"
    )
    parser.add_argument("--skip", action="append", default=[], metavar="GLOB", help="skip matching sites (repeatable)")
    parser.add_argument(
        "--layers", metavar="LIST", help="only these layers, e.g. 0-3,27; cannot be combined with --site"
    )
    text = f"capture level: nothing, statistics, statistics and a sketch, or statistics and values (default: {keep})"
    parser.add_argument("--keep", choices=("off", "stats", "sketch", "full"), default=keep, help=text)
    parser.set_defaults(against=None, on_divergence="keep", against_rtol=None)
    parser.set_defaults(inject=[], inject_from=None, inject_wait=10.0)
    if against:
        _add_live_comparison_flags(parser)
    text = "YAML file of source lines to replace in functions while the model runs"
    parser.add_argument("--source-patches", metavar="FILE", help=text)
    text = "on a CUDA error, write a core dump of the GPU into this directory"
    parser.add_argument("--cuda-coredump", metavar="DIR", help=text)
    parser.add_argument("--force", action="store_true", help="replace an existing run in that directory")


def _add_live_comparison_flags(parser: argparse.ArgumentParser) -> None:
    text = "compare each captured tensor with this reference run while the model runs; report first divergences"
    parser.add_argument("--against", metavar="RUN", help=text)
    text = "after the first divergence of a step: report it, keep the rest in full, or stop the capture (default: keep)"
    parser.add_argument("--on-divergence", choices=("report", "keep", "stop"), default="keep", help=text)
    text = "with --against: fixed bound on the relative error of each token row; 0 requires equal values"
    parser.add_argument("--against-rtol", type=float, metavar="X", help=text)
    text = "overwrite this module input or output with values of --inject-from: SITE[=STORED] [steps=0-3] (repeatable)"
    parser.add_argument("--inject", action="append", default=[], metavar="SITE", help=text)
    text = "run whose values --inject writes; it may still be recording"
    parser.add_argument("--inject-from", metavar="RUN", help=text)
    text = "seconds that a step waits for a value that a running --inject-from has not recorded yet (default: 10)"
    parser.add_argument("--inject-wait", type=float, metavar="SECONDS", default=10.0, help=text)


def rules(args: argparse.Namespace) -> dict[str, Any]:
    """Return ``keep`` and ``rules`` for a DumperConfig; raises UsageError or SiteError."""
    if "" in (*args.site, *args.skip):
        raise UsageError("--site and --skip: an empty pattern selects nothing; '*' selects every site")
    skipped = [f"{glob}=off" for glob in args.skip]
    if args.site and args.layers:
        raise UsageError(
            "--site and --layers cannot be combined; use --site 'layers.3.*:out' to select ports of one layer"
        )
    if args.layers:
        layers = sorted(parse_ranges(args.layers))
        wanted = [f"{glob}={args.keep}" for n in layers for glob in (f"layers.{n}", f"layers.{n}.*")]
    else:
        wanted = [f"{glob}={args.keep}" for glob in args.site]
    return {"keep": "off" if wanted else args.keep, "rules": skipped + wanted}


def config(args: argparse.Namespace, **settings: Any) -> "DumperConfig":
    """Build the DumperConfig from the flags. Side effect: enables CUDA core dumps for this process and its children if
    requested."""
    from tapscope.dumper import DumperConfig

    against = {"against": None if args.against is None else os.path.abspath(args.against)}
    live = against | {"on_divergence": args.on_divergence, "against_rtol": args.against_rtol}
    run = None if args.inject_from is None else os.path.abspath(args.inject_from)
    live |= {"inject": args.inject, "inject_from": run, "inject_wait_s": args.inject_wait}
    live["source_patches"] = None if args.source_patches is None else os.path.abspath(args.source_patches)
    if args.cuda_coredump is not None:
        diagnostics.note(f"CUDA core dumps: {enable_cuda_coredumps(args.cuda_coredump)}")
    return DumperConfig().updated(rules(args) | live | settings)


def checkpoint_name(model: str | Path) -> str:
    """Return the last component of the model path, used to name runs."""
    return Path(model).resolve().name
