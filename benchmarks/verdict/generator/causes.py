"""Causes: whether the sentence that states a cause says what a generated bug did, where, and how much.

A sentence is right where each of its parts is: the operation, its numbers, the columns, the rank and, of a bug in some
token rows, that it is about some. A statement in other words than the bug's counts where it follows from the bug, as
one wrong number of a norm's weight multiplies one channel. A sentence that names fewer columns than the bug changed is
right where it names at least half of them: a factor may leave a column of zeros as it was.
"""

import math
import re
from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks.verdict.generator.bug import Bug
from benchmarks.verdict.generator.damage import Damage

_TOLERANCE = 0.06
"""Relative error of a stated change that rounding may cause."""
_COVERED = 0.5
"""Share of the changed indices that a sentence must name."""
_EVERYWHERE = 0.9
"""Share of the columns that must have changed for a sentence that names none."""
_PARTLY = ("clip", "round")
"""Operations that leave many values as they were."""
_MOVED = ("swap", "roll", "copy")
_CAST = {
    "bfloat16": ("bf16", "bfloat16"),
    "float16": ("fp16", "float16"),
    "float8_e4m3": ("fp8e4", "float8_e4m3fn"),
}
_ROUTED = {
    "next_expert": "the expert after the chosen one",
    "one_expert": "first chosen expert differs",
    "half": r"weights are 0\.5 × baseline",
    "equal": r"weights are all equal",
    "swapped": "weights are in reverse order",
    "last_dropped": "weight of the last chosen expert is zero",
}
_MASKED = {
    "hide_first": r"does not see position 0\b",
    "hide_third": r"does not see position 2\b",
    "hide_newest": "does not see itself",
    "see_next": "sees the next token too",
    "see_all": "mask is lost",
}
"""Positions count from 0."""
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu (tanh)"}
"""Names of activations that the comparator calls otherwise."""
_TRANSPOSED = ("c_attn", "c_fc", "c_proj")
"""GPT-2's weights are [inputs, outputs]."""
_TABLES = ("embed_tokens", "wte", "embed_in")
_ORDINALS = {"second": 2, "third": 3}

_NUMBER = r"-?[\d.]+(?:e[-+]?\d+)?"
_FACTOR = rf"(?:\(1 (?P<off>[+-] [\d.e-]+)\)|(?P<factor>{_NUMBER})) × baseline"
_LIST = r"\d+(?:–\d+)?(?:(?:, | and )\d+(?:–\d+)?)*"
_COLUMNS = rf"(?:every \w+ column from \d+(?: to \d+| on)|columns? {_LIST})"
_WHERE = re.compile(r"in (?P<where>[^:]*): (?P<said>.*)$", re.DOTALL)
_ROWS = re.compile(r"\b(?:positions?|requests?|rows?|tokens?|steps?)\b")
_OF_ROWS = re.compile(r"of positions? \d|of the (?:first|last) token|of the token's own|from step \d")
_SCORES = re.compile(rf"target scales scores by .*, {_FACTOR}'s")
_EPSILON = re.compile(rf"epsilon is (?P<sign>larger|smaller) by (?P<factor>{_NUMBER})")
_READ = re.compile(r"^(?P<what>keys|values) (?P<said>(?:are|have|hold) .*?) as attention reads them")
_EXPERT = re.compile(
    r"(?:weights|down projection) of expert (?P<expert>\d+) differs?(?: in its (?P<rows>rows? [^:]*))?"
)
_INPUTS = re.compile(r"the weight differs in (?P<what>[^:]*?) of its input")
_EXCHANGED = re.compile(rf"columns? (?P<one>{_LIST}) and (?P<two>{_LIST}) of its input are exchanged")
_ADDED_TO = re.compile(
    r"the weight differs(?: in (?P<what>[^:]*?) of its input)?: each element there is baseline's (?P<sign>[+−]) "
)
_LINEAR = "the weight differs: the error is a linear function of the input"
_BY_ONE = re.compile(r"the weight is too (?P<what>large|small) by 1 ")
_LOST = re.compile(r"the partial sum of rank (\d+) is zero")
_ALONE = re.compile(r"target = the partial sum of rank (\d+) alone")
_CHANNEL_FACTORS = "a separate factor per channel"
_CHANNEL_SUMMANDS = "a separate offset per channel"
_TOKEN_SUMMANDS = re.compile(rf"a separate offset per token \((?P<low>{_NUMBER}) to (?P<high>{_NUMBER})\)")
_DONE = {"zero": "are zero", "negate": "are negated", "clip": "are clamped"}
"""What became of keys or values."""


