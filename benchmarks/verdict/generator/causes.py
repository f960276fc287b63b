"""Causes: which sentences are a right cause of a bug, by its operation and where it was done.

A sentence in other words than the bug's is right where it follows from the bug: one wrong number of a bias adds one
number to one channel, one wrong number of a norm's weight multiplies one channel.
"""

import math
import re

from benchmarks.verdict.generator.bug import Bug
from benchmarks.verdict.generator.damage import Damage

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
    "keys": (r"\bkeys?\b", "cache"),
    "values": (r"\bvalues?\b of the cache", "cache", r"v_proj", r"\bvalue"),
}

_ROUTED = {
    "next_expert": "the expert behind the chosen one",
    "one_expert": "first chosen expert is another",
    "half": r"\b0\.5 × baseline",
    "equal": "weights are all equal",
    "swapped": "weights are in reverse order",
    "last_dropped": "weight of the last chosen expert is zero",
}
"""Each way of a router has its own words: another way's are a wrong cause."""
_HIDDEN = {"hide_first": 0, "hide_third": 2}
"""Index of the key that a mask hides: positions count from 0 as well."""
_EPSILONS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3": 2.0**-4}
"""Largest relative error of rounding."""
_TARGET = r"in column (?P<column>\d+)(?: \((?:of|the shard of) rank (?P<rank>\d+)\))?: target "
_ADDED = re.compile(_TARGET + r"= baseline [+−] [\d.]")
_MULTIPLIED = re.compile(_TARGET + r"= (?:\(1 (?P<off>[+-] [\d.e-]+)\)|(?P<factor>-?[\d.]+(?:e[-+]?\d+)?)) × baseline")


def cause_of(bug: Bug, *, adds_one: bool = False) -> tuple[str, ...]:
    """Regular expressions of which a right cause contains one; ``adds_one``: the model's norms use 1 + weight."""
    return _known_causes(bug) + (("(channel of 1 + weight)",) if adds_one else ())


def _known_causes(bug: Bug) -> tuple[str, ...]:
    known = _KINDS.get(bug.kind, ())
    if bug.kind == "router":
        return (_ROUTED[bug.text],)
    if bug.kind == "mask" and bug.text in _HIDDEN:
        known += (rf"does not see position {_HIDDEN[bug.text]}\b",)
    if bug.kind == "frequencies" and bug.damage is not None and bug.damage.op == "negate":
        known += ("target = −baseline",)  # of the sines
    if bug.kind == "residual":
        known += ("2 × baseline",) if bug.value > 0 else ()
    if bug.damage is None or bug.kind in ("mask", "positions", "frequencies"):
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
    if any(re.search(pattern, text) for pattern in bug.cause if not pattern.startswith("(")):
        return True
    if "(scale)" in bug.cause and bug.damage is not None and _has_factor(text, bug.damage.amount):
        return True
    return bug.damage is not None and _is_of_channel(bug, bug.damage, text)


def _is_of_channel(bug: Bug, damage: Damage, text: str) -> bool:
    """Whether a sentence says what one wrong number of a bias or of a norm's weight does: to this channel alone, in
    every row."""
    is_parameter = bug.kind in ("weight", "rank_weight")
    if not is_parameter or damage.start is None or damage.count != 1 or damage.op in ("swap", "roll"):
        return False
    is_bias = bug.module.endswith(".bias")
    found = (_ADDED if is_bias else _MULTIPLIED).match(text)
    if found is None or int(found["column"]) != damage.start:
        return False
    if found["rank"] is not None and bug.rank not in (None, int(found["rank"])):
        return False  # of a wrong checkpoint it says who holds the column
    return is_bias or ("norm" in bug.module and _is_possible(found, damage, "(channel of 1 + weight)" in bug.cause))


def _is_possible(found: re.Match[str], damage: Damage, adds_one: bool) -> bool:
    """Whether the damage of one number of a norm's weight can give this factor."""
    factor = 1.0 + float(found["off"].replace(" ", "")) if found["off"] is not None else float(found["factor"])
    if damage.op == "round":
        return abs(factor - 1.0) <= 1.01 * _EPSILONS[damage.dtype]  # a sum with 1 is rounded by less
    return adds_one or damage.op in ("add", "clip", "copy")  # otherwise the weight's own factor is known


def _has_factor(text: str, factor: float) -> bool:
    """Whether a sentence says that it is this many times the baseline."""
    said = [float(n) for n in re.findall(r"(?:target = |by )\(?(-?[\d.]+(?:e[-+]?\d+)?)", text)]
    said += [1.0 + float(sign + n) for sign, n in re.findall(r"\(1 ([+-]) ([\d.e-]+)\)", text)]
    said += [1.0 / float(n) for n in re.findall(r"baseline / ([\d.]+)", text)]
    return any(math.isclose(value, factor, rel_tol=0.03) for value in said)
