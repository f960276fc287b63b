"""`tapscope bench`: a server under load, or the engine alone, relative to the limits of the machine."""

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
    """Benchmark a server under load (serving), offline throughput (batch), or the latency of one batch (latency).

      $ tapscope bench serving http://127.0.0.1:8000 --num-prompts 256 --max-concurrency 64
      $ tapscope bench serving http://127.0.0.1:8000 --rate 8 --dataset sharegpt --dataset-path talks.json
      $ tapscope bench batch MODEL --num-prompts 64 --dataset shared-prefix
      $ tapscope bench latency MODEL --batch-size 8 --input-len 512 --output-len 64

    serving works with any OpenAI-compatible server; its API key is read from TAPSCOPE_API_KEY or OPENAI_API_KEY.
    Percentages are relative to the memory bandwidth and FLOP/s of this machine, measured just before.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("kind", choices=_KINDS, metavar="KIND", help="serving, batch or latency")
        parser.add_argument("target", metavar="URL|MODEL", help="URL of a server, or a checkpoint directory")
        parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the result as JSON")
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
        parser.add_argument(
            "--seed", type=int, default=0, metavar="N", help="seed of prompts and arrival times (default: 0)"
        )
        _add_workload(parser)
        _add_serving(parser)
        offline = parser.add_argument_group("batch and latency")
        offline.add_argument(
            "--dtype",
            default="auto",
            metavar="DTYPE",
            help="dtype of the weights (default: auto, as in the checkpoint)",
        )
        capture_flags.add_kv_flags(offline)
        capture_flags.add_speculative_flags(parser)
        offline.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
        max_num_seqs = offline.add_argument(
            "--max-num-seqs", type=int, default=64, metavar="N", help="requests in a step (default: 64)"
        )
        deprecated_flag(offline, "--max-running", max_num_seqs)
        offline.add_argument(
            "--batch-size", type=int, default=1, metavar="N", help="latency: requests per batch (default: 1)"
        )
        offline.add_argument(
            "--repeat", type=int, default=5, metavar="N", help="latency: number of batches (default: 5)"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Measure, print, write. Exit code 4 if requests failed."""
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
    group.add_argument("--dataset", choices=_DATASETS, default="random", help="source of the prompts (default: random)")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="ShareGPT JSON file")
    group.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="tokenizer that counts tokens (default: the model's)"
    )
    group.add_argument("--num-prompts", type=int, default=64, metavar="N", help="number of requests (default: 64)")
    group.add_argument("--input-len", type=int, default=128, metavar="N", help="tokens per prompt (default: 128)")
    group.add_argument(
        "--output-len",
        type=int,
        metavar="N",
        help="tokens to generate per request (default: 64; sharegpt: as in the file)",
    )
    group.add_argument(
        "--spread", type=float, default=0.0, metavar="X", help="vary lengths by ± this fraction (default: 0)"
    )
    group.add_argument(
        "--num-groups", type=int, default=8, metavar="N", help="shared-prefix: number of prefixes (default: 8)"
    )
    group.add_argument(
        "--prefix-len", type=int, default=256, metavar="N", help="shared-prefix: tokens per prefix (default: 256)"
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="sharegpt: maximum prompt + output tokens (default: 2048)",
    )


def _add_serving(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serving")
    group.add_argument("--model", metavar="NAME", help="model name (default: the first that the server lists)")
    group.add_argument("--chat", action="store_true", help="use /v1/chat/completions instead of /v1/completions")
    text = "request rate per second, Poisson arrivals (default: inf, all at once)"
    group.add_argument("--rate", type=float, default=float("inf"), metavar="R", help=text)
    group.add_argument("--max-concurrency", type=int, metavar="N", help="maximum concurrent requests")
    group.add_argument("--warmup", type=int, default=1, metavar="N", help="warm-up requests, not measured (default: 1)")
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="timeout of one request in seconds (default: 600)"
    )
    group.add_argument("--extra", default="{}", metavar="JSON", help="extra fields of every request body")
    group.add_argument("--stop-at-eos", action="store_true", help="stop at EOS (default: send ignore_eos)")


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
        raise UsageError("--dataset sharegpt requires --dataset-path FILE, and the other way round")
    is_url = args.target.startswith(("http://", "https://"))
    if is_url != (args.kind == "serving"):
        what = "the address of a server, http://..." if args.kind == "serving" else "the directory of a checkpoint"
        raise UsageError(f"bench {args.kind} expects {what}, not {args.target!r}")
