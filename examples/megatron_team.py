"""Persistent ranks of a Megatron-core job on this machine, which run and capture one job after another.

    python examples/megatron_team.py CHECKPOINT OUT [--tp 2 | --pp 2 | --ep 2 | --cp 2] [--dtype bfloat16] [--backward]

Importing Megatron takes seconds, capturing a small model far less than one. A team therefore serves many jobs::

    with Team(tp=2) as team:
        team.capture(Job(checkpoint="tiny", out="run-megatron", prompts={"0": [1, 2, 3]}))
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

PROMPTS = {"0": list(range(3, 21)), "1": list(range(40, 49))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Settings of one capture."""

    checkpoint: str
    """Directory of a Hugging Face checkpoint: llama, qwen2, qwen3 or qwen3_moe."""
    out: str
    """Directory of the run; an existing run is replaced."""
    prompts: Mapping[str, Sequence[int]] = field(default_factory=lambda: PROMPTS)
    """Token ids by request, run as one right-padded batch."""
    dtype: str = "float32"
    backward: bool = False
    """Also run backward of the mean next-token cross-entropy and record the gradients of ports and parameters."""
    num_steps: int = 1
    """Number of steps over the same prompts; weights are not updated."""
    sequence_parallel: bool = False
    patch: str | None = None
    """``FILE.py:FUNCTION``, called with the built model on every rank to seed a bug."""
    settings: Mapping[str, Any] = field(default_factory=lambda: {"keep": "full"})
    """Keyword arguments of the Dumper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes; at most one of ``pp``, ``ep`` and ``cp`` exceeds 1."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tp * self.pp * self.ep * self.cp


class Team:
    """Ranks of one layout, started once and reused by every job; a context manager."""

    def __init__(self, tp: int = 1, *, pp: int = 1, ep: int = 1, cp: int = 1, timeout_s: float = 300.0) -> None:
        self.layout, self.timeout_s = Layout(tp=tp, pp=pp, ep=ep, cp=cp), timeout_s
        self._ranks: list[tuple[Any, Connection]] = []

    def __enter__(self) -> "Team":
        self._folder = tempfile.TemporaryDirectory(prefix="megatron-team-")
        context, store = multiprocessing.get_context("spawn"), f"{self._folder.name}/store"
        for rank in range(self.layout.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.layout, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        return self

    def __exit__(self, *exc: object) -> None:
        for process, pipe in self._ranks:
            pipe.close()  # the rank reads end-of-file and exits
            process.join(10)
            if process.is_alive():
                process.kill()
        self._ranks.clear()
        self._folder.cleanup()

    def capture(self, job: Job) -> str:
        """Run ``job`` on every rank and return the path of its run.

        Raises RuntimeError if a rank fails, with its traceback, or does not answer within ``timeout_s``.
        """
        for _, pipe in self._ranks:
            pipe.send(job)
        answers = []
        for rank, (_, pipe) in enumerate(self._ranks):
            if not pipe.poll(self.timeout_s):
                raise RuntimeError(f"rank {rank} of {self.layout.size} did not answer within {self.timeout_s:.0f} s")
            answers.append(pipe.recv())
        if problems := [f"rank {rank}: {text}" for rank, text in enumerate(answers) if text]:
            raise RuntimeError("\n".join(problems))
        return job.out


def _serve(rank: int, layout: Layout, store: str, pipe: Connection) -> None:
    """Run jobs on one rank until the pipe is closed."""
    _join(rank, layout, store)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            break
        try:
            run(job)
        except Exception:  # noqa: BLE001 - every error is reported to the caller
            pipe.send(traceback.format_exc(limit=-6))
        else:
            pipe.send("")
    import torch

    torch.distributed.destroy_process_group()


def _join(rank: int, layout: Layout, store: str) -> None:
    """Initialize the process groups through the file ``store``.

    With a TCP rendezvous, another team may take the free port before rank 0 binds it.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(layout.size))
    warnings.simplefilter("ignore")  # Megatron warns a dozen times about missing GPU libraries
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=layout.size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        context_parallel_size=layout.cp,
    )
    initialize_rng_tracker(inference_rng_tracker=True)  # otherwise dropout requests a CUDA generator