class Statement(NamedTuple):
    """A stated cause, taken apart."""

    columns: frozenset[int] | int | None
    """Those it is about, or how many; None where it names none."""
    has_rows: bool
    """Whether it is about some token rows alone."""
    rank: int | None
    summand: int | None
    """The rank whose summand it is about."""
    said: str
    """The sentence itself."""


def is_right(bug: Bug, text: str) -> bool:
    """Whether a stated cause is the cause of this bug."""
    stated = statement(text, _width(bug))
    if (bug.rows or bug.first_call) and not (stated.has_rows or _OF_ROWS.search(stated.said)):
        return False
    return _KINDS.get(bug.kind, _is_damage)(bug, stated)


def statement(text: str, width: int | None = None) -> Statement:
    """``in column 3 (of rank 1) of request r0: target is zero`` in its parts; ``width`` ends open ranges."""
    found = _WHERE.match(text)
    where, said = (found["where"], found["said"]) if found else ("", text)
    said = re.sub(r" \(removes [\d.]+ % of the error\)$", "", said)
    rank, summand = (
        re.search(r"\(?(?:of |shard of )?rank (\d+)\)?", where),
        re.search(r"partial sum of rank (\d+)", where),
    )
    named = re.match(rf"{_COLUMNS}|[\d,]+ of [\d,]+ columns", where)
    rest = where[named.end() :] if named else where
    columns: frozenset[int] | int | None = None
    if named is not None:
        count = re.match(r"([\d,]+) of", named[0])
        columns = int(count[1].replace(",", "")) if count else indices(named[0], width)
    of_sum = int(summand[1]) if summand else None
    return Statement(columns, bool(_ROWS.search(rest)), int(rank[1]) if rank and not summand else None, of_sum, said)


def indices(text: str, width: int | None = None) -> frozenset[int]:
    """All indices that ``columns 0–3 and 7`` or ``every third column from 1 to 10`` name; an open end at ``width``."""
    return frozenset(listed(text, width))


def listed(text: str, width: int | None = None) -> list[int]:
    """The same in the order in which they are named."""
    every = re.search(r"every (\w+) \w+ from (\d+)(?: to (\d+)| on)", text)
    if every is not None:
        step = _ORDINALS.get(every[1]) or int(re.sub(r"\D", "", every[1]))
        first = int(every[2])
        last = int(every[3]) if every[3] is not None else (width or first + 2 * step + 1) - 1
        return list(range(first, last + 1, step))
    ends = re.findall(r"(\d+)(?:–(\d+))?", text)
    return [i for a, b in ends for i in range(int(a), int(b or a) + 1)]


def _width(bug: Bug) -> int | None:
    """Columns of the output that the bug's tensor gives, over all shards; None where that is not known."""
    if not bug.shape:
        return None
    return bug.shape[0 if has_outputs_first(bug) else -1] * (bug.shards if "weight" not in bug.kind else 1)


def has_outputs_first(bug: Bug) -> bool:
    """Whether the tensor is a weight [outputs, inputs], as of most linear layers."""
    return len(bug.shape) > 1 and not _is_table(bug) and not any(name in bug.module for name in _TRANSPOSED)


