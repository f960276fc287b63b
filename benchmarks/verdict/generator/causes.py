"""Causes: whether a stated cause is correct for a generated bug.

A sentence is correct if each of its parts is: the operation, its numbers, the columns, the rank and, for a bug in some
token rows, a restriction to some rows. An equivalent description counts: one wrong element of a norm weight scales one
channel. A sentence that names fewer columns than the bug changed is correct if it names at least half of them, because
a factor leaves a column of zeros unchanged. ``at least 21 of 64 columns`` is correct if all of these changed.
"""

import math
import re

from benchmarks.verdict.generator.bug import MOVING, Bug, changed, is_embedding, is_of_inputs, moved, output_width
from benchmarks.verdict.generator.damage import Damage
from benchmarks.verdict.generator.statement import (
    COLUMNS,
    FACTOR,
    LIST,
    NUMBER,
    Statement,
    claimed_moves,
    indices,
    listed,
    statement,
)

_TOLERANCE = 0.06
"""Relative tolerance of a stated change."""
_COVERED = 0.5
"""Share of the changed indices that a sentence must name."""
_EVERYWHERE = 0.9
"""Share of the columns that must have changed for a sentence that names no columns."""
_PARTLY = ("clip", "round")
"""Operations that leave many values unchanged."""
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
"""The comparator's names of activations."""
_OF_ROWS = re.compile(r"of positions? \d|of the (?:first|last) token|of the token's own|from step \d")
_SCORES = re.compile(rf"target scales scores by .*, {FACTOR}'s")
_EPSILON = re.compile(rf"epsilon is (?P<sign>larger|smaller) by (?P<factor>{NUMBER})")
_READ = re.compile(r"^(?P<what>keys|values) (?P<claim>(?:are|have|hold) .*?) as attention reads them")
_EXPERT = re.compile(
    r"(?:weights|down projection) of expert (?P<expert>\d+) differs?(?: in its (?P<rows>rows? [^:]*))?"
)
_INPUTS = re.compile(r"the weight differs in (?P<what>[^:]*?) of its input")
_EXCHANGED = re.compile(rf"columns? (?P<one>{LIST}) of its input are exchanged with columns? (?P<two>{LIST})")
_ADDED_TO = re.compile(
    r"the weight differs(?: in (?P<what>[^:]*?) of its input)?: each element there is baseline's (?P<sign>[+−]) "
)
_LINEAR = "the weight differs: the error is a linear function of the input"
_SHARD = re.compile(r"weight \(in (?P<what>[^)]*) of its input\) or the partial sum of rank (?P<rank>\d+) differs")
_CORRECTION = re.compile(r"correction bias differs for (?P<what>experts? .*)")
_BY_ONE = re.compile(r"the weight is too (?P<what>large|small) by 1 ")
_ANY_RANK = "(added to one rank's partial sum, or to the sum)"
"""The added value is the same in all of them, so the values do not reveal the rank."""
_LOST = re.compile(r"the partial sum of rank (\d+) is zero")
_ALONE = re.compile(r"target = the partial sum of rank (\d+) alone")
_CHANNEL_FACTORS = "a separate factor per channel"
_CHANNEL_SUMMANDS = "a separate offset per channel"
_TOKEN_SUMMANDS = re.compile(rf"a separate offset per token \((?P<low>{NUMBER}) to (?P<high>{NUMBER})\)")
_DONE = {"zero": "are zero", "negate": "are negated", "clip": "are clamped"}
"""Claims about keys or values, by operation."""


def is_right(bug: Bug, text: str) -> bool:
    """Return whether a stated cause is the cause of this bug."""
    stated = statement(text, output_width(bug))
    if (bug.rows or bug.first_call) and not (stated.has_rows or _OF_ROWS.search(stated.claim)):
        return False
    return _KINDS.get(bug.kind, _is_damage)(bug, stated)


