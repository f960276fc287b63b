"""Causes: which sentences are a right cause of a bug, by its operation and where it was done.

A sentence in other words than the bug's is right where it follows from the bug: one wrong number of a bias adds one
number to one channel, one wrong number of a norm's weight multiplies one channel.
"""

import math
import re

from benchmarks.verdict.generator import weight_causes
from benchmarks.verdict.generator.bug import Bug
from benchmarks.verdict.generator.damage import Damage

_ORDER = (r"\border\b", "swapped", "rotated by", "earlier", "later", "holds", "copies of other", "reverse")
_CAST = {
    "bfloat16": ("bf16", "bfloat16"),
    "float16": ("fp16", "float16"),
    "float8_e4m3": ("e4m3", "fp8", "quantised"),
}
_KINDS = {
    "frequencies": (r"frequenc", r"RoPE at positions"),
}

_ROUTED = {
    "next_expert": "the expert behind the chosen one",
    "one_expert": "first chosen expert is another",
    "half": r"\b0\.5 × baseline",
    "equal": r"weights are all equal|weights are 1\.1 × baseline",  # of one expert
    "swapped": "weights are in reverse order",
    "last_dropped": "weight of the last chosen expert is zero",
}
"""Each way of a router has its own words: another way's are a wrong cause."""
_MASKED = {
    "hide_first": r"does not see position 0\b",
    "hide_third": r"does not see position 2\b",
    "hide_newest": "does not see itself",
    "see_next": "sees the next token too",
    "see_all": "mask is lost",
}
"""What each way of a mask does; positions count from 0."""
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu (tanh)"}
"""Names of activations that the comparator calls otherwise."""
_NEAR = 0.06
"""Relative error of a stated change that rounding may cause: its own, and that of two digits."""
_LAST_DIGIT = 0.005
"""Relative error of a factor of three digits."""
_TARGET = r"in column (?P<column>\d+)(?: \((?:of|the shard of) rank (?P<rank>\d+)\))?: target "
_NUMBER = r"-?[\d.]+(?:e[-+]?\d+)?"
_FACTOR = rf"(?:\(1 (?P<off>[+-] [\d.e-]+)\)|(?P<factor>{_NUMBER})) × baseline"
_ADDED = re.compile(_TARGET + rf"= baseline (?P<sign>[+−]) (?P<number>{_NUMBER})")
_MULTIPLIED = re.compile(_TARGET + "= " + _FACTOR)
_SCORES = re.compile("target scales scores by .*, " + _FACTOR + "'s")
_READ = re.compile(r"(?P<what>keys|values) (?P<said>(?:are|have|hold) .*?) as attention reads them")
_DONE = {
    "zero": "are zero",
    "negate": "are negated",
    "swap": "swapped",
    "roll": "rotated by",
    "copy": "hold baseline's",
    "clip": "are clamped",
}
"""What became of keys or values."""
_EPSILON = re.compile(rf"epsilon is (?P<sign>larger|smaller) by (?P<number>{_NUMBER})")


def cause_of(bug: Bug, *, adds_one: bool = False) -> tuple[str, ...]:
    """Regular expressions of which a right cause contains one; ``adds_one``: the model's norms use 1 + weight."""
    return _known_causes(bug) + (("(channel of 1 + weight)",) if adds_one else ())


def _known_causes(bug: Bug) -> tuple[str, ...]:
    known = _KINDS.get(bug.kind, ())
    if bug.kind == "router":
        return (_ROUTED[bug.text],)
    if bug.kind == "mask":
        return (_MASKED[bug.text],)
    if bug.kind == "activation":
        name = re.escape(_ACTIVATIONS.get(bug.text, bug.text))
        return (rf"target = (?:[\w ()]+ or )?{name}(?: or [\w ()]+)? of its input",)  # look-alikes are named together
    if bug.kind == "positions":
        return _shifted(int(bug.value)) if bug.text == "offset" else (rf"RoPE at positions {bug.value:g} times",)
    if bug.kind == "frequencies" and bug.damage is not None and bug.damage.op == "negate":
        known += ("target = −baseline",)  # of the sines
    if bug.kind == "residual":
        known += ("added once more", "once too often", "= 2 × baseline") if bug.value > 0 else ("left out",)
    if bug.damage is None or bug.kind == "frequencies":
        return known
    return known + _damaged(bug)


def _shifted(offset: int) -> tuple[str, ...]:
    more = f"{abs(offset)} {'higher' if offset > 0 else 'lower'}"
    return rf"positions (?:are|were) {more}\b", rf"shifted by {-offset:+d}\b".replace("+", r"\+")


def _damaged(bug: Bug) -> tuple[str, ...]:
    damage = bug.damage
    assert damage is not None
    about_inputs = bug.kind in ("weight", "rank_weight") and damage.axis == -1
    found: tuple[str, ...] = ()
    if "weight" in bug.kind and "norm" in bug.module and "bias" not in bug.module:
        found += ("a factor of its own for each channel",)
    if bug.module.endswith("bias"):
        found += ("a summand of its own for each channel",)
    if about_inputs:
        found += (r"summand of rank \d+ alone",)
    if damage.op == "round":
        return found + _CAST[damage.dtype]
    if damage.op in ("swap", "roll", "copy"):
        return (*found, *_ORDER, "baseline of")
    if damage.op == "clip":
        return (*found, "clamped")
    if damage.op == "add":
        return (*found, r"target = baseline [+−]")
    if damage.op == "zero":
        lost = (rf"summand of rank {bug.rank} is zero",) if bug.kind == "partial" else ()
        return (*found, *lost, "target is zero", "missing", "not added up", r"baseline / \d", "left out")
    if damage.op == "negate":
        return (*found, "target = −baseline")
    return (*found, "(scale)")