def _is_table(bug: Bug) -> bool:
    """Whether the tensor is an embedding, [tokens, outputs]."""
    return "weight" in bug.kind and any(name in bug.module for name in _TABLES)


# What a damage does to the output or to the weight's inputs


def _is_of_inputs(bug: Bug) -> bool:
    """Whether the damaged part is one of a weight's inputs."""
    if "weight" not in bug.kind or bug.damage is None or len(bug.shape) < 2:
        return False
    return (bug.damage.axis == -1) == has_outputs_first(bug)


def changed(bug: Bug) -> frozenset[int] | None:
    """Indices of the outputs, or of the inputs, that the bug is confined to; None where that is not known."""
    damage = bug.damage
    if damage is None:
        return None
    axis = -1 if len(bug.shape) <= 1 else damage.axis
    size = bug.shape[axis] if bug.shape else None
    if damage.start is None and damage.op not in ("swap", "copy"):
        found = set(range(size)) if size is not None else set()
        return frozenset(j for i in found for j in _placed(bug, i)) if found else None
    starts = [damage.start or 0] + ([damage.other] if damage.op == "swap" else [])
    count = damage.count if size is None else min(damage.count, size)
    some = (start + damage.stride * i for start in starts for i in range(count))
    return frozenset(j for i in some for j in _placed(bug, i if size is None else i % size))


def moved(bug: Bug) -> dict[int, int]:
    """Index -> the index whose values it holds, of those that hold others."""
    damage = bug.damage
    if damage is None or damage.op not in _MOVED:
        return {}
    axis = -1 if len(bug.shape) <= 1 else damage.axis
    size = bug.shape[axis] if bug.shape else damage.stride * (damage.count + 1) + max(damage.start or 0, damage.other)
    source = replace(damage, axis=-1)(torch.arange(size, dtype=torch.float64)[None])[0].long().tolist()
    return {
        here: there
        for i, j in enumerate(source)
        if i != j
        for here, there in zip(_placed(bug, i), _placed(bug, j), strict=True)
    }


def _placed(bug: Bug, index: int) -> list[int]:
    """Where an index of one rank's tensor is in the whole one."""
    if not bug.shape or bug.kind == "weight":
        return [index]
    if bug.kind == "rank_weight":
        return [(bug.rank or 0) * bug.shape[-1] + index] if _is_of_inputs(bug) else [index]
    if bug.shards == 1:
        return [index]
    ranks = range(bug.shards) if bug.rank is None else (bug.rank,)
    return [rank * bug.shape[-1] + index for rank in ranks]


