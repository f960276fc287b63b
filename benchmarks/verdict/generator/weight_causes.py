"""Weight causes: whether a sentence about a weight says which part of it the bug changed.

What is said of a part is right where it lies within what the bug changed: a clip leaves numbers as they were, and
rounding hides others.
"""

import re

from benchmarks.verdict.generator.bug import Bug

_INPUTS = re.compile(
    r"the weight differs in (?P<what>[^:]*?) of its input|(?P<swapped>columns? [^:]*?) of its input are exchanged"
)
_EXPERT = re.compile(
    r"(?:weights|down projection) of expert (?P<expert>\d+) differs?(?: in its (?P<rows>rows? [^:]*))?"
)
_OUTPUTS = re.compile(r"^in (?P<what>(?:columns? \d|every )[^:(]*?)(?: of | \(|:)")
_SUMMAND = re.compile(r"the summand of rank (\d+) is zero")
_COPIES = re.compile(r"(?:blocks of (?P<size>\d+) )?columns are copies of other ones: (?P<block>\d+) holds")
_CHANNELS = "a factor of its own for each channel + a number"
_ORDERED = ("swap", "roll", "copy")
_BY_ONE = re.compile(r"the weight is too (large|small) by 1 ")
_TRANSPOSED = ("c_attn", "c_fc", "c_proj")
"""GPT-2's weights are [inputs, outputs]."""
_ORDINALS = {"second": 2, "third": 3}


def judged(bug: Bug, text: str) -> bool | None:
    """Whether the part of the weight that a sentence names is the bug's; None where the sentence names none."""
    if (found := _EXPERT.search(text)) is not None:
        return _is_expert(bug, found)
    if (found := _INPUTS.search(text)) is not None:
        inputs = changed(bug, outputs=False)
        return inputs is not None and _within(found["what"] or found["swapped"], inputs)
    if (found := _SUMMAND.search(text)) is not None:
        is_zero = bug.damage is not None and bug.damage.op == "zero"
        return is_zero and bug.rank == int(found[1]) and not is_elsewhere(bug, text)
    if (found := _COPIES.search(text)) is not None and (outputs := changed(bug, outputs=True)) is not None:
        size = int(found["size"] or 1)
        first = int(found["block"]) * size
        is_there = _OUTPUTS.match(text) is not None or set(range(first, first + size)) <= outputs
        return bug.damage is not None and bug.damage.op in _ORDERED and is_there and not is_elsewhere(bug, text)
    if _CHANNELS in text:
        return len(bug.shape) == 1 and not bug.module.endswith("bias") and not is_elsewhere(bug, text)
    if "the weight counts as zero" in text:
        return bug.damage is not None and bug.damage.op == "zero" and not is_elsewhere(bug, text)
    if "the weight differs: the error is a linear function of the input" in text:
        return len(bug.shape) == 2 and not is_elsewhere(bug, text)
    if (found := _BY_ONE.search(text)) is not None:
        return "norm" in bug.module and not is_elsewhere(bug, text) and _is_by_one(bug, found[1])
    return None


def _is_by_one(bug: Bug, word: str) -> bool:
    """Whether the damage may have added or taken 1: a weight of ones is doubled, too."""
    damage = bug.damage
    assert damage is not None
    sign = 1.0 if word == "large" else -1.0
    return (damage.op == "add" and damage.amount * sign > 0) or (damage.op, damage.amount) == ("scale", 1.0 + sign)


def is_elsewhere(bug: Bug, text: str) -> bool:
    """Whether a sentence is about columns of the output that the bug leaves as they are."""
    found, outputs = _OUTPUTS.match(text), changed(bug, outputs=True)
    period = bug.shape[-1] if len(bug.shape) == 1 else None  # a norm of heads has one weight for all of them
    return found is not None and outputs is not None and not _within(found["what"], outputs, period)


def _is_expert(bug: Bug, found: re.Match[str]) -> bool:
    if f".experts.{found['expert']}." not in bug.module:
        return False
    if found["rows"] is None:
        return True
    rows = changed(bug, outputs=True) if "down_proj" in bug.module or ".w2." in bug.module else None
    return rows is not None and _within(found["rows"], rows)


def changed(bug: Bug, *, outputs: bool) -> frozenset[int] | None:
    """Indices of the outputs, or of the inputs, of the weight that the bug is confined to; None where to none."""
    damage, shape = bug.damage, bug.shape
    if damage is None or not shape:
        return None
    is_table = "embed_tokens" in bug.module or "wte" in bug.module  # [tokens, outputs]
    first_is_output = not is_table and not any(name in bug.module for name in _TRANSPOSED)
    axis = -1 if len(shape) == 1 else damage.axis
    of_outputs = len(shape) == 1 or (axis == -2) is first_is_output
    if of_outputs is not outputs:
        is_shard = bug.kind == "rank_weight" and not outputs and len(shape) == 2 and bug.rank is not None
        return frozenset(range(bug.rank * shape[-1], (bug.rank + 1) * shape[-1])) if is_shard else None
    if damage.start is None:
        return frozenset(range(shape[axis]))
    offset = (bug.rank or 0) * shape[axis] if bug.kind == "rank_weight" and not outputs else 0
    starts = [damage.start, damage.other] if damage.op == "swap" else [damage.start]
    count = min(damage.count, shape[axis])
    return frozenset(offset + (start + damage.stride * i) % shape[axis] for start in starts for i in range(count))


def _within(said: str, changed: frozenset[int], period: int | None = None) -> bool:
    """Whether all indices that are named are among these; an open end is known by its first three."""
    every = re.search(r"every (\w+) \w+ from (\d+)(?: to (\d+)| on)", said)
    if every is not None:
        step = _ORDINALS.get(every[1]) or int(re.sub(r"\D", "", every[1]))
        first = int(every[2])
        end = int(every[3]) if every[3] is not None else first + 2 * step
        named = set(range(first, end + 1, step))
    else:
        ends = re.findall(r"(\d+)(?:–(\d+))?", said)
        named = {i for a, b in ends for i in range(int(a), int(b or a) + 1)}
    return bool(named) and {i % period if period else i for i in named} <= changed
