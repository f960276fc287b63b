"""Correctness check of cuda_capture.py: every captured tensor equals a synchronous copy, under memory pressure."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tapscope.dumper import Dumper
from tapscope.run_format.run import Run
from tapscope.sources import open_run

GiB = 1 << 30
PROOFS: list[tuple[int, dict[str, Any]]] = [  # free device memory in bytes, settings
    (20 * GiB, {}),
    (20 * GiB, {"shm_bytes": 0}),
    (20 * GiB, {"device_staging_bytes": 0}),
    (2 * GiB, {}),
    (GiB // 4, {}),
]


def synchronous_copies(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return ``SITE#OCCURRENCE`` -> a copy of the output, made by a hook that synchronizes."""
    copies: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}

    def hook_for(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            number = counts[name] = counts.get(name, -1) + 1
            outputs = {f"out[{n}]": value for n, value in enumerate(output)} if isinstance(output, tuple) else {}
            for port, value in {"in": args[0] if args else None, "out": output, **outputs}.items():
                if isinstance(value, torch.Tensor):
                    copies[f"{name}:{port}#{number}"] = value.detach().cpu()

        return hook

    handles = [module.register_forward_hook(hook_for(name)) for name, module in model.named_modules() if name]
    model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return copies


def scribble(model: nn.Module) -> list[RemovableHandle]:
    """Register hooks that twice allocate memory of a module's output size, fill it with NaN and free it.

    A clone that is freed too early would then be overwritten before it is copied.
    """

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            first = torch.full_like(output, torch.nan)
            torch.full_like(first, torch.nan)

    return [module.register_forward_hook(hook) for module in model.modules()]


def differences(run: Run, copies: dict[str, torch.Tensor]) -> tuple[int, list[str]]:
    """Return the number of compared records and a list of errors."""
    wrong, seen = [], set()
    for record in run.records:
        path, _, port = record.key.site.rpartition(":")
        kind = "in" if port.startswith("in[") else port
        key = f"{path}:{kind}#{record.key.occurrence}"
        if record.entry is None or key not in copies or (kind == "in" and key in seen):
            continue
        seen.add(key)
        expected = copies[key].contiguous().flatten().view(torch.uint8).numpy()
        if run.array(record).tobytes() != expected.tobytes():
            wrong.append(f"{key} differs from its synchronous copy")
    # A module may modify its inputs before it returns; inputs not captured by name are ignored.
    wrong += [f"{key} was not captured" for key in copies if key not in seen and ":out" in key]
    return len(seen), wrong


def prove(model: nn.Module, ids: torch.Tensor, args: argparse.Namespace, room: int, **settings: Any) -> list[str]:
    """Capture one forward with ``room`` bytes of free device memory, and compare with synchronous copies."""
    out = args.out / "proof"
    model(input_ids=ids, use_cache=False)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model(input_ids=ids, use_cache=False)
    peak, total = torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((peak + room) / total)
    queue = {"queue_bytes": 2 * GiB, "shm_bytes": GiB, "block_timeout_s": 120.0}
    try:
        with Dumper(model, out, force=True, keep="full", **(queue | settings)):
            handles = scribble(model) if room > GiB else []
            model(input_ids=ids, use_cache=False)
            for handle in handles:
                handle.remove()
        used = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        copies = synchronous_copies(model, ids)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    run = open_run(out)
    account = run.ledger()
    num_same, wrong = differences(run, copies)
    nbytes = sum(record.entry.nbytes for record in {r.entry: r for r in run.records if r.entry}.values())
    direct = sum(int(m.value or 0) for m in run.metrics() if m.name == "num_direct_copies")
    if not account.complete:
        wrong += account.sentences()
    print(
        f"proof, {room / GiB:.1f} GiB to spare, {settings}: {len(run.records)} records, {nbytes / 1e9:.2f} GB stored, "
        f"{num_same} tensors equal their synchronous copy, {direct} copied without a clone, {len(wrong)} wrong; "
        f"device memory {peak / GiB:.2f} GiB plain, {used / GiB:.2f} GiB captured",
        flush=True,
    )
    for sentence in wrong[:5]:
        print(f"  {sentence}")
    return wrong
