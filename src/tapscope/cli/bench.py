"""`tapscope bench`: a server under load, or the engine alone, against what the machine could do."""

import argparse
import json
import time
from pathlib import Path

from tapscope._version import __version__
from tapscope.cli import bench_measurements, bench_report, capture_flags, diagnostics, output
from tapscope.cli.diagnostics import ExitCode
from tapscope.core import extras
from tapscope.core.deprecation import deprecated_flag
from tapscope.core.errors import UsageError

_KINDS = ("serving", "batch", "latency")
_DATASETS = ("random", "shared-prefix", "sharegpt")


class BenchCommand:
    """Measure a server under load (serving), many prompts at once (batch), or one batch (latency).

      $ tapscope bench serving http://127.0.0.1:8000 --num-prompts 256 --max-concurrency 64
      $ tapscope bench serving http://127.0.0.1:8000 --rate 8 --dataset sharegpt --dataset-path talks.json
      $ tapscope bench batch MODEL --num-prompts 64 --dataset shared-prefix
      $ tapscope bench latency MODEL --batch-size 8 --input-len 512 --output-len 64

    serving takes any OpenAI-compatible server; a key for it is read from TAPSCOPE_API_KEY or OPENAI_API_KEY. Shares
    are of what this machine reads and multiplies a second, measured by the same process just before.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("kind", choices=_KINDS, metavar="KIND", help="serving, batch or latency")
        parser.add_argument("target", metavar="URL|MODEL", help="a server, or the directory of a checkpoint")
        parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the result as JSON")
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: 0)")
        _add_workload(parser)
        _add_serving(parser)
        offline = parser.add_argument_group("batch and latency")
        offline.add_argument("--dtype", default="auto", metavar="TYPE", help="default: auto, as saved")
        capture_flags.add_kv_flags(offline)
        offline.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
        max_num_seqs = offline.add_argument(
            "--max-num-seqs", type=int, default=64, metavar="N", help="requests in a step (default: 64)"
        )
        deprecated_flag(offline, "--max-running", max_num_seqs)
        offline.add_argument("--batch-size", type=int, default=1, metavar="N", help="latency: requests (default: 1)")
        offline.add_argument("--repeat", type=int, default=5, metavar="N", help="latency: batches (default: 5)")

    def run(self, args: argparse.Namespace) -> int:
        """Measure, print, write; the exit code is 4 when requests failed."""
        _check(args)
        if args.kind != "serving":  # which needs no torch
            extras.require("engine", f"tapscope bench {args.kind}")
        found = bench_measurements.RUNS[args.kind](args)
        result = {
            "kind": args.kind,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "tapscope": __version__,
            "target": args.target,
            "seed": args.seed,
        } | found
        if args.json:
            output.write_json(result)
        else:
            for line in bench_report.lines(result):
                output.write_line(line)
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            diagnostics.note(f"written: {args.out}")
        return ExitCode.LIVE if result.get("failed") else ExitCode.OK


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--dataset", choices=_DATASETS, default="random", help="default: random")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="a ShareGPT file")
    group.add_argument("--tokenizer", type=Path, metavar="DIR", help="whose tokens are counted (default: the model's)")
    group.add_argument("--num-prompts", type=int, default=64, metavar="N", help="requests (default: 64)")
    group.add_argument("--input-len", type=int, default=128, metavar="N", help="prompt tokens (default: 128)")
    group.add_argument(
        "--output-len", type=int, metavar="N", help="tokens to generate (default: 64; sharegpt: as stored)"
    )
    group.add_argument(
        "--spread", type=float, default=0.0, metavar="X", help="lengths vary by ± this share (default: 0)"
    )
    group.add_argument("--num-groups", type=int, default=8, metavar="N", help="shared-prefix: prefixes (default: 8)")
    group.add_argument("--prefix-len", type=int, default=256, metavar="N", help="shared-prefix: tokens (default: 256)")
    group.add_argument("--max-tokens", type=int, default=2048, metavar="N", help="sharegpt: both sides (default: 2048)")


def _add_serving(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serving")
    group.add_argument("--model", metavar="NAME", help="default: the server's first")
    group.add_argument("--chat", action="store_true", help="ask /v1/chat/completions, not /v1/completions")
    text = "requests a second, arriving as a Poisson process (default: inf, all at once)"
    group.add_argument("--rate", type=float, default=float("inf"), metavar="R", help=text)
    group.add_argument("--max-concurrency", type=int, metavar="N", help="requests under way at most")
    group.add_argument("--warmup", type=int, default=1, metavar="N", help="requests before the clock runs (default: 1)")
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request (default: 600)")
    group.add_argument("--extra", default="{}", metavar="JSON", help="further fields of every body")
    group.add_argument("--stop-at-eos", action="store_true", help="let answers end; else ignore_eos is sent")


def _check(args: argparse.Namespace) -> None:
    for name in ("num_prompts", "input_len", "num_groups", "batch_size", "repeat", "max_num_seqs", "tp"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if args.output_len is not None and args.output_len < 1:
        raise UsageError(f"--output-len is {args.output_len}; it must be at least 1")
    if not 0 <= args.spread < 1:
        raise UsageError(f"--spread is {args.spread}; it must be from 0 to below 1")
    if not args.rate > 0:
        raise UsageError(f"--rate is {args.rate}; it must be above 0")
    if (args.dataset == "sharegpt") != (args.dataset_path is not None):
        raise UsageError("--dataset sharegpt and --dataset-path FILE go together")
    is_url = args.target.startswith(("http://", "https://"))
    if is_url != (args.kind == "serving"):
        what = "the address of a server, http://..." if args.kind == "serving" else "the directory of a checkpoint"
        raise UsageError(f"bench {args.kind} needs {what}; {args.target!r} is none")
