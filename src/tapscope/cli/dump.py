"""`tapscope dump`: run a model once and record its tensors."""

import argparse
import json
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tapscope.cli import capture_flags, diagnostics, output, prompts, reference
from tapscope.cli.diagnostics import ExitCode
from tapscope.core import extras, formatting
from tapscope.core.errors import TapscopeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tapscope.dumper import DumperConfig
    from tapscope.engine import Generation
    from tapscope.engine.requests.per_token_outputs import RoutedExperts


class DumpCommand:
    """Run a model once with greedy decoding and record its tensors.

    The backend is tapscope's engine, or transformers as the reference:

      $ tapscope dump MODEL -o base --backend hf --prompt 'def main():'
      $ tapscope dump MODEL -o target --tp 2 --dtype bfloat16 --tokens-from base
      $ tapscope diff base target
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        capture_flags.add_model_flags(parser)
        parser.add_argument("-o", "--out", type=Path, required=True, metavar="RUN", help="directory of the new run")
        add_workload_flags(parser)
        capture_flags.add_selection_flags(parser, keep="full")

    def run(self, args: argparse.Namespace) -> int:
        """Capture, print the generated text and the suggested next command."""
        with _closing_log_off():  # _report prints the same information
            outputs = record(args, prompts.workload(args))
        for request, new in outputs.items():
            output.write_line(f"{request}: {json.dumps(new, ensure_ascii=False)}")
        return _report(args.out)


@contextmanager
def _closing_log_off() -> Iterator[None]:
    log = logging.getLogger("tapscope.closing")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for backend, adapter, requests and speculative decoding."""
    parser.add_argument(
        "--backend",
        choices=("engine", "hf"),
        default="engine",
        help="what runs the model: tapscope's engine or transformers (default: engine)",
    )
    text = "directory of a PEFT adapter to run every prompt with"
    parser.add_argument("--lora", type=Path, metavar="DIR", help=text)
    prompts.add_flags(parser)
    text = "use the expert ids that RUN recorded for the same requests, with weights from the current router logits"
    parser.add_argument("--experts-from", type=Path, metavar="RUN", help=text)
    capture_flags.add_speculative_flags(parser)


def record(args: argparse.Namespace, work: prompts.Workload) -> dict[str, str]:
    """Run the model and record it into ``args.out``; returns request id -> generated text."""
    extras.require("hf" if args.backend == "hf" else "engine", f"--backend {args.backend}")
    from tapscope.dumper.pipeline.recorder_process import require_free

    config = capture_flags.config(args)
    require_free(args.out, force=args.force)
    capture_with = _with_transformers if args.backend == "hf" else _with_engine
    signal.signal(signal.SIGTERM, _interrupt)  # sent by CI on timeout; close the run cleanly
    try:
        return capture_with(args, config, work)
    except KeyboardInterrupt:
        _warn_interrupted(args.out)
        raise
    except TapscopeError:
        _discard_if_empty(args.out)
        raise


def _with_engine(args: argparse.Namespace, config: "DumperConfig", work: prompts.Workload) -> dict[str, str]:
    from tapscope.dumper import make_observer
    from tapscope.engine import LLM

    observer = partial(make_observer, out=str(args.out.absolute()), config=config, force=args.force)
    folder = Path(args.model)
    is_checkpoint, has_tokenizer = ((folder / name).exists() for name in ("config.json", "tokenizer.json"))
    if is_checkpoint and not has_tokenizer and any(isinstance(prompt, str) for prompt in work.prompts):
        raise UsageError(f"{args.model} has no tokenizer.json to encode the prompts; give token ids: --input-ids 1,2,3")
    experts = _experts(args, work)
    one_by_one = any(work.forced) or bool(experts)
    settings = {"logits": "all", "prefix_cache": False} | capture_flags.engine_settings(args)  # every row is computed
    settings |= capture_flags.speculative_settings(args)
    adapter = _adapter_name(args)
    settings |= {"lora_paths": {adapter: args.lora}, "max_loras_per_batch": 1} if adapter else {}
    with LLM(args.model, observer=observer, **settings) as llm:
        if one_by_one:
            ids = [
                llm.submit(
                    p,
                    max_new_tokens=n,
                    request_id=name,
                    forced_token_ids=f,
                    ignore_eos=any(work.forced),
                    adapter=adapter,
                    experts=experts.get(name),
                )
                for p, n, name, f in zip(work.prompts, work.max_new_tokens, work.request_ids, work.forced, strict=True)
            ]
            done: dict[str, str] = {}
            while llm.has_work:
                done |= {generation.request: _text(generation) for generation in llm.step()}
            return {name: done[name] for name in ids}
        generated = llm.generate(
            work.prompts, max_new_tokens=work.max_new_tokens[0], request_ids=work.request_ids, adapter=adapter
        )
        return {generation.request: _text(generation) for generation in generated}


