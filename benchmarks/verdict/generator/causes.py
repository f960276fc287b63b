"""Causes: which sentences are a right cause of a bug, by its operation and where it was done."""

import math
import re

from benchmarks.verdict.generator.bug import Bug

_ORDER = (r"\border\b", "swapped", "rotated by", "earlier", "later", "holds", "copies of other", "reverse")
_CAST = {
    "bfloat16": ("bf16", "bfloat16"),
    "float16": ("fp16", "float16"),
    "float8_e4m3": ("e4m3", "fp8", "quantised"),
}
_KINDS = {
    "epsilon": ("epsilon",),
    "activation": ("of its input",),
    "residual": ("added once more", "left out", "once too often"),
    "positions": ("positions", "RoPE", "shifted by"),
    "frequencies": ("RoPE", "theta", "frequenc"),
    "softmax_scale": ("softmax", "scale of", "scores", "scaled"),
    "mask": ("mask", r"\bkeys?\b", "attends", "sees", "window"),
    "router": ("router", "experts?", "weights?", "chosen", "choice"),
    "keys": (r"\bkeys?\b", "cache"),
    "values": (r"\bvalues?\b of the cache", "cache", r"v_proj", r"\bvalue"),
}


def cause_of(bug: Bug) -> tuple[str, ...]:
    """Regular expressions of which a right cause contains one."""
    known = _KINDS.get(bug.kind, ())
    if bug.kind == "frequencies" and bug.damage is not None and bug.damage.op == "negate":
        known += ("target = −baseline",)  # of the sines
    if bug.kind == "residual":
        known += ("2 × baseline",) if bug.value > 0 else ()
    if bug.damage is None or bug.kind in ("mask", "router", "positions", "frequencies"):
        return known
    return known + _damaged(bug)


def _damaged(bug: Bug) -> tuple[str, ...]:
    damage = bug.damage
    assert damage is not None
    about_inputs = bug.kind in ("weight", "rank_weight") and damage.axis == -1
    found: tuple[str, ...] = (r"\bweights?\b", r"\bbias") if "weight" in bug.kind else ()
    if "weight" in bug.kind and "norm" in bug.module and "bias" not in bug.module:
        found += ("a factor of its own for each channel",)
    if bug.module.endswith("bias"):
        found += ("a summand of its own for each channel",)
    if about_inputs:
        found += (r"input columns?", r"column \d+ of its input", r"summand of rank")
    if damage.op == "round":
        return found + _CAST[damage.dtype]
    if damage.op in ("swap", "roll", "copy"):
        return (*found, *_ORDER, "baseline of")
    if damage.op == "clip":
        return (*found, "clamped")
    if damage.op == "add":
        return (*found, r"target = baseline [+−]")
    if damage.op == "zero":
        return (*found, "target is zero", "missing", "not added up", r"baseline / \d", "left out")
    if damage.op == "negate":
        return (*found, "target = −baseline")
    return (*found, "(scale)")


def is_right(bug: Bug, text: str) -> bool:
    """Whether a stated cause is the cause of this bug."""
    if any(re.search(pattern, text) for pattern in bug.cause if pattern != "(scale)"):
        return True
    return "(scale)" in bug.cause and bug.damage is not None and _has_factor(text, bug.damage.amount)


def _has_factor(text: str, factor: float) -> bool:
    """Whether a sentence says that it is this many times the baseline."""
    said = [float(n) for n in re.findall(r"(?:target = |by )\(?(-?[\d.]+(?:e[-+]?\d+)?)", text)]
    said += [1.0 + float(sign + n) for sign, n in re.findall(r"\(1 ([+-]) ([\d.e-]+)\)", text)]
    said += [1.0 / float(n) for n in re.findall(r"baseline / ([\d.]+)", text)]
    return any(math.isclose(value, factor, rel_tol=0.03) for value in said)
