"""Cases of the floor sweep: benign changes, and damage that must be named."""

import copy
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tapscope import Dumper
from tapscope.core.observe import RowSpan
from tapscope.dumper.steps.input_rows import CACHE_ARGUMENTS

PROMPTS = (29, 29)
"""Tokens of each request; equal lengths, so that one batch needs no padding."""


@dataclass(frozen=True)
class Benign:
    """A benign difference between target and baseline, which causes only rounding errors."""

    name: str
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
    eager: bool = False
    schedule: str = "batch"
    tp: int = 1


_F, _B, _H = torch.float32, torch.bfloat16, torch.float16
BENIGN = (
    Benign("fp32 sdpa/eager", eager=True),
    Benign("fp32 batch split", schedule="split"),
    Benign("fp32 chunked", schedule="chunked"),
    Benign("fp32 TP2 sums", tp=2),
    Benign("fp32/bf16", (_F, _B)),
    Benign("fp32/fp16", (_F, _H)),
    Benign("fp32/bf16 eager TP2", (_F, _B), eager=True, tp=2),
    Benign("fp32/bf16 chunked", (_F, _B), schedule="chunked"),
    Benign("bf16 sdpa/eager", (_B, _B), eager=True),
    Benign("bf16 batch split", (_B, _B), schedule="split"),
    Benign("bf16 TP2 sums", (_B, _B), tp=2),
)