def run(job: Job) -> None:
    """Build, patch and capture the model on this rank."""
    from pathlib import Path

    import torch
    from megatron_llama import build
    from megatron_steps import distributed, inputs_of_this_rank, train_step

    from tapscope import Dumper

    model = build(Path(job.checkpoint), dtype=job.dtype, sequence_parallel=job.sequence_parallel)
    if job.patch is not None:
        load_patch(job.patch)(model)
    ddp_model = distributed(model)
    inputs = inputs_of_this_rank(job.prompts, is_sequence_parallel=job.sequence_parallel)
    with Dumper(model, job.out, force=True, **_settings(job)) as dumper:
        for _ in range(job.num_steps):
            with torch.set_grad_enabled(job.backward), dumper.step(**inputs.step):
                value = train_step(ddp_model, inputs, getattr(torch, job.dtype), is_backward=job.backward)
                if value is not None:
                    dumper.metric("loss", value)
            ddp_model.zero_grad_buffer()


def run_transformers(job: Job) -> None:
    """Capture ``job`` with transformers in this process; ``patch`` is called with the transformers model."""
    import torch
    from transformers import AutoModelForCausalLM

    from tapscope import Dumper

    model = AutoModelForCausalLM.from_pretrained(
        job.checkpoint, attn_implementation="eager", dtype=getattr(torch, job.dtype)
    ).eval()
    if job.patch is not None:
        load_patch(job.patch)(model)
    ids, step = batch(job.prompts)
    mask = torch.tensor([[1] * len(p) + [0] * (ids.shape[1] - len(p)) for p in job.prompts.values()])
    with Dumper(model, job.out, force=True, **_settings(job)) as dumper:
        for _ in range(job.num_steps):
            with torch.set_grad_enabled(job.backward), dumper.step(**step):
                logits = model(input_ids=ids, attention_mask=mask).logits
                if job.backward:
                    loss(logits, job.prompts).backward()
            model.zero_grad()


def _settings(job: Job) -> dict[str, Any]:
    return ({"grads": True, "params": True} if job.backward else {}) | dict(job.settings)


def batch(prompts: Mapping[str, Sequence[int]], multiple_of: int = 1, at_least: int = 0) -> tuple[Any, dict[str, Any]]:
    """Return right-padded token ids [b, s] and the matching arguments of ``dumper.step``.

    s is at least ``at_least``, rounded up to a multiple of ``multiple_of``.
    """
    import torch

    from tapscope.core.observe import RowSpan

    length = -(-max(at_least, *map(len, prompts.values())) // multiple_of) * multiple_of
    ids = torch.tensor([[*tokens, *[0] * (length - len(tokens))] for tokens in prompts.values()])
    rows = [RowSpan(name, 0, len(tokens), 0, i * length) for i, (name, tokens) in enumerate(prompts.items())]
    token_ids = [token for tokens in prompts.values() for token in tokens]
    return ids, {"phase": "prefill", "grid": tuple(ids.shape), "rows": rows, "token_ids": token_ids}


def loss(logits: Any, prompts: Mapping[str, Sequence[int]], num_labels: int | None = None) -> Any:
    """Return the next-token cross-entropy of ``logits`` [b, s, v], summed and divided by ``num_labels``.

    ``num_labels`` defaults to the number of labels in ``prompts``.
    """
    import torch

    rows = [logits[i, : len(tokens) - 1] for i, tokens in enumerate(prompts.values())]
    labels = torch.cat([torch.tensor(tokens[1:]) for tokens in map(list, prompts.values())])
    total = torch.nn.functional.cross_entropy(torch.cat(rows).float(), labels, reduction="sum")
    return total / (num_labels or len(labels))


def load_patch(text: str) -> Callable[[Any], object]:
    """Import the function that ``FILE.py:FUNCTION`` names.

    Raises ValueError if FILE is not a Python file.
    """
    file, _, name = text.rpartition(":")
    spec = importlib.util.spec_from_file_location("_patch", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{text!r} names no Python file; write FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    patch: Callable[[Any], object] = getattr(module, name)
    return patch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("out")
    for axis in ("tp", "pp", "ep", "cp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--prompts", type=json.loads, default=PROMPTS, help="JSON object: token ids by request")
    parser.add_argument("--patch", help="FILE.py:FUNCTION, called with the model on every rank")
    options = vars(parser.parse_args())
    with Team(**{axis: options.pop(axis) for axis in ("tp", "pp", "ep", "cp")}) as team:
        print(f"next: tapscope ls {team.capture(Job(**options))}")


if __name__ == "__main__":
    main()
