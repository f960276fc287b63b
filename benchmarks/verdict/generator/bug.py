"""Bug: the bug of one generated case, as data; :mod:`.grammar` draws it, :mod:`.patches` applies it."""

from dataclasses import dataclass, replace

import torch

from benchmarks.verdict.generator.damage import Damage

MOVING = ("swap", "roll", "copy")
"""Operations that replace columns by other columns."""
_INPUTS_FIRST = ("c_attn", "c_fc", "c_proj")
"""Linear layers of GPT-2, whose weights are [inputs, outputs]."""
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One generated bug."""

    kind: str
    """``weight``, ``output``, ``epsilon``, ``activation``, …: selects the function in patches.py that applies the
    bug."""
    module: str
    """Path of the faulty module, by transformers' names; for a weight, the checkpoint key."""
    expect: tuple[str, ...]
    """Modules that may be named."""
    damage: Damage | None = None
    value: float = 0.0
    """The wrong epsilon, scale or offset."""
    text: str = ""
    """The wrong activation, mask or routing."""
    shape: tuple[int, ...] = ()
    """Shape of the damaged tensor: a weight's, or the width of an output on one rank."""
    shards: int = 1
    """Number of ranks across which the output's columns are sharded."""
    rank: int | None = None
    """The only affected rank; None for all."""
    first_call: int = 0
    """Calls of the module before this one are not affected."""
    rows: str = ""
    """``first`` or ``last``: only this token row of each call is affected."""
    adds_one: bool = False
    """Whether the module is a norm that uses 1 + weight."""
    change: tuple[float, float] | None = None
    """(correct, wrong) value of an epsilon, or of a parameter if all changed elements have the same value."""
    touched: tuple[int, ...] = ()
    """Inputs for which any element of a weight [outputs, inputs] differs, if rows of outputs are damaged."""
    touched_outputs: tuple[int, ...] = ()
    """Outputs for which any element of a weight differs; a subset if inputs are clipped."""

    @property
    def patches(self) -> str:
        """Argument of the patch: ``checkpoint`` or ``model``."""
        return "checkpoint" if self.kind == "weight" else "model"

    @property
    def description(self) -> str:
        """One-line description."""
        parts = [self.kind, self.module, self.text, self.damage.description if self.damage else ""]
        parts += [f"value {self.value:g}"] if self.value else []
        parts += [f"rank {self.rank}"] if self.rank is not None else []
        parts += [f"from call {self.first_call}"] if self.first_call else []
        parts += [f"{self.rows} row"] if self.rows else []
        return " ".join(part for part in parts if part)


def output_width(bug: Bug) -> int | None:
    """Return the number of output columns of the damaged tensor, over all shards; None if unknown."""
    if not bug.shape:
        return None
    return bug.shape[0 if has_outputs_first(bug) else -1] * (bug.shards if "weight" not in bug.kind else 1)


def has_outputs_first(bug: Bug) -> bool:
    """Return whether the tensor is a weight [outputs, inputs], as in most linear layers."""
    return len(bug.shape) > 1 and not is_embedding(bug) and not any(name in bug.module for name in _INPUTS_FIRST)


def is_embedding(bug: Bug) -> bool:
    """Return whether the tensor is an embedding [tokens, outputs]."""
    return "weight" in bug.kind and any(name in bug.module for name in _EMBEDDINGS)


def is_of_inputs(bug: Bug) -> bool:
    """Return whether the damaged part is along the inputs of a weight."""
    if "weight" not in bug.kind or bug.damage is None or len(bug.shape) < 2:
        return False
    return (bug.damage.axis == -1) == has_outputs_first(bug)


def changed(bug: Bug) -> frozenset[int] | None:
    """Return the indices of the outputs, or inputs, that the bug can change; None if unknown."""
    damage = bug.damage
    if damage is None:
        return None
    axis = -1 if len(bug.shape) <= 1 else damage.axis
    size = bug.shape[axis] if bug.shape else None
    if damage.start is None and damage.op not in ("swap", "copy"):
        found = set(range(size)) if size is not None else set()
        return frozenset(j for i in found for j in _global_indices(bug, i)) if found else None
    starts = [damage.start or 0] + ([damage.other] if damage.op == "swap" else [])
    count = damage.count if size is None else min(damage.count, size)
    some = (start + damage.stride * i for start in starts for i in range(count))
    return frozenset(j for i in some for j in _global_indices(bug, i if size is None else i % size))


def moved(bug: Bug) -> dict[int, int]:
    """Return the moved columns: index -> source index of its values."""
    damage = bug.damage
    if damage is None or damage.op not in MOVING:
        return {}
    axis = -1 if len(bug.shape) <= 1 else damage.axis
    size = bug.shape[axis] if bug.shape else damage.stride * (damage.count + 1) + max(damage.start or 0, damage.other)
    source = replace(damage, axis=-1)(torch.arange(size, dtype=torch.float64)[None])[0].long().tolist()
    return {
        here: there
        for i, j in enumerate(source)
        if i != j
        for here, there in zip(_global_indices(bug, i), _global_indices(bug, j), strict=True)
    }


def _global_indices(bug: Bug, index: int) -> list[int]:
    """Convert an index of one rank's tensor to indices of the full tensor."""
    if not bug.shape or bug.kind == "weight":
        return [index]
    if bug.kind == "rank_weight":
        return [(bug.rank or 0) * bug.shape[-1] + index] if is_of_inputs(bug) else [index]
    if bug.shards == 1:
        return [index]
    ranks = range(bug.shards) if bug.rank is None else (bug.rank,)
    return [rank * bug.shape[-1] + index for rank in ranks]