def _covers(bug: Bug, named: frozenset[int] | int | None, *, period: int | None = None) -> bool:
    """Whether the columns that are named are those that the bug changes, or most of them."""
    real, damage = changed(bug), bug.damage
    assert damage is not None
    if real is None:
        return named is None
    if period is not None:
        width = period * (1 + max(named) // period) if isinstance(named, frozenset) and named else period
        real = frozenset(i for i in range(width) if i % period in real)
    partly = damage.op in _PARTLY
    if named is None:
        width = _width(bug) if not _is_of_inputs(bug) else bug.shape[damage.axis]
        return partly or (width is not None and len(real) >= _EVERYWHERE * width)
    if isinstance(named, int):
        return (partly or named >= _COVERED * len(real)) and named <= len(real)
    return named <= real and (partly or (bool(named) and len(named) >= _COVERED * len(real)))


# Sentences about values and weights


def _is_damage(bug: Bug, stated: Statement) -> bool:
    """Whether what is said of an output, a summand or a weight is what the damage does."""
    said, damage = stated.said, bug.damage
    if damage is None:
        return False
    if (found := _EXPERT.search(said)) is not None:
        return _is_expert(bug, found)
    if "weight" in bug.kind and (about := _of_inputs(bug, stated)) is not None:
        return about
    is_summand = bug.kind == "partial" or (bug.kind == "rank_weight" and len(bug.shape) > 1)
    if (lost := _LOST.search(said)) is not None:
        return is_summand and damage.op == "zero" and bug.rank == int(lost[1]) and _covers(bug, stated.columns)
    if (alone := _ALONE.search(said)) is not None:
        return _is_alone(bug, int(alone[1]))
    if is_summand and (stated.summand if stated.summand is not None else stated.rank) != bug.rank:
        return False
    if stated.rank is not None and bug.rank not in (None, stated.rank):
        return False
    if ".experts." in bug.module and not said.startswith("target"):
        return False
    if _is_table(bug) and damage.axis == -2:  # rows of some tokens
        if damage.op in _MOVED:
            return re.search("rows are those of other tokens|rows in another order|= baseline of ", said) is not None
        is_there = stated.has_rows or damage.start is None
        return is_there and stated.columns is None and _says(bug, damage, stated)
    if _is_of_inputs(bug):  # of the output that is nothing but a factor of all
        return (
            damage.start is None
            and stated.columns is None
            and damage.op in _SCALED
            and _is_factor(said, _SCALED[damage.op](damage))
        )
    period = bug.shape[-1] if "weight" in bug.kind and len(bug.shape) == 1 else None
    if damage.op in _MOVED and _role(bug) == "values":
        return _is_move(bug, stated)
    if not _covers(bug, stated.columns, period=period):
        return False
    return _says(bug, damage, stated)


_SCALED = {"scale": lambda one: one.amount, "zero": lambda one: 0.0, "negate": lambda one: -1.0}
"""Operations that are a factor."""


def _role(bug: Bug) -> str:
    """What the damaged tensor is to the output: a ``bias``, a ``norm``'s weight, a ``linear`` weight's rows of
    outputs, or its ``values``."""
    if "weight" not in bug.kind:
        return "values"
    if bug.module.endswith("bias"):
        return "bias"
    return "norm" if len(bug.shape) <= 1 else "values" if damaged_like_values(bug) else "linear"


def damaged_like_values(bug: Bug) -> bool:
    """Whether each output is changed as its row of the weight is: of an embedding always, else by what is linear."""
    return _is_table(bug) or (bug.damage is not None and bug.damage.op in (*_SCALED, *_MOVED))


def _says(bug: Bug, damage: Damage, stated: Statement) -> bool:
    said, role = stated.said, _role(bug)
    if role == "bias":
        added = _ADDED.match(said)
        is_one = isinstance(stated.columns, frozenset) and bug.change is not None
        if damage.op not in _MOVED and added is not None and is_one and bug.change is not None:
            return not stated.has_rows and _is_added(added, bug.change[1] - bug.change[0])
        if damage.op == "add" and added is not None and not stated.has_rows:
            return (added["sign"] == "+") == (damage.amount > 0)
        return _CHANNEL_SUMMANDS in said
    if role == "norm":
        return _says_of_norm(bug, damage, stated)
    if role == "linear":
        tokens = _TOKEN_SUMMANDS.search(said)
        return damage.op == "add" and tokens is not None
    if damage.op in _SCALED:
        zero = damage.op == "zero" and "the weight counts as zero" in said and len(bug.shape) > 1
        return zero or _is_factor(said, _SCALED[damage.op](damage))
    if damage.op == "round":
        return any(re.search(rf"(?:cast through|cast to|rounded to) {name}\b", said) for name in _CAST[damage.dtype])
    if damage.op == "clip":
        return "baseline clamped" in said
    if (tokens := _TOKEN_SUMMANDS.search(said)) is not None:
        return all(float(tokens[end]) * damage.amount > 0 for end in ("low", "high"))
    added = _ADDED.match(said)
    return added is not None and (added["sign"] == "+") == (damage.amount > 0)


_ADDED = re.compile(rf"target = baseline (?P<sign>[+−]) (?P<factor>{_NUMBER})")


def _says_of_norm(bug: Bug, damage: Damage, stated: Statement) -> bool:
    said = stated.said
    if (found := _BY_ONE.search(said)) is not None:
        sign = 1.0 if found["what"] == "large" else -1.0
        return (damage.op == "add" and damage.amount * sign > 0) or (damage.op, damage.amount) == ("scale", 1.0 + sign)
    if _CHANNEL_FACTORS in said:
        return True
    if damage.op in _SCALED and not bug.adds_one:
        is_zero = damage.op == "zero" and "the weight counts as zero" in said
        if is_zero or _is_factor(said, _SCALED[damage.op](damage)):
            return True
    if damage.op == "zero" and bug.adds_one and "of its input without a weight" in said:
        return True
    if bug.change is None or damage.op in _MOVED or stated.has_rows:
        return False
    one = float(bug.adds_one)
    before, after = bug.change
    return before + one != 0.0 and _is_factor(said, (after + one) / (before + one))


def _is_added(found: re.Match[str], meant: float) -> bool:
    said = float(found["factor"]) * (-1.0 if found["sign"] == "−" else 1.0)
    return _is_near(said, meant, 0.0, found["factor"])


def _is_expert(bug: Bug, found: re.Match[str]) -> bool:
    if f".experts.{found['expert']}." not in bug.module:
        return False
    if found["rows"] is None:
        return True
    is_down = "down_proj" in bug.module or ".w2." in bug.module
    return is_down and not _is_of_inputs(bug) and _covers(bug, indices(found["rows"]))


def _of_inputs(bug: Bug, stated: Statement) -> bool | None:
    """Whether the inputs that a sentence says a weight differs for are the bug's; None where it is not about inputs."""
    said = stated.said
    if (added := _ADDED_TO.search(said)) is not None:
        assert bug.damage is not None
        if bug.damage.op != "add" or (added["sign"] == "+") != (bug.damage.amount > 0):
            return False
        if _is_of_inputs(bug):
            return _covers(bug, indices(added["what"]) if added["what"] else None)
        return added["what"] is None and _covers(bug, stated.columns)
    if _LINEAR in said:
        return len(bug.shape) == 2 and not _is_table(bug)
    is_shard = bug.kind == "rank_weight" and len(bug.shape) == 2 and bug.rank is not None
    if (found := _EXCHANGED.search(said)) is not None:
        if not _is_of_inputs(bug):
            return False
        real, (one, two) = moved(bug), (listed(found[name]) for name in ("one", "two"))
        pairs = dict(zip(one, two, strict=False)) | dict(zip(two, one, strict=False))
        return len(one) == len(two) and _agrees(pairs, real)
    if (found := _INPUTS.search(said)) is None:
        return None
    named = indices(found["what"])
    if _is_of_inputs(bug):
        real = changed(bug)
        return real is not None and named <= real and ("at least" in said or _covers(bug, named))
    if bug.touched and _covers(bug, stated.columns):
        here = named & frozenset(bug.touched)
        return len(here) >= max(_COVERED * len(named), _EVERYWHERE * len(bug.touched))
    shard = frozenset(range((bug.rank or 0) * bug.shape[-1], ((bug.rank or 0) + 1) * bug.shape[-1]))
    return is_shard and named <= shard


def _is_alone(bug: Bug, rank: int) -> bool:
    """Whether the bug leaves nothing but the summand of one of two ranks."""
    damage = bug.damage
    if damage is None or damage.op != "zero":
        return False
    if bug.kind == "partial" or (bug.kind == "rank_weight" and len(bug.shape) > 1):
        return damage.start is None and bug.rank != rank
    real, width = changed(bug), bug.shape[-1] if len(bug.shape) > 1 else 0
    half = frozenset(range((1 - rank) * (width // 2), (2 - rank) * (width // 2)))
    return _is_of_inputs(bug) and rank in (0, 1) and real == half


# Sentences about columns that hold others


def _is_move(bug: Bug, stated: Statement) -> bool:
    """Whether the columns are said to hold those that the bug put there."""
    if "holds each row's values in another order" in stated.said:
        return bug.damage is not None and bug.damage.op != "copy" and _covers(bug, stated.columns)
    claimed = claimed_moves(stated, _width(bug))
    return claimed is not None and _agrees(claimed, moved(bug))


def _agrees(claimed: dict[int, int], real: dict[int, int]) -> bool:
    """Whether every column that is said to hold another does, and half of those that do are named."""
    told = {here: there for here, there in claimed.items() if here != there}
    return (
        bool(told)
        and all(real.get(here) == there for here, there in told.items())
        and (len(told) >= _COVERED * len(real))
    )


def claimed_moves(stated: Statement, width: int | None) -> dict[int, int] | None:
    """Column -> the column whose values it is said to hold; None where the sentence is about something else."""
    said = stated.said
    if (found := re.match(rf"target has (?P<one>{_COLUMNS}) and (?P<two>{_COLUMNS}) swapped", said)) is not None:
        one, two = (listed(found[name], width) for name in ("one", "two"))
        pairs = list(zip(one, two, strict=False))
        return dict(pairs) | {b: a for a, b in pairs} if len(one) == len(two) else None
    if (
        found := re.match(rf"target has (?P<what>{_COLUMNS}|its columns) rotated by (?P<by>[−-]?\d+)", said)
    ) is not None:
        named = range(width or 0) if found["what"] == "its columns" else indices(found["what"], width)
        return _rotated(sorted(named), int(found["by"].replace("−", "-")))
    if (found := re.match(rf"target holds baseline's (?P<two>{_COLUMNS}) in (?P<one>{_COLUMNS})", said)) is not None:
        one, two = (listed(found[name], width) for name in ("one", "two"))
        return dict(zip(one, two, strict=False)) if len(one) == len(two) else None
    if (found := re.match(r"target has the two halves of each row swapped \((\d+) columns each", said)) is not None:
        half = int(found[1])
        return {i: (i + half) % (2 * half) for i in range(2 * half)}
    return _claimed_blocks(stated, width)


def _rotated(columns: list[int], by: int) -> dict[int, int]:
    """Each column holds that of ``by`` places before it in the list, the first ones those at its end."""
    count = len(columns)
    return {column: columns[(i - by) % count] for i, column in enumerate(columns)}


def _claimed_blocks(stated: Statement, width: int | None) -> dict[int, int] | None:
    said = stated.said
    if (found := re.match(r"target has blocks (\d+) and (\d+) of (\d+) columns swapped", said)) is not None:
        one, two, size = map(int, found.groups())
        pairs = [(one * size + i, two * size + i) for i in range(size)]
        return dict(pairs) | {b: a for a, b in pairs}
    if (
        found := re.match(r"target has the (\d+) blocks of (\d+) columns (in reverse|rotated by (\d+))", said)
    ) is not None:
        count, size = int(found[1]), int(found[2])
        order = [count - 1 - i if found[4] is None else (i - int(found[4])) % count for i in range(count)]
        return {i * size + k: order[i] * size + k for i in range(count) for k in range(size)}
    if (found := re.search(r"hold what the baseline has (\d+) columns (later|earlier)", said)) is not None:
        by = int(found[1]) * (1 if found[2] == "later" else -1)
        if not isinstance(stated.columns, frozenset):
            return None
        return {i: i + by for i in stated.columns}
    return None


# Sentences about other kinds of bugs


def _is_read(bug: Bug, stated: Statement) -> bool:
    """Whether what is said of keys or values as attention reads them is what became of them."""
    damage, found = bug.damage, _READ.search(stated.said)
    if damage is None:
        return False
    if found is None:  # keys that are all scaled alike scale the scores
        if bug.kind == "values":  # weights add up to 1: what all values have, the output has
            period = bug.shape[-1] if bug.shape else None
            return bool(period) and _covers(bug, stated.columns, period=period) and _says(bug, damage, stated)
        is_whole = damage.op == "scale" and damage.start is None and not bug.rows
        return bug.kind == "keys" and is_whole and _is_factor(stated.said, damage.amount, _SCORES)
    said = found["said"]
    if found["what"] != bug.kind:
        return False
    if damage.op in _MOVED:
        claimed = claimed_moves(
            stated._replace(
                said=re.sub("^(?:have|hold) ", lambda m: {"have ": "target has ", "hold ": "target holds "}[m[0]], said)
            ),
            None,
        )
        return claimed is not None and _agrees(claimed, moved(bug))
    where = re.search(_COLUMNS, said)
    if not _covers(bug, indices(where[0], _width(bug)) if where else None):
        return False
    if damage.op == "scale":
        return _is_factor(said.removeprefix("are "), damage.amount)
    if damage.op == "add":
        return f"are baseline's {'+' if damage.amount > 0 else '−'} " in said
    if damage.op == "round":
        return any(f"are rounded to {name}" in said for name in _CAST[damage.dtype])
    return _DONE[damage.op] in said


def _is_rotation(bug: Bug, stated: Statement) -> bool:
    """Whether what is said of RoPE's frequencies is what became of them."""
    damage, said = bug.damage, stated.said
    assert damage is not None
    real = changed(bug)
    if "all angles are zero" in said:
        return damage.op == "zero" and real is not None and len(real) == _width(bug)
    if "RoPE at positions" in said:
        number = re.search(rf"RoPE at positions (?P<factor>{_NUMBER}) times", said)
        shown = re.search(r", as (pairs? [^a-z]*) of \d+ show", said)
        is_whole = damage.start is None or (real is not None and len(real) == _width(bug))
        is_whole |= shown is not None and real is not None and indices(shown[1]) <= real
        is_whole &= damage.op == "scale"
        return (
            is_whole and number is not None and _is_near(float(number["factor"]), damage.amount, 1.0, number["factor"])
        )
    if "inverse frequencies are rounded to" in said:
        return damage.op == "round" and any(f"rounded to {name} " in said for name in _CAST[damage.dtype])
    half = _width(bug)
    pairs = re.search(r"frequencies of (?P<count>\d+) pairs? \((?P<some>[^)]*)\) are (?P<what>.*?) in target", said)
    if pairs is not None:
        named = indices(pairs["some"])
        if (
            real is None
            or not named <= real
            or (int(pairs["count"]) < _COVERED * len(real) and damage.op not in _PARTLY)
        ):
            return False
        factor = re.match(_FACTOR, pairs["what"])
        return int(pairs["count"]) <= len(real) and (
            factor is None or damage.op not in _SCALED or _is_factor(pairs["what"], _SCALED[damage.op](damage))
        )
    if real is None or half is None:
        return False
    if "frequencies differ in target" in said:
        return len(real) >= _EVERYWHERE * half
    both = frozenset(i + k for i in real for k in (0, half))  # a table holds every angle twice
    is_there = len(both) == 2 * half if stated.columns is None else stated.columns == both
    return is_there and damage.op in ("negate", "zero") and _is_factor(said, _SCALED[damage.op](damage))


def _is_position(bug: Bug, stated: Statement) -> bool:
    if bug.text != "offset":
        number = re.search(rf"RoPE at positions (?P<factor>{_NUMBER}) times", stated.said)
        return number is not None and _is_near(float(number["factor"]), bug.value, 1.0, number["factor"])
    offset = int(bug.value)
    more = rf"positions (?:are|were) {abs(offset)} {'higher' if offset > 0 else 'lower'}\b"
    return bool(re.search(more, stated.said)) or bool(
        re.search(rf"shifted by {re.escape(f'{-offset:+d}')}\b", stated.said)
    )


def _is_residual(bug: Bug, stated: Statement) -> bool:
    """Whether the layer's own input is said to be added once more, or left out."""
    found = re.match(
        r"target = baseline (?P<sign>[+−]) (?P<site>\S+) \((?P<word>added once more|left out)\)", stated.said
    )
    if found is None or (found["sign"] == "+") != (bug.value > 0):
        return False
    layer = re.search(r"layers\.(\d+)$", bug.module)
    own = re.escape(bug.module) + r"(?:\.input_layernorm)?:in\["
    before = rf"layers\.{int(layer[1]) - 1}:out" if layer and int(layer[1]) else "embed_tokens:out"
    return bool(re.search(rf"{own}|{before}", found["site"]))


def _is_routing(bug: Bug, stated: Statement) -> bool:
    if bug.text == "half" and bug.module.endswith("experts") and _is_factor(stated.said, 0.5):
        return True  # it is within the experts that the weights are halved
    if bug.text == "equal" and bug.value == 1.0:  # the one weight is 1.1 times its mean
        return re.search(r"weights are 1\.1 × baseline", stated.said) is not None
    is_only_one = bug.text == "one_expert" and bug.value == 1.0
    return re.search(_ROUTED["next_expert" if is_only_one else bug.text], stated.said) is not None


def _is_activation(bug: Bug, stated: Statement) -> bool:
    name = re.escape(_ACTIVATIONS.get(bug.text, bug.text))
    pattern = rf"target = (?:[\w ()]+ or )?{name}(?: or [\w ()]+)? of its input"  # look-alikes are named together
    return re.search(pattern, stated.said) is not None


def _is_epsilon(bug: Bug, stated: Statement) -> bool:
    found = _EPSILON.search(stated.said)
    if found is None or bug.change is None:
        return False
    said = float(found["factor"]) * (-1.0 if found["sign"] == "smaller" else 1.0)
    return _is_near(said, bug.change[1] - bug.change[0], 0.0, found["factor"])


_KINDS = {
    "router": _is_routing,
    "mask": lambda bug, stated: re.search(_MASKED[bug.text], stated.said) is not None,
    "softmax_scale": lambda bug, stated: _is_factor(stated.said, bug.value, _SCORES),
    "activation": _is_activation,
    "epsilon": _is_epsilon,
    "positions": _is_position,
    "frequencies": _is_rotation,
    "residual": _is_residual,
    "keys": _is_read,
    "values": _is_read,
}
"""By kind of bug; what is not here is a damage of an output, a summand or a weight."""


# Numbers


_TIMES = re.compile(rf"(?:target = )?(?:{_FACTOR}|baseline / (?P<part>{_NUMBER}))")


def _is_factor(said: str, meant: float, pattern: re.Pattern[str] = _TIMES) -> bool:
    """Whether a sentence says that it is ``meant`` times the baseline."""
    if meant == 0.0 and (said.startswith("target is zero") or said == "are zero"):
        return True
    if meant == -1.0 and said.startswith("target = −baseline"):
        return True
    found = pattern.search(said) if pattern is _SCORES else pattern.match(said)
    if found is None:
        return False
    named = found.groupdict()
    if named.get("off") is not None:
        digits = named["off"].replace(" ", "")
        return _is_near(1.0 + float(digits), meant, 1.0, digits)
    if named.get("part") is not None:
        return _is_near(1.0 / float(named["part"]), meant, 1.0, "1")
    return _is_near(float(named["factor"]), meant, 1.0, named["factor"])


def _is_near(said: float, meant: float, neutral: float, digits: str) -> bool:
    """Whether a number that was stated is ``meant``: up to rounding of the change from ``neutral``, and half a unit
    of the last of its ``digits``, of which there are three at least: zeros at the end are not printed."""
    significant = len(re.sub(r"e.*|\D", "", digits).lstrip("0"))
    shown = said - neutral if digits.startswith(("+", "-")) and neutral == 1.0 else said
    unit = 10.0 ** (math.floor(math.log10(abs(shown))) + 1 - max(significant, 3)) if shown else 0.0
    return abs(said - meant) <= _TOLERANCE * abs(meant - neutral) + 0.5001 * unit
