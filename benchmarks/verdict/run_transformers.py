"""Runs of a transformers model over a workload, captured in full."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.verdict.fused import fuse
from benchmarks.verdict.patching import Patch, applied
from benchmarks.verdict.setup import Setup
from benchmarks.verdict.tools import cache_argument
from benchmarks.verdict.trainer import Trainer
from benchmarks.verdict.workload import BOS, Request, requests
from tapscope import Dumper
from tapscope.core.observe import RowSpan, StepInfo
from tapscope.core.token_rows import padded_step
from tapscope.dumper.steps.input_rows import cache_of

CHUNK = 5
NUM_STEPS = 3
"""Number of optimizer steps."""


def load(checkpoint: Path, setup: Setup) -> Any:
    """Load the model of a checkpoint."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype = getattr(torch, setup.dtype)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation=setup.attention).eval()
    if setup.dtype == "float64" and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch has no grouped GEMM in float64
    return (fuse(model) if setup.fused else model).to(setup.device)


def run_transformers(checkpoint: Path, setup: Setup, out: Path, patch: Patch | None = None) -> None:
    """Capture one run to ``out``; with an optimizer, ``patch`` is called with the Trainer."""
    model, work = load(checkpoint, setup), requests(setup.workload, setup.seed, setup.order)
    if setup.optimizer:
        _train(model, setup, out, patch)
        return
    with applied(patch, model), Dumper(model, out, keep="full", grads=setup.train, params=setup.train) as dumper:
        for group in [[r] for r in work] if setup.batch == "separate" else [work]:
            _run_group(model, dumper, group, setup)


def _run_group(model: Any, dumper: Dumper, group: Sequence[Request], setup: Setup) -> None:
    """Run the requests of one batch, from prefill to the last decode step."""
    if setup.batch == "packed":
        _run_packed(model, dumper, group, setup)
        return
    cache: Any = None
    cache_name = cache_argument(model)
    as_tensor = partial(torch.tensor, device=model.device)
    generated = [list(r.forced) for r in group]
    for call in _calls(group, setup, generated):
        info = padded_step(dumper.next_step, call.phase, call.ids, call.positions, call.valid, [r.name for r in group])
        extra = {"attention_mask": as_tensor(call.mask), "use_cache": setup.schedule != "whole"}
        given = {"input_ids": as_tensor(call.ids), "position_ids": as_tensor(call.positions)} | extra
        with dumper.step_of(info) if setup.named else nullcontext(), _autocast(setup):
            if setup.train:
                _backward(model(**given).logits, call.ids, call.valid)
            else:
                with torch.no_grad():
                    output = model(**given, **({} if cache is None else {cache_name: cache}))
                cache = cache_of(output)
                if setup.greedy and call.at >= 0:
                    for tokens, best in zip(generated, output.logits[:, -1].argmax(-1).tolist(), strict=True):
                        tokens[call.at : call.at + 1] = [best]
        model.zero_grad(set_to_none=True)


def _train(model: Any, setup: Setup, out: Path, patch: Patch | None) -> None:
    """Run the optimizer steps, each over its own requests."""
    trainer = Trainer(
        model, setup.optimizer, master=setup.master, foreach=setup.update == "foreach", fused=setup.update == "fused"
    )
    trainer.num_micros = setup.micros
    as_tensor = partial(torch.tensor, device=model.device)
    with applied(patch, trainer), Dumper(model, out, keep="full", grads=True, params=True) as dumper:
        for step in range(NUM_STEPS):
            groups = [requests(setup.workload, _seed(setup, step, i), setup.order) for i in range(setup.micros)]
            (first, *_), *_ = calls = [list(_calls(group, setup, ())) for group in groups]
            names = [r.name for r in groups[0]]
            info = padded_step(step, "train", first.ids, first.positions, first.valid, names)
            with dumper.step_of(info), _autocast(setup):
                for i, (call,) in enumerate(calls):
                    with dumper.micro(i):
                        given = {"input_ids": as_tensor(call.ids), "position_ids": as_tensor(call.positions)}
                        logits = model(**given, attention_mask=as_tensor(call.mask), use_cache=False).logits
                        trainer.loss(logits, _labels(call.ids, call.valid).to(logits.device)).backward()
                trainer.step()
            trainer.zero_grad()