def _covers(
    bug: Bug,
    named: frozenset[int] | int | None,
    *,
    period: int | None = None,
    total: int | None = None,
    is_lower_bound: bool = False,
) -> bool:
    """Return whether the named columns are at least half of those that the bug changes; for a lower bound, some
    suffice."""
    real, damage = changed(bug), bug.damage
    assert damage is not None
    if real is None:
        return named is None
    if period is not None:
        width = period * (1 + max(named) // period) if isinstance(named, frozenset) and named else total or period
        real = frozenset(i for i in range(width) if i % period in real)
    partly = damage.op in _PARTLY or is_lower_bound
    if named is None:
        width = output_width(bug) if not is_of_inputs(bug) else bug.shape[damage.axis]
        return partly or (width is not None and len(real) >= _EVERYWHERE * width)
    if isinstance(named, int):
        return (partly or named >= _COVERED * len(real)) and named <= len(real)
    return named <= real and (partly or (bool(named) and len(named) >= _COVERED * len(real)))


# Claims about values and weights


def _is_damage(bug: Bug, stated: Statement) -> bool:
    """Return whether a claim about an output, a partial sum or a weight describes the damage."""
    claim, damage = stated.claim, bug.damage
    if damage is None:
        return False
    if (found := _EXPERT.search(claim)) is not None:
        return _is_expert(bug, found)
    if (experts := _CORRECTION.search(claim)) is not None:
        return bug.module.endswith("e_score_correction_bias") and _covers(bug, indices(experts["what"]))
    if (shard := _SHARD.search(claim)) is not None:
        return _is_summand_of(bug, int(shard["rank"]), indices(shard["what"]))
    if "weight" in bug.kind and (about := _of_inputs(bug, stated)) is not None:
        return about
    is_summand = bug.kind == "partial" or (bug.kind == "rank_weight" and len(bug.shape) > 1)
    if (lost := _LOST.search(claim)) is not None:
        is_zero = is_summand and bug.rank == int(lost[1]) and _covers(bug, stated.columns)
        return damage.op == "zero" and (is_zero or _is_shard(bug, int(lost[1])))
    if (alone := _ALONE.search(claim)) is not None:
        return _is_alone(bug, int(alone[1]))
    rank = stated.partial_sum if stated.partial_sum is not None else stated.rank
    if is_summand and rank != bug.rank and (rank is not None or _ANY_RANK not in claim):
        return False
    if stated.rank is not None and bug.rank not in (None, stated.rank):
        return False
    if ".experts." in bug.module and not claim.startswith("target"):
        return False
    if is_embedding(bug) and damage.axis == -2:  # rows of some tokens
        if damage.op in MOVING:
            return re.search("rows are those of other tokens|rows in another order|= baseline of ", claim) is not None
        is_there = stated.has_rows or damage.start is None
        return is_there and stated.columns is None and _says(bug, damage, stated)
    if is_of_inputs(bug):  # for the output, this is only a common factor
        is_whole = damage.start is None and stated.columns is None and damage.op in _SCALED
        return is_whole and (_is_lost(damage, claim) or _is_factor(claim, _SCALED[damage.op](damage)))
    period = bug.shape[-1] if "weight" in bug.kind and len(bug.shape) == 1 else None
    if damage.op in MOVING and _role(bug) == "values":
        return _is_move(bug, stated)
    bound = stated.is_lower_bound
    if not _covers(bug, stated.columns, period=period, total=stated.total, is_lower_bound=bound):
        return False
    return _says(bug, damage, stated)


_SCALED = {"scale": lambda one: one.amount, "zero": lambda one: 0.0, "negate": lambda one: -1.0}
"""Operations equivalent to a factor."""


def _is_summand_of(bug: Bug, rank: int, columns: frozenset[int]) -> bool:
    """Return whether the bug changes the partial sum of this rank, whose shard of the input has these ``columns``."""
    if bug.kind == "partial" or (bug.kind == "rank_weight" and len(bug.shape) > 1):
        return bug.rank == rank
    affected = changed(bug) if is_of_inputs(bug) else frozenset(bug.touched)
    return bool(affected) and affected is not None and affected <= columns


def _role(bug: Bug) -> str:
    """Return the role of the damaged tensor: ``bias``, ``norm`` weight, ``linear`` weight, or output ``values``."""
    if "weight" not in bug.kind:
        return "values"
    if bug.module.endswith("bias"):
        return "bias"
    return "norm" if len(bug.shape) <= 1 else "values" if damaged_like_values(bug) else "linear"


def damaged_like_values(bug: Bug) -> bool:
    """Return whether the damage changes each output as it changes the output's row of the weight."""
    return is_embedding(bug) or (bug.damage is not None and bug.damage.op in (*_SCALED, *MOVING))


def _says(bug: Bug, damage: Damage, stated: Statement) -> bool:
    claim, role = stated.claim, _role(bug)
    if role == "bias":
        added = _ADDED.match(claim)
        is_one = isinstance(stated.columns, frozenset) and bug.change is not None
        if damage.op not in MOVING and added is not None and is_one and bug.change is not None:
            return not stated.has_rows and _is_added(added, bug.change[1] - bug.change[0])
        if damage.op == "add" and added is not None and not stated.has_rows:
            return (added["sign"] == "+") == (damage.amount > 0)
        return _CHANNEL_SUMMANDS in claim
    if role == "norm":
        return _says_of_norm(bug, damage, stated)
    if role == "linear":
        tokens = _TOKEN_SUMMANDS.search(claim)
        return damage.op == "add" and tokens is not None
    if damage.op in _SCALED:
        zero = _is_lost(damage, claim) and len(bug.shape) > 1
        return zero or _is_factor(claim, _SCALED[damage.op](damage))
    if damage.op == "round":
        return any(re.search(rf"(?:cast through|cast to,?|rounded to) {name}\b", claim) for name in _CAST[damage.dtype])
    if damage.op == "clip":
        return "baseline clamped" in claim
    if (tokens := _TOKEN_SUMMANDS.search(claim)) is not None:
        return all(float(tokens[end]) * damage.amount > 0 for end in ("low", "high"))
    added = _ADDED.match(claim)
    return added is not None and (added["sign"] == "+") == (damage.amount > 0)


_ADDED = re.compile(rf"target = baseline (?P<sign>[+−]) (?P<factor>{NUMBER})")


def _is_lost(damage: Damage, claim: str) -> bool:
    """Return whether a zero weight is claimed and real: an output without a bias is then zero, too."""
    return damage.op == "zero" and "the weight counts as zero" in claim


def _says_of_norm(bug: Bug, damage: Damage, stated: Statement) -> bool:
    claim = stated.claim
    if (found := _BY_ONE.search(claim)) is not None:
        sign = 1.0 if found["what"] == "large" else -1.0
        return (damage.op == "add" and damage.amount * sign > 0) or (damage.op, damage.amount) == ("scale", 1.0 + sign)
    if _CHANNEL_FACTORS in claim:
        return True
    is_scaled = damage.op in _SCALED and not bug.adds_one
    if is_scaled and (_is_lost(damage, claim) or _is_factor(claim, _SCALED[damage.op](damage))):
        return True
    if damage.op == "zero" and bug.adds_one and "of its input without a weight" in claim:
        return True
    if bug.change is None or damage.op in MOVING or stated.has_rows:
        return False
    one = float(bug.adds_one)
    before, after = bug.change
    return before + one != 0.0 and _is_factor(claim, (after + one) / (before + one))


def _is_added(found: re.Match[str], meant: float) -> bool:
    number = float(found["factor"]) * (-1.0 if found["sign"] == "−" else 1.0)
    return _is_near(number, meant, 0.0, found["factor"])


def _is_expert(bug: Bug, found: re.Match[str]) -> bool:
    if f".experts.{found['expert']}." not in bug.module:
        return False
    if found["rows"] is None:
        return True
    is_down = "down_proj" in bug.module or ".w2." in bug.module
    named = indices(found["rows"])
    if is_of_inputs(bug):  # a row without a clipped element is not affected
        real = frozenset(bug.touched_outputs)
        return is_down and named <= real and len(named) >= _COVERED * len(real)
    return is_down and _covers(bug, named)


def _of_inputs(bug: Bug, stated: Statement) -> bool | None:
    """Return whether the input columns that a sentence names are the bug's; None if it names none."""
    claim = stated.claim
    if (added := _ADDED_TO.search(claim)) is not None:
        assert bug.damage is not None
        if bug.damage.op != "add" or (added["sign"] == "+") != (bug.damage.amount > 0):
            return False
        if is_of_inputs(bug):
            return _covers(bug, indices(added["what"]) if added["what"] else None)
        return added["what"] is None and _covers(bug, stated.columns)
    if _LINEAR in claim:
        return len(bug.shape) == 2 and not is_embedding(bug)
    is_shard = bug.kind == "rank_weight" and len(bug.shape) == 2 and bug.rank is not None
    if (found := _EXCHANGED.search(claim)) is not None:
        if not is_of_inputs(bug):
            return False
        real, (one, two) = moved(bug), (listed(found[name]) for name in ("one", "two"))
        pairs = dict(zip(one, two, strict=False)) | dict(zip(two, one, strict=False))
        return len(one) == len(two) and _agrees(pairs, real)
    if (found := _INPUTS.search(claim)) is None:
        return None
    named = indices(found["what"])
    if is_of_inputs(bug):
        real = changed(bug)
        return real is not None and named <= real and ("at least" in claim or _covers(bug, named))
    if bug.touched and _covers(bug, stated.columns):
        here = named & frozenset(bug.touched)
        return len(here) >= max(_COVERED * len(named), _EVERYWHERE * len(bug.touched))
    shard = frozenset(range((bug.rank or 0) * bug.shape[-1], ((bug.rank or 0) + 1) * bug.shape[-1]))
    return is_shard and named <= shard


def _is_alone(bug: Bug, rank: int) -> bool:
    """Return whether the bug leaves only the partial sum of this rank, of two."""
    damage = bug.damage
    if damage is None or damage.op != "zero":
        return False
    if bug.kind == "partial" or (bug.kind == "rank_weight" and len(bug.shape) > 1):
        return damage.start is None and bug.rank != rank
    return rank in (0, 1) and _is_shard(bug, 1 - rank)


def _is_shard(bug: Bug, rank: int) -> bool:
    """Return whether the bug changes exactly the inputs of this rank's weight shard, of two."""
    half = bug.shape[-1] // 2 if is_of_inputs(bug) else 0
    return half > 0 and changed(bug) == frozenset(range(rank * half, (rank + 1) * half))


# Claims about moved columns


def _is_move(bug: Bug, stated: Statement) -> bool:
    """Return whether the claimed moves of columns are those of the bug."""
    if "holds each row's values in another order" in stated.claim:
        return bug.damage is not None and bug.damage.op != "copy" and _covers(bug, stated.columns)
    claimed = claimed_moves(stated, output_width(bug))
    return claimed is not None and _agrees(claimed, moved(bug))


def _agrees(claimed: dict[int, int], real: dict[int, int]) -> bool:
    """Return whether every claimed move is real, and at least half of the real ones are claimed."""
    claims = {here: there for here, there in claimed.items() if here != there}
    return (
        bool(claims)
        and all(real.get(here) == there for here, there in claims.items())
        and (len(claims) >= _COVERED * len(real))
    )


# Claims about other kinds of bugs


def _is_read(bug: Bug, stated: Statement) -> bool:
    """Return whether a claim about keys or values as attention reads them describes the damage."""
    damage, found = bug.damage, _READ.search(stated.claim)
    if damage is None:
        return False
    if found is None:  # scaling all keys scales the scores
        if bug.kind == "values":  # weights sum to 1: a change common to all values appears in the output
            period = bug.shape[-1] if bug.shape else None
            return bool(period) and _covers(bug, stated.columns, period=period) and _says(bug, damage, stated)
        is_whole = damage.op == "scale" and damage.start is None and not bug.rows
        return bug.kind == "keys" and is_whole and _is_factor(stated.claim, damage.amount, _SCORES)
    claim = found["claim"]
    if found["what"] != bug.kind:
        return False
    if damage.op in MOVING:
        claimed = claimed_moves(
            stated._replace(
                claim=re.sub(
                    "^(?:have|hold) ", lambda m: {"have ": "target has ", "hold ": "target holds "}[m[0]], claim
                )
            ),
            None,
        )
        return claimed is not None and _agrees(claimed, moved(bug))
    where = re.search(COLUMNS, claim)
    if not _covers(bug, indices(where[0], output_width(bug)) if where else None):
        return False
    if damage.op == "scale":
        return _is_factor(claim.removeprefix("are "), damage.amount)
    if damage.op == "add":
        return f"are baseline's {'+' if damage.amount > 0 else '−'} " in claim
    if damage.op == "round":
        return any(f"are rounded to {name}" in claim for name in _CAST[damage.dtype])
    return _DONE[damage.op] in claim


def _is_rotation(bug: Bug, stated: Statement) -> bool:
    """Return whether a claim about RoPE frequencies describes the damage."""
    damage, claim = bug.damage, stated.claim
    assert damage is not None
    real = changed(bug)
    if "all angles are zero" in claim:
        return damage.op == "zero" and real is not None and len(real) == output_width(bug)
    if (zero := re.search(r"the angles of (?P<what>pairs? .*) of \d+ are zero", claim)) is not None:
        return damage.op == "zero" and real is not None and _covers(bug, indices(zero["what"]))
    if "RoPE at positions" in claim:
        number = re.search(rf"RoPE at positions (?P<factor>{NUMBER}) times", claim)
        shown = re.search(r", as (pairs? [^a-z]*) of \d+ show", claim)
        is_whole = damage.start is None or (real is not None and len(real) == output_width(bug))
        is_whole |= shown is not None and real is not None and indices(shown[1]) <= real
        is_whole &= damage.op == "scale"
        return (
            is_whole and number is not None and _is_near(float(number["factor"]), damage.amount, 1.0, number["factor"])
        )
    if "inverse frequencies are rounded to" in claim:
        return damage.op == "round" and any(f"rounded to {name} " in claim for name in _CAST[damage.dtype])
    half = output_width(bug)
    pairs = re.search(r"frequencies of (?P<count>\d+) pairs? \((?P<some>[^)]*)\) are (?P<what>.*?) in target", claim)
    if pairs is not None:
        named = indices(pairs["some"])
        if (
            real is None
            or not named <= real
            or (int(pairs["count"]) < _COVERED * len(real) and damage.op not in _PARTLY)
        ):
            return False
        factor = re.match(FACTOR, pairs["what"])
        return int(pairs["count"]) <= len(real) and (
            factor is None or damage.op not in _SCALED or _is_factor(pairs["what"], _SCALED[damage.op](damage))
        )
    if real is None or half is None:
        return False
    if (claimed := claimed_moves(stated, 2 * half)) is not None:
        pairs_of = {(here % half, there % half) for here, there in claimed.items()}
        by_pair = dict(pairs_of)  # each angle is in the table twice
        return damage.op in MOVING and len(by_pair) == len(pairs_of) and _agrees(by_pair, moved(bug))
    if "frequencies differ in target" in claim:
        return len(real) >= _EVERYWHERE * half
    both = frozenset(i + k for i in real for k in (0, half))  # each angle is in the table twice
    is_there = len(both) == 2 * half if stated.columns is None else stated.columns == both
    return is_there and damage.op in ("negate", "zero") and _is_factor(claim, _SCALED[damage.op](damage))


def _is_position(bug: Bug, stated: Statement) -> bool:
    if bug.text != "offset":
        number = re.search(rf"RoPE at positions (?P<factor>{NUMBER}) times", stated.claim)
        return number is not None and _is_near(float(number["factor"]), bug.value, 1.0, number["factor"])
    offset = int(bug.value)
    more = rf"positions (?:are|were) {abs(offset)} {'higher' if offset > 0 else 'lower'}\b"
    return bool(re.search(more, stated.claim)) or bool(
        re.search(rf"shifted by {re.escape(f'{-offset:+d}')}\b", stated.claim)
    )


def _is_residual(bug: Bug, stated: Statement) -> bool:
    """Return whether the claim is that the layer's input was added once more, or left out."""
    found = re.match(
        r"target = baseline (?P<sign>[+−]) (?P<site>\S+) \((?P<word>added once more|left out)\)", stated.claim
    )
    if found is None or (found["sign"] == "+") != (bug.value > 0):
        return False
    layer = re.search(r"layers\.(\d+)$", bug.module)
    own = re.escape(bug.module) + r"(?:\.input_layernorm)?:in\["
    before = rf"layers\.{int(layer[1]) - 1}:out" if layer and int(layer[1]) else "embed_tokens:out"
    return bool(re.search(rf"{own}|{before}", found["site"]))


def _is_routing(bug: Bug, stated: Statement) -> bool:
    if bug.text == "half" and bug.module.endswith("experts") and _is_factor(stated.claim, 0.5):
        return True  # the weights are halved inside the experts
    if bug.text == "equal" and bug.value == 1.0:  # a single weight becomes 1.1 times its mean
        return re.search(r"weights are 1\.1 × baseline", stated.claim) is not None
    is_only_one = bug.text == "one_expert" and bug.value == 1.0
    return re.search(_ROUTED["next_expert" if is_only_one else bug.text], stated.claim) is not None


def _is_activation(bug: Bug, stated: Statement) -> bool:
    name = re.escape(_ACTIVATIONS.get(bug.text, bug.text))
    # indistinguishable functions are named together
    pattern = rf"target = (?:[\w ()]+ or )?{name}(?: or [\w ()]+)? of its input"
    return re.search(pattern, stated.claim) is not None


def _is_epsilon(bug: Bug, stated: Statement) -> bool:
    found = _EPSILON.search(stated.claim)
    if found is None or bug.change is None:
        return False
    number = float(found["factor"]) * (-1.0 if found["sign"] == "smaller" else 1.0)
    return _is_near(number, bug.change[1] - bug.change[0], 0.0, found["factor"])


_KINDS = {
    "router": _is_routing,
    "mask": lambda bug, stated: re.search(_MASKED[bug.text], stated.claim) is not None,
    "softmax_scale": lambda bug, stated: _is_factor(stated.claim, bug.value, _SCORES),
    "activation": _is_activation,
    "epsilon": _is_epsilon,
    "positions": _is_position,
    "frequencies": _is_rotation,
    "residual": _is_residual,
    "keys": _is_read,
    "values": _is_read,
}
"""Checks by kind of bug; the other kinds are damage to an output, a partial sum or a weight."""


# Numbers


_TIMES = re.compile(rf"(?:target = )?(?:{FACTOR}|baseline / (?P<part>{NUMBER}))")


def _is_factor(claim: str, meant: float, pattern: re.Pattern[str] = _TIMES) -> bool:
    """Return whether a claim states that the target is ``meant`` times the baseline."""
    if meant == 0.0 and (claim.startswith("target is zero") or claim == "are zero"):
        return True
    if meant == -1.0 and claim.startswith("target = −baseline"):
        return True
    found = pattern.search(claim) if pattern is _SCORES else pattern.match(claim)
    if found is None:
        return False
    named = found.groupdict()
    if named.get("off") is not None:
        digits = named["off"].replace(" ", "")
        return _is_near(1.0 + float(digits), meant, 1.0, digits)
    if named.get("part") is not None:
        return _is_near(1.0 / float(named["part"]), meant, 1.0, "1")
    return _is_near(float(named["factor"]), meant, 1.0, named["factor"])


def _is_near(number: float, meant: float, neutral: float, digits: str) -> bool:
    """Return whether a stated number equals ``meant``.

    The tolerance is :data:`_TOLERANCE` of the change from ``neutral`` plus half a unit of the last of the ``digits``.
    At least three digits count, because trailing zeros are not printed.
    """
    significant = len(re.sub(r"e.*|\D", "", digits).lstrip("0"))
    shown = number - neutral if digits.startswith(("+", "-")) and neutral == 1.0 else number
    unit = 10.0 ** (math.floor(math.log10(abs(shown))) + 1 - max(significant, 3)) if shown else 0.0
    return abs(number - meant) <= _TOLERANCE * abs(meant - neutral) + 0.5001 * unit
