"""Bug: what is wrong in one generated case, as data; :mod:`.grammar` draws it, :mod:`.patches` does it."""

from dataclasses import dataclass

from benchmarks.verdict.generator.damage import Damage


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One bug."""

    kind: str
    """``weight``, ``output``, ``epsilon``, ``activation``, … the name of the function in patches.py that does it."""
    module: str
    """Path of the module at fault, by transformers' names; of a weight the key in the checkpoint."""
    expect: tuple[str, ...]
    """Modules that may be named."""
    damage: Damage | None = None
    value: float = 0.0
    """Of a setting: the wrong epsilon, scale, offset."""
    text: str = ""
    """Of a choice: which activation, which part."""
    shape: tuple[int, ...] = ()
    """Of the tensor that is damaged: a weight's, or the width of an output on one rank."""
    shards: int = 1
    """Ranks that each hold such a part of an output's columns."""
    rank: int | None = None
    """The only rank that has it; None for all."""
    first_call: int = 0
    """Calls of the module before this one are not affected."""
    rows: str = ""
    """``first`` or ``last``: the only token row of each call that is affected."""
    adds_one: bool = False
    """Whether the module is a norm that uses 1 + weight."""
    change: tuple[float, float] | None = None
    """Of one wrong number of a parameter, or of an epsilon: that number without the bug, and with it."""
    touched: tuple[int, ...] = ()
    """Inputs for which any number of a weight [outputs, inputs] differs, where its outputs are damaged."""

    @property
    def patches(self) -> str:
        """What the bench's patch of this is given."""
        return "checkpoint" if self.kind == "weight" else "model"

    @property
    def said(self) -> str:
        """One line."""
        parts = [self.kind, self.module, self.text, self.damage.said if self.damage else ""]
        parts += [f"value {self.value:g}"] if self.value else []
        parts += [f"rank {self.rank}"] if self.rank is not None else []
        parts += [f"from call {self.first_call}"] if self.first_call else []
        parts += [f"{self.rows} row"] if self.rows else []
        return " ".join(part for part in parts if part)