def capture(model: nn.Module, path: Path, schedule: str = "batch", seed: int = 0) -> Path:
    """Run the prompts through the model, keeping every tensor in full."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 250, (len(PROMPTS), max(PROMPTS)), generator=generator)
    with torch.no_grad(), Dumper(model, path, keep="full", force=True, block_timeout_s=60.0) as dumper:
        if schedule == "batch":
            _step(dumper, model, ids, ("0", "1"), 0, None)
        elif schedule == "split":
            for i in range(len(ids)):
                _step(dumper, model, ids[i : i + 1], (str(i),), 0, None)
        else:
            from transformers import DynamicCache

            cache = DynamicCache(config=model.config)
            for first, last in ((0, 11), (11, 22), (22, ids.shape[1])):
                _step(dumper, model, ids[:, first:last], ("0", "1"), first, cache)
    return path


def _step(dumper: Any, model: nn.Module, ids: torch.Tensor, names: tuple[str, ...], first: int, cache: Any) -> None:
    length = ids.shape[1]
    rows = [RowSpan(name, first, length, 0, i * length) for i, name in enumerate(names)]
    known = inspect.signature(type(model).forward).parameters
    more = {} if cache is None else {next(name for name in CACHE_ARGUMENTS if name in known): cache}
    with dumper.step(phase="prefill", rows=rows, grid=tuple(ids.shape)):
        model(input_ids=ids, use_cache=cache is not None, **more)


def changed(model: nn.Module, case: Benign) -> nn.Module:
    """Return a copy of the model with the changes of the target."""
    other = copy.deepcopy(model)
    if case.eager:
        other.set_attn_implementation("eager")
    if case.tp > 1:
        for name, module in other.named_modules():
            if isinstance(module, nn.Linear) and name.endswith(("o_proj", "down_proj", "dense", "dense_4h_to_h")):
                module.forward = _summed(module, case.tp)
    return other.to(case.dtypes[1])


def _summed(module: nn.Linear, parts: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        pairs = zip(x.chunk(parts, -1), module.weight.chunk(parts, -1), strict=True)
        total = sum(nn.functional.linear(a, w) for a, w in pairs)
        return total if module.bias is None else total + module.bias

    return forward


# ---- damage


def sites_of(model: nn.Module, kinds: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    """Return the leaf modules of decoder layers of the given kinds."""
    found = []
    for name, module in model.named_modules():
        if not any(part.isdigit() for part in name.split(".")) or any(module.children()):
            continue
        cls = type(module).__name__
        kind = "linear" if cls in ("Linear", "Conv1D") else "norm" if "Norm" in cls else "act" if _acts(module) else ""
        if kind in kinds and ("attn_dropout" not in name):
            found.append((name, module))
    return found


def _acts(module: nn.Module) -> bool:
    return any(part in type(module).__name__ for part in ("GELU", "SiLU", "Activation"))


def _rows_of(module: nn.Module) -> torch.Tensor:
    """Return a view of the weight as [out, in]."""
    weight: torch.Tensor = module.weight.data  # type: ignore[assignment,union-attr]
    return weight.T if type(module).__name__ == "Conv1D" else weight


def _head(scale: float, share: int) -> Callable[[nn.Module, random.Random], None]:
    def damage(module: nn.Module, rng: random.Random) -> None:
        weight = _rows_of(module)
        size = max(len(weight) // share, 1) if share else 1
        start = rng.randrange(0, len(weight) - size + 1)
        weight[start : start + size] *= scale
        if getattr(module, "bias", None) is not None:
            module.bias.data[start : start + size] *= scale  # type: ignore[union-attr,index]

    return damage


def _noise(amount: float) -> Callable[[nn.Module, random.Random], None]:
    def damage(module: nn.Module, rng: random.Random) -> None:
        weight = _rows_of(module)
        weight += amount * weight.std() * torch.randn(weight.shape)

    return damage


def _hook(change: Callable[[torch.Tensor, random.Random], None]) -> Callable[[nn.Module, random.Random], None]:
    def damage(module: nn.Module, rng: random.Random) -> None:
        def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
            out = out.clone()
            change(out.view(-1, out.shape[-1]), random.Random(7))
            return out

        module.register_forward_hook(hook)

    return damage


def _random_token(x: torch.Tensor, rng: random.Random) -> None:
    row = rng.randrange(len(x))
    x[row] = x[row].roll(7) if len(x) else x


def _zero_block(x: torch.Tensor, rng: random.Random) -> None:
    row, size = rng.randrange(len(x)), max(x.shape[-1] // 64, 4)
    start = int(x[row].abs().unfold(0, size, 1).sum(-1).argmax())
    x[row, start : start + size] = 0


def _shift_token(x: torch.Tensor, rng: random.Random) -> None:
    row = rng.randrange(1, len(x))
    x[row] = x[row - 1]


def _act(module: nn.Module, rng: random.Random) -> None:
    name = type(module).__name__
    if "SiLU" in name:
        module.forward = nn.functional.gelu  # type: ignore[assignment]
    elif "New" in name or "Tanh" in name:
        module.forward = lambda x: nn.functional.gelu(x)  # type: ignore[assignment]
    else:
        module.forward = lambda x: nn.functional.gelu(x, approximate="tanh")  # type: ignore[assignment]


def _eps(module: nn.Module, rng: random.Random) -> None:
    name = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
    setattr(module, name, 1e-2)


def _no_bias(module: nn.Module, rng: random.Random) -> None:
    if getattr(module, "bias", None) is None:
        raise LookupError("no bias")
    module.bias.data.zero_()  # type: ignore[union-attr]


@dataclass(frozen=True)
class Damage:
    """Damage to one module; ``subtle`` damage may be smaller than the rounding error of 16-bit dtypes."""

    name: str
    kinds: tuple[str, ...]
    apply: Callable[[nn.Module, random.Random], None]
    subtle: bool = False


DAMAGE = (
    Damage("weight noise 20 %", ("linear",), _noise(0.2)),
    Damage("weight noise 1 %", ("linear",), _noise(0.01), subtle=True),
    Damage("one head x1.04", ("linear",), _head(1.04, 4)),
    Damage("one channel x1.04", ("linear",), _head(1.04, 0)),
    Damage("one channel dead", ("linear",), _head(0.0, 0)),
    Damage("one token wrong", ("linear", "norm", "act"), _hook(_random_token)),
    Damage("one block of one token zeroed", ("linear", "norm", "act"), _hook(_zero_block)),
    Damage("one position shifted", ("linear",), _hook(_shift_token)),
    Damage("another activation", ("act",), _act, subtle=True),
    Damage("norm eps 1e-2", ("norm",), _eps, subtle=True),
    Damage("bias dropped", ("linear", "norm"), _no_bias),
)


def damaged(model: nn.Module, damage: Damage, seed: int) -> tuple[str, nn.Module] | None:
    """Return (path of the damaged module, model), or None if the model has no suitable module."""
    rng = random.Random(seed)
    other = copy.deepcopy(model)
    sites = sites_of(other, damage.kinds)
    rng.shuffle(sites)
    for name, module in sites:
        try:
            with torch.no_grad():
                damage.apply(module, rng)
        except LookupError:
            continue
        return name, other
    return None