def is_right(bug: Bug, text: str) -> bool:
    """Whether a stated cause is the cause of this bug."""
    if "weight" in bug.kind:
        if (named := weight_causes.judged(bug, text)) is not None:
            return named
        if weight_causes.is_elsewhere(bug, text):
            return False
    if bug.kind in ("keys", "values") and "as attention reads them" in text:
        return _is_read(bug, text)
    if bug.kind == "keys":  # scaled alike they scale the scores; nothing else about the output follows
        scale = bug.damage is not None and bug.damage.op == "scale" and bug.damage.start is None and not bug.rows
        return scale and bug.damage is not None and _is_near(_SCORES.search(text), 1.0, bug.damage.amount)
    if any(re.search(pattern, text) for pattern in bug.cause if not pattern.startswith("(")):
        return True
    if "(scale)" in bug.cause and bug.damage is not None and _has_factor(text, bug.damage.amount):
        return True
    if bug.kind == "softmax_scale":
        return _is_near(_SCORES.search(text), 1.0, bug.value)
    if bug.kind == "epsilon" and bug.change is not None:
        return _is_near(_EPSILON.search(text), 0.0, bug.change[1] - bug.change[0])
    return bug.damage is not None and bug.change is not None and _is_of_channel(bug, bug.damage, bug.change, text)


def _is_read(bug: Bug, text: str) -> bool:
    """Whether a sentence about keys or values as attention reads them says what became of which columns."""
    damage, found = bug.damage, _READ.search(text)
    if damage is None or found is None or found["what"] != bug.kind:
        return False
    said = found["said"]
    columns = _columns_of(said)
    if damage.start is None and damage.op not in ("swap", "copy"):
        if columns is not None and damage.op != "roll":
            return False
    elif columns is None or not {(damage.start or 0) + damage.stride * i for i in range(damage.count)} & columns:
        return False
    if damage.op == "scale":
        return _is_near(re.search(rf"are {_FACTOR}", said), 1.0, damage.amount)
    if damage.op == "add":
        return f"are baseline's {'+' if damage.amount > 0 else '−'} " in said
    if damage.op == "round":
        return any(f"are rounded to {name}" in said for name in _CAST[damage.dtype])
    return _DONE[damage.op] in said


def _columns_of(said: str) -> set[int] | None:
    """All columns that are named; None where none is."""
    found: set[int] = set()
    for each, first, last in re.findall(r"every (\w+) column from (\d+) to (\d+)", said):
        step = {"second": 2, "third": 3}.get(each) or int(each.removesuffix("th"))
        found |= set(range(int(first), int(last) + 1, step))
    for some in re.findall(r"columns? (\d+(?:–\d+)?(?:(?:, | and )\d+(?:–\d+)?)*)", said):
        for one in re.split(", | and ", some):
            first, _, last = one.partition("–")
            found |= set(range(int(first), int(last or first) + 1))
    return found or None


def _is_of_channel(bug: Bug, damage: Damage, change: tuple[float, float], text: str) -> bool:
    """Whether a sentence says what one wrong number of a bias or of a norm's weight does: to this channel alone, in
    every row."""
    if bug.kind not in ("weight", "rank_weight") or damage.op in ("swap", "roll"):
        return False
    is_bias = bug.module.endswith(".bias")
    found = (_ADDED if is_bias else _MULTIPLIED).match(text)
    if found is None or int(found["column"]) != damage.start:
        return False
    if found["rank"] is not None and bug.rank not in (None, int(found["rank"])):
        return False  # of a wrong checkpoint it says who holds the column
    before, after = change
    if is_bias:
        return _is_near(found, 0.0, after - before)
    one = float("(channel of 1 + weight)" in bug.cause)
    return "norm" in bug.module and before + one != 0.0 and _is_near(found, 1.0, (after + one) / (before + one))


def _is_near(found: re.Match[str] | None, neutral: float, meant: float) -> bool:
    """Whether the number that was stated is ``meant``, up to rounding: what differs from ``neutral`` is the change."""
    if found is None:
        return False
    named = found.groupdict()
    if named.get("off") is not None:
        said, last = 1.0 + float(named["off"].replace(" ", "")), 0.0
    elif named.get("factor") is not None:
        said = float(named["factor"])
        last = _LAST_DIGIT * abs(said)
    else:
        said, last = float(named["number"]) * (-1.0 if named["sign"] in ("−", "smaller") else 1.0), 0.0
    return abs(said - meant) <= max(_NEAR * abs(meant - neutral), last)


def _has_factor(text: str, factor: float) -> bool:
    """Whether a sentence says that it is this many times the baseline."""
    said = [float(n) for n in re.findall(r"(?:target = |by )\(?(-?[\d.]+(?:e[-+]?\d+)?)", text)]
    said += [1.0 + float(sign + n) for sign, n in re.findall(r"\(1 ([+-]) ([\d.e-]+)\)", text)]
    said += [1.0 / float(n) for n in re.findall(r"baseline / ([\d.]+)", text)]
    return any(math.isclose(value, factor, rel_tol=0.03) for value in said)