def _seed(setup: Setup, step: int, micro: int) -> int:
    return setup.seed + 100 * step + 10000 * micro


def _autocast(setup: Setup) -> AbstractContextManager[Any]:
    return torch.autocast(setup.device, getattr(torch, setup.autocast)) if setup.autocast else nullcontext()


def _run_packed(model: Any, dumper: Dumper, group: Sequence[Request], setup: Setup) -> None:
    """Run all requests packed in one row, separated only by their positions."""
    rows, ids, positions = [], [], []
    for request in group:
        rows.append(RowSpan(request.name, 0, len(request.tokens), 0, len(ids)))
        ids += request.tokens
        positions += range(len(request.tokens))
    info = StepInfo(step=dumper.next_step, phase="prefill", grid=(1, len(ids)), rows=tuple(rows), token_ids=tuple(ids))
    with dumper.step_of(info), torch.set_grad_enabled(setup.train):
        given = torch.tensor([ids], device=model.device), torch.tensor([positions], device=model.device)
        logits = model(input_ids=given[0], position_ids=given[1], use_cache=False).logits
        if setup.train:
            valid = [[True] * len(ids)]
            for run in rows[1:]:
                valid[0][run.slot] = False  # the previous token belongs to another request
            _backward(logits, [ids], valid)


def _backward(logits: torch.Tensor, ids: list[list[int]], valid: list[list[bool]]) -> None:
    """Run the backward of the mean cross-entropy over every next token of the same request."""
    flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    labels = _labels(ids, valid).reshape(-1).to(logits.device)
    torch.nn.functional.cross_entropy(flat, labels, ignore_index=-100).backward()


def _labels(ids: list[list[int]], valid: list[list[bool]]) -> torch.Tensor:
    """Return the next-token labels; -100 where the token or its successor is padding."""
    known = torch.tensor(valid)
    return torch.tensor(ids)[:, 1:].masked_fill(~(known[:, 1:] & known[:, :-1]), -100)


@dataclass(frozen=True, slots=True)
class _Call:
    phase: str
    ids: list[list[int]]
    positions: list[list[int]]
    valid: list[list[bool]]
    mask: list[list[int]]
    """Attention mask over all tokens fed so far."""
    at: int
    """Index of the generated token that the last logits predict; negative while the prompt is incomplete."""


def _calls(group: Sequence[Request], setup: Setup, generated: Sequence[Sequence[int]]) -> Iterator[_Call]:
    """Yield the forwards of one padded batch.

    ``generated`` holds the tokens after each prompt by the time they are fed.
    """
    whole = setup.schedule == "whole"
    first = [list(r.tokens if whole else r.prompt) for r in group]
    width = max(map(len, first))
    right = setup.batch == "right"
    pads = [width - len(ids) for ids in first]
    ids = [_pad(row, [BOS] * pad, right) for row, pad in zip(first, pads, strict=True)]
    valid = [_pad([True] * len(row), [False] * pad, right) for row, pad in zip(first, pads, strict=True)]
    positions = [_pad(list(range(len(row))), [0] * pad, right) for row, pad in zip(first, pads, strict=True)]
    mask: list[list[int]] = [[] for _ in group]
    chunk = CHUNK if setup.schedule == "chunks" else width
    for start in range(0, width, chunk):
        part = slice(start, min(start + chunk, width))
        seen = [row[part] for row in valid]
        mask = [old + [int(v) for v in new] for old, new in zip(mask, seen, strict=True)]
        yield _Call(
            "prefill", [r[part] for r in ids], [r[part] for r in positions], seen, mask, 0 if part.stop == width else -1
        )
    for at in range(0 if whole else max(len(r.forced) for r in group)):
        mask = [[*row, 1] for row in mask]
        now = [[len(r.prompt) + at] for r in group]
        yield _Call("decode", [[tokens[at]] for tokens in generated], now, [[True]] * len(group), mask, at + 1)


def _pad(row: list[Any], padding: list[Any], right: bool) -> list[Any]:
    return row + padding if right else padding + row
