"""Pairing: a random decoder and the settings of both runs, drawn from a seed and a number."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.verdict.families import FAMILIES
from benchmarks.verdict.models import Model
from benchmarks.verdict.setup import Setup

_WEIGHTS = {
    "llama": 6,
    "llama-tied": 2,
    "llama-bias": 3,
    "llama3": 1,
    "qwen2": 4,
    "qwen3": 4,
    "mixtral": 3,
    "qwen3-moe": 3,
    "gemma2": 2,
    "gemma3": 1,
    "gpt2": 2,
    "deepseek-v3": 2,
    "olmo2": 1,
    "gpt-neox": 1,
    "phi3": 1,
    "qwen2-moe": 1,
}
"""Relative frequency of each family."""
_HEAD_DIMS = ("llama", "llama-tied", "llama-bias", "llama3", "qwen3", "mixtral", "qwen3-moe", "gemma2", "gemma3")
"""Families with a separate config field for the head dim."""
ENGINE = (*_HEAD_DIMS, "qwen2", "deepseek-v3")
"""Families that the engine supports."""
MEGATRON = ("llama", "llama-tied", "qwen2", "qwen3")
"""Families that examples/megatron_llama.py builds."""
_STYLES = ("spread", "spread", "heavy", "normal", "wide")


@dataclass(frozen=True, slots=True)
class Pairing:
    """Model and settings that a group of cases shares."""

    model: Model
    baseline: Setup
    target: Setup

    @property
    def name(self) -> str:
        """Name of the pairing, for example ``transformers-engine/tp2``: both frameworks, and the ranks of the
        target."""
        ranks = "" if self.target.framework == "transformers" else f"/tp{self.target.tp}"
        return f"{self.baseline.framework}-{self.target.framework}{ranks}"

    @property
    def dtypes(self) -> str:
        """Both dtypes, for example ``float32-bfloat16``."""
        return f"{self.baseline.dtype}-{self.target.dtype}"


def draw_pairing(seed: int, group: int) -> Pairing:
    """Draw the pairing of a group; deterministic for a seed and number on every machine."""
    draw = random.Random(f"pairing {seed} {group}")
    name = draw.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    kinds = {"transformers": 4.0}
    if name in ENGINE:
        kinds |= {"engine": 3.0, "engines": 1.5}
    if name in MEGATRON:
        kinds |= {"megatron": 2.0}
    kind = draw.choices(list(kinds), list(kinds.values()))[0]
    sizes = _sizes(draw, name, is_small=kind == "megatron")
    model = Model.of(name, sizes | {"weights": draw.choice(_STYLES), "seed": draw.randrange(10**6)})
    return Pairing(model, *_sides(draw, name, kind))


def _sizes(draw: random.Random, name: str, *, is_small: bool) -> dict[str, Any]:
    """Draw config fields; head counts and widths are divisible by two ranks."""
    layers, heads, head_dim = draw.randint(2, 5), draw.choice((2, 4, 8)), draw.choice((8, 16, 32))
    if name == "gpt2":
        return {"n_layer": layers, "n_head": heads, "n_embd": heads * head_dim}
    kv = draw.choice([n for n in (1, 2, 4, 8) if heads % n == 0 and (n > 1 or not is_small)])
    sizes: dict[str, Any] = {"num_hidden_layers": layers, "num_attention_heads": heads}
    if name == "gemma3":
        sizes["num_hidden_layers"] = 6  # the sixth layer has full attention
    if name == "deepseek-v3":
        return sizes | {"num_hidden_layers": max(layers, 2), "num_key_value_heads": heads}
    if name != "gpt-neox":
        sizes["num_key_value_heads"] = kv
    free = name in _HEAD_DIMS and draw.random() < 0.5
    hidden = draw.choice((48, 64, 96, 128)) if free else heads * head_dim
    sizes |= {"hidden_size": hidden, "intermediate_size": 16 * draw.randint(3, 16)}
    if name in _HEAD_DIMS:
        sizes["head_dim"] = head_dim
    if name not in ("llama3", "gemma3"):
        theta = draw.choice((1e3, 1e4, 5e5))
        rotated = {"partial_rotary_factor": 0.5} if name == "gpt-neox" else {}
        sizes["rope_parameters"] = _frozen({"rope_type": "default", "rope_theta": theta} | rotated)
    if name not in ("gpt-neox",):
        sizes["rms_norm_eps"] = draw.choice((1e-5, 1e-6))
    if "moe" in name or name == "mixtral":
        sizes["num_experts_per_tok"] = draw.randint(1, 3)
    return sizes


def _frozen(settings: Mapping[str, Any]) -> Any:
    """Return a hashable dict."""
    return FrozenDict(settings)


class FrozenDict(dict[str, Any]):
    """A hashable dict of plain values; it must not be modified."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def _sides(draw: random.Random, name: str, kind: str) -> tuple[Setup, Setup]:
    dtype = draw.choices(("float32", "bfloat16", "float16"), (45, 40, 15))[0]
    other = dtype if dtype == "float32" or draw.random() < 0.5 else "float32"
    both = {"workload": draw.choice(("short", "short", "long", "shared", "one")), "seed": draw.randrange(1000)}
    if draw.random() < 0.05:
        dtype, other = other, dtype
    if kind == "megatron":
        both |= {"schedule": "whole", "batch": "right"}
        target = {"framework": "megatron", "tp": draw.choice((1, 2))}
        return Setup(**both, dtype=other), Setup(**both, **target, dtype=dtype)
    transformers = kind in ("transformers", "engine")
    baseline = _transformers(draw, name, kind) if transformers else {"framework": "engine"} | _engine(draw)
    target = _transformers(draw, name, kind) if kind == "transformers" else {"framework": "engine"} | _engine(draw)
    target |= {"tp": draw.choice((1, 2, 2))} if kind != "transformers" else {}
    return Setup(**both, **baseline, dtype=other), Setup(**both, **target, dtype=dtype)


def _transformers(draw: random.Random, name: str, kind: str) -> dict[str, Any]:
    schedule = draw.choice(("decode", "decode", "whole", "chunks"))
    batch = draw.choice(("left", "left", "left", "right", "separate"))
    if name.startswith("gemma") and batch == "right" and schedule != "whole":
        batch = "left"  # in transformers, the sliding window counts the padding between prompt and generated tokens
    attention = "eager" if name == "gemma2" else draw.choice(("eager", "sdpa"))  # SDPA has no soft cap
    return {"schedule": schedule, "batch": batch, "attention": attention, "order": _order(draw)}


def _engine(draw: random.Random) -> dict[str, Any]:
    limits: Sequence[Mapping[str, Any]] = ({}, {}, {"max_num_batched_tokens": 9})
    return {"page_size": draw.choice((4, 8, 16)), "engine": draw.choice(limits), "order": _order(draw)}


def _order(draw: random.Random) -> str:
    return draw.choice(("given", "given", "given", "reversed"))


assert set(_WEIGHTS) <= set(FAMILIES)