def _experts(args: argparse.Namespace, work: prompts.Workload) -> "Mapping[str, RoutedExperts]":
    """Return request id -> expert ids of --experts-from; raises UsageError, DataError or CheckpointError."""
    path = getattr(args, "experts_from", None)
    if path is None:
        return {}
    from tapscope.cli.recorded_experts import read_experts
    from tapscope.engine.hf_config.model_config import ModelConfig

    model = ModelConfig.read(Path(args.model))
    if model.moe is None:
        raise UsageError(f"--experts-from: {model.architecture} has no experts")
    experts = read_experts(path, model.num_layers, model.moe.top_k)
    unknown = [name for name in work.request_ids if name not in experts]
    if unknown:
        raise UsageError(f"--experts-from {path} has no request {unknown[0]}; it has {', '.join(experts)}")
    return experts


def _adapter_name(args: argparse.Namespace) -> str:
    """Return the name under which the adapter of --lora is recorded: its directory name."""
    return "" if args.lora is None else capture_flags.checkpoint_name(args.lora).replace("=", "-")


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _warn_interrupted(path: Path) -> None:
    if (path / "run.json").is_file():
        from tapscope.sources import open_run

        with open_run(path) as run:
            diagnostics.warn(f"interrupted: {path} is incomplete, {formatting.plural(len(run.steps), 'step')} recorded")


def _discard_if_empty(path: Path) -> None:
    """Remove a run that failed before its first step, so that a corrected command can use the same directory."""
    from tapscope.run_format.directory import clear_run
    from tapscope.sources import open_run

    if not (path / "run.json").is_file():
        return
    with open_run(path) as run:
        empty = not run.steps
    if empty:
        clear_run(path, force=True)
        (path / ".lock").unlink(missing_ok=True)
        if not any(path.iterdir()):
            path.rmdir()


def _text(generation: "Generation") -> str:
    return " ".join(map(str, generation.token_ids)) if generation.text is None else generation.text


def _with_transformers(args: argparse.Namespace, config: "DumperConfig", work: prompts.Workload) -> dict[str, str]:
    from tapscope.dumper import Dumper

    if (args.tp, args.ep) != (1, 1):
        raise UsageError("--backend hf runs on one rank; remove --tp and --ep, or use --backend engine")
    if args.set:
        raise UsageError(f"--backend hf has no engine settings; remove --set {args.set[0]}, or use --backend engine")
    if args.kv_cache_dtype != "auto" or args.quantization_param_path is not None:
        raise UsageError(
            "--backend hf keeps the KV cache in --dtype; remove --kv-cache-dtype and --quantization-param-path"
        )
    if getattr(args, "experts_from", None) is not None:
        raise UsageError("--backend hf chooses its own experts; remove --experts-from, or use --backend engine")
    if speculative := capture_flags.speculative_settings(args):
        raise UsageError(f"--backend hf does not speculate; remove --{next(iter(speculative)).replace('_', '-')}")
    model = reference.load(args.model, args.dtype, args.lora)
    ids = reference.encode(args.model, work.prompts)
    with Dumper(model, args.out, config=config, force=args.force) as dumper:
        new = reference.generate(model, ids, work, dumper, _adapter_name(args))
    return reference.decode(args.model, new)


def _report(path: Path) -> int:
    from tapscope.sources import open_run

    with open_run(path) as run:
        account = run.ledger()
        compared = [e.fields for e in run.events() if e.kind == "comparison"]
        nbytes = sum({(r.key.rank, r.entry): r.nbytes for r in run.records if r.entry}.values())
        records, steps = formatting.plural(len(run.records), "record"), formatting.plural(len(run.steps), "step")
        what = f"{records}, {steps}, {formatting.size(nbytes)}"
    diagnostics.note(f"recorded {what} into {path}")
    for sentence in account.sentences():
        diagnostics.warn(sentence)
    if not run.records:
        return ExitCode.DIFFERENT
    for fields in compared:
        output.write_lines(json.dumps(fields, ensure_ascii=False))
    diagnostics.note(f"next: tapscope view {path}")
    is_fine = account.complete and all(fields["verdict"] == "agrees" for fields in compared)
    return ExitCode.OK if is_fine else ExitCode.DIFFERENT
