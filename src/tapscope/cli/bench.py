"""`tapscope bench`: benchmark a server under load or the engine against hardware limits; compare results across
commits."""

import argparse
import json
import os
import time
from pathlib import Path

from tapscope._version import __version__
from tapscope.cli import (
    bench_baseline,
    bench_history,
    bench_measurements,
    bench_report,
    capture_flags,
    diagnostics,
    output,
    report_files,
)
from tapscope.cli.diagnostics import ExitCode
from tapscope.core import extras
from tapscope.core.deprecation import deprecated_flag
from tapscope.core.errors import UsageError

_KINDS = ("serving", "batch", "latency", "history")
SCHEMA = "tapscope.bench/1"
_DATASETS = ("random", "shared-prefix", "multi-turn", "sharegpt", "trace", "openai")
_FILES = {"sharegpt": "ShareGPT JSON", "trace": "Mooncake JSON lines", "openai": "bodies or Batch API as JSON lines"}
_NUM_PROMPTS = 64


class BenchCommand:
    """Benchmark a server or the engine, or show results over commits.

      $ tapscope bench serving http://127.0.0.1:8000 --max-concurrency 64
      $ tapscope bench serving URL --dataset sharegpt --dataset-path talks.json
      $ tapscope bench serving URL --dataset trace --dataset-path trace.jsonl
      $ tapscope bench serving URL --baseline last.json --tolerance 0.1
      $ tapscope bench batch MODEL --num-prompts 64 --dataset shared-prefix
      $ tapscope bench latency MODEL --batch-size 8 --input-len 512 --output-len 64
      $ tapscope bench history results --html history.html
      $ tapscope bench history results --baseline 1a2b3c4 --target 5d6e7f8

    serving sends requests to any OpenAI-compatible server. Its API key is read from TAPSCOPE_API_KEY or
    OPENAI_API_KEY.

    batch measures the engine's throughput, latency the time of one batch. Percentages are relative to the memory
    bandwidth and FLOP/s of this machine, measured just before.

    history compares two commits, by default the last two. It reads files, folders and ZIP archives with the JSON of
    tapscope bench, of SGLang's bench_serving, bench_one_batch_server and nightly metrics, and of vLLM's bench.

    Exit code 1: a metric is worse than --baseline by more than --tolerance, in history by more than the noise band.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument("kind", choices=_KINDS, metavar="KIND", help="serving, batch, latency or history")
        parser.add_argument(
            "target",
            metavar="URL|MODEL|PATH",
            nargs="+",
            help="URL of a server, a checkpoint directory, or for history files and folders of results",
        )
        parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the result as JSON")
        parser.add_argument("--html", type=Path, metavar="FILE", help="also write a self-contained HTML report")
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
        parser.add_argument(
            "--seed", type=int, default=0, metavar="N", help="seed of prompts and arrival times (default: 0)"
        )
        parser.add_argument(
            "--metadata",
            metavar="KEY=VALUE",
            action="append",
            default=[],
            help="metadata of the result: commit, branch, hardware, variant, run_url or any other; repeatable "
            "(GitHub Actions and GitLab CI: commit, branch and run are known)",
        )
        _add_baseline(parser)
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
        """Run the measurement, print the result and write its files. Exit code 4 if requests failed, 1 for a
        regression."""
        if args.html is not None:
            report_files.check(args)
        if args.kind == "history":
            return bench_history.run(args)
        if len(args.target) > 1:
            raise UsageError(f"bench {args.kind} measures one target, not {len(args.target)}")
        args.target = args.target[0]
        metadata = _metadata(args.metadata)
        _check(args)
        baseline = None if args.baseline is None else bench_baseline.read(Path(args.baseline))
        if args.kind != "serving":  # bench serving does not need torch
            extras.require("engine", f"tapscope bench {args.kind}")
        measured = bench_measurements.RUNS[args.kind](args)
        result = {
            "schema": SCHEMA,
            "kind": args.kind,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "tapscope": __version__,
            "target": args.target,
            "seed": args.seed,
            "metadata": metadata,
        } | measured
        if baseline is not None:
            result["baseline"] = bench_baseline.compare(baseline, result, Path(args.baseline), args.tolerance)
        if args.json:
            output.write_json(result)
        else:
            for line in bench_report.lines(result):
                output.write_line(line)
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            diagnostics.note(f"written: {args.out}")
        if args.html is not None:
            bench_history.write_result(args.html, result)
        if result.get("failed"):
            return ExitCode.LIVE
        is_worse = baseline is not None and result["baseline"]["num_regressions"]
        return ExitCode.DIFFERENT if is_worse else ExitCode.OK


def _add_baseline(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("baseline")
    text = (
        "result to compare with: a JSON file of -o; exit code 1 if a metric is worse by more than --tolerance. "
        "history: a commit, its first characters, or the name of a folder of results (default: the last but one)"
    )
    group.add_argument("--baseline", metavar="FILE|COMMIT", help=text)
    text = "relative change for the worse that is accepted (default: 0.05)"
    group.add_argument("--tolerance", type=float, default=0.05, metavar="X", help=text)
    group.add_argument(
        "--target", dest="target_commit", metavar="COMMIT", help="history: as --baseline (default: the last)"
    )
    group.add_argument("--all", action="store_true", help="history: also print what is within the noise band")


def _metadata(words: list[str]) -> dict[str, str]:
    """Return metadata from the environment of the CI job, overridden by ``--metadata``; raises UsageError."""
    known = {
        "commit": os.environ.get("GITHUB_SHA") or os.environ.get("CI_COMMIT_SHA"),
        "branch": os.environ.get("GITHUB_REF_NAME") or os.environ.get("CI_COMMIT_REF_NAME"),
        "run_id": os.environ.get("GITHUB_RUN_ID") or os.environ.get("CI_PIPELINE_ID"),
        "run_url": os.environ.get("CI_PIPELINE_URL"),
    }
    server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if server and repository and known["run_id"]:
        known["run_url"] = f"{server}/{repository}/actions/runs/{known['run_id']}"
    metadata = {name: value for name, value in known.items() if value}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or not name.strip():
            raise UsageError(f"invalid metadata {word!r}: expected KEY=VALUE")
        metadata[name.strip()] = value.strip()
    return metadata


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--dataset",
        choices=_DATASETS,
        default="random",
        metavar="NAME",
        help=f"source of the prompts: {', '.join(_DATASETS)} (default: random)",
    )
    group.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="file of the dataset: " + "; ".join(f"{name}: {form}" for name, form in _FILES.items()),
    )
    group.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="tokenizer that counts tokens (default: the model's)"
    )
    text = (
        f"number of requests; multi-turn: of conversations (default: {_NUM_PROMPTS}; trace and openai: all of the file)"
    )
    group.add_argument("--num-prompts", type=int, metavar="N", help=text)
    group.add_argument("--input-len", type=int, default=128, metavar="N", help="tokens per prompt (default: 128)")
    group.add_argument(
        "--output-len",
        type=int,
        metavar="N",
        help="tokens to generate per request (default: 64; sharegpt, trace and openai: as in the file)",
    )
    group.add_argument(
        "--spread", type=float, default=0.0, metavar="X", help="vary lengths by ± this fraction (default: 0)"
    )
    group.add_argument(
        "--num-groups", type=int, default=8, metavar="N", help="shared-prefix: number of prefixes (default: 8)"
    )
    group.add_argument(
        "--prefix-len",
        type=int,
        default=256,
        metavar="N",
        help="tokens per prefix of shared-prefix, and before the first turn of multi-turn (default: 256)",
    )
    group.add_argument(
        "--num-turns", type=int, default=4, metavar="N", help="multi-turn: turns of a conversation (default: 4)"
    )
    text = "multi-turn: seconds between an answer and the next turn (default: 0)"
    group.add_argument("--turn-delay", type=float, default=0.0, metavar="SECONDS", help=text)
    text = "trace: tokens of a block that has a hash id (default: 512)"
    group.add_argument("--trace-block-size", type=int, default=512, metavar="N", help=text)
    text = "trace: factor on arrival times (default: 1; 0 sends all at once)"
    group.add_argument("--trace-slowdown", type=float, default=1.0, metavar="X", help=text)
    text = (
        "LoRA adapter; each request gets one of those given, drawn at random (repeatable). batch and latency: NAME=DIR"
    )
    group.add_argument("--lora", action="append", default=[], metavar="NAME", help=text)
    text = "record a trace of torch's profiler: the server's, or in batch and latency in --profile-dir"
    group.add_argument("--profile", action="store_true", help=text)
    text = "batch and latency: directory of the trace (default: profile)"
    group.add_argument("--profile-dir", type=Path, default=Path("profile"), metavar="DIR", help=text)
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
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="timeout of one request (default: 600)"
    )
    group.add_argument("--extra", default="{}", metavar="JSON", help="extra fields of every request body")
    group.add_argument("--stop-at-eos", action="store_true", help="stop at EOS (default: send ignore_eos)")


def _check(args: argparse.Namespace) -> None:
    least_one = ("num_prompts", "input_len", "num_groups", "num_turns", "trace_block_size")
    for name in (*least_one, "batch_size", "repeat", "max_num_seqs", "tp"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if args.output_len is not None and args.output_len < 1:
        raise UsageError(f"--output-len is {args.output_len}; it must be at least 1")
    if not 0 <= args.spread < 1:
        raise UsageError(f"--spread is {args.spread}; it must be from 0 to below 1")
    if not args.rate > 0:
        raise UsageError(f"--rate is {args.rate}; it must be above 0")
    for name in ("turn_delay", "trace_slowdown", "tolerance", "prefix_len"):
        if getattr(args, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 0")
    if args.dataset in _FILES and args.dataset_path is None:
        raise UsageError(f"--dataset {args.dataset} requires --dataset-path FILE")
    if args.dataset not in _FILES and args.dataset_path is not None:
        raise UsageError(f"--dataset {args.dataset} has no file; use --dataset {', '.join(_FILES)}")
    if args.dataset == "trace" and args.rate != float("inf"):
        raise UsageError("--dataset trace has its own arrival times; use --trace-slowdown instead of --rate")
    if args.kind != "serving" and args.dataset in ("multi-turn", "openai"):
        raise UsageError(f"--dataset {args.dataset} needs a server; use bench serving")
    if args.kind != "serving" and any("=" not in name for name in args.lora):
        raise UsageError(f"bench {args.kind} loads adapters itself; use --lora NAME=DIR")
    if args.num_prompts is None and args.dataset not in ("trace", "openai"):
        args.num_prompts = _NUM_PROMPTS
    is_url = args.target.startswith(("http://", "https://"))
    if is_url != (args.kind == "serving"):
        what = "the address of a server, http://..." if args.kind == "serving" else "the directory of a checkpoint"
        raise UsageError(f"bench {args.kind} expects {what}, not {args.target!r}")
