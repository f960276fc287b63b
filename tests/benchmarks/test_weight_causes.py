"""A reported cause of a weight bug is right only if it names the change made by the bug."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
from bench_packages import package

package()
bugs: Any = importlib.import_module("benchmarks.verdict.generator.bug")
damages: Any = importlib.import_module("benchmarks.verdict.generator.damage")
causes: Any = importlib.import_module("benchmarks.verdict.generator.causes")

INPUTS = "the weight differs in {} of its input; that accounts for the error (removes 100 % of the error)"
EXPERT = "the weights of expert {} differ, or what it computes: all 9 rows that chose it are off, and no other"
SHIFTED = "the weight differs{}: each element there is baseline's {} (removes 100 % of the error)"
DOWN = "the down projection of expert {} differs in its {}: all 9 rows that chose it are off, and no other"


def bug(module: str, shape: tuple[int, ...], kind: str = "weight", rank: int | None = None, **fields: Any) -> Any:
    damage = damages.Damage(**({"op": "negate"} | fields))
    return bugs.Bug(kind=kind, module=module, expect=(module,), damage=damage, shape=shape, rank=rank)


BLOCK = bug("layers.0.mlp.up_proj.weight", (64, 32), start=8, count=8)
STRIDED = bug("layers.0.mlp.up_proj.weight", (64, 32), start=1, count=4, stride=3)
SWAPPED = bug("layers.0.mlp.up_proj.weight", (64, 32), op="swap", start=0, count=4, other=30)
ROWS = bug("layers.0.mlp.up_proj.weight", (64, 32), axis=-2, start=8, count=8)
CONV = bug("h.0.attn.c_attn.weight", (32, 96), axis=-2, start=8, count=8)
SOME = replace(
    bug("layers.0.mlp.experts.3.down_proj.weight", (64, 32), op="clip", amount=1.0, start=0, count=4),
    touched_outputs=(1, 2, 9),
)
LOST = bug("h.0.attn.c_attn.weight", (32, 96), axis=-2, op="zero")
NORM = bug("layers.0.input_layernorm.weight", (64,), start=8, count=32)
SHARD = bug("layers.0.mlp.down_proj", (64, 32), kind="rank_weight", rank=1, start=8, count=8)
COPIED = bug("layers.0.mlp.up_proj.weight", (64, 32), op="copy", axis=-2, start=8, count=8, other=32)
GATE = bug("layers.0.mlp.experts.3.gate_proj.weight", (64, 32), axis=-2, start=8, count=8)
LAST = bug("layers.0.mlp.experts.3.down_proj.weight", (64, 32), axis=-2, start=8, count=8)
ADDED = bug("layers.0.mlp.up_proj.weight", (64, 32), op="add", amount=0.3, start=8, count=8)
CLIPPED = replace(bug("layers.0.mlp.up_proj.weight", (64, 32), axis=-2, op="clip", amount=1.0), touched=(1, 2, 4))
TOKENS = bug("model.embed_tokens.weight", (64, 32), axis=-2, start=8, count=8)
HEADS = bug("layers.0.self_attn.k_norm.weight", (32,), start=4)


@pytest.mark.parametrize(
    ("one", "text", "expected"),
    [
        (BLOCK, INPUTS.format("columns 8–15"), True),
        (BLOCK, INPUTS.format("columns 9–14"), True),
        (BLOCK, INPUTS.format("columns 8–16"), False),
        (STRIDED, INPUTS.format("every third column from 1 to 10"), True),
        (STRIDED, INPUTS.format("every third column from 1 to 13"), False),
        (STRIDED, INPUTS.format("columns 1, 4 and 10"), True),
        (SWAPPED, INPUTS.format("columns 0–3 and 30–31"), True),
        (SWAPPED, INPUTS.format("columns 4–5"), False),
        (ROWS, INPUTS.format("columns 8–15"), False),
        (ROWS, "in columns 8–15: target = −baseline (removes 100 % of the error)", True),
        (ROWS, "in columns 16–23: target = −baseline (removes 100 % of the error)", False),
        (ROWS, "in columns 8–15: target = 2 × baseline (removes 100 % of the error)", False),
        (SOME, DOWN.format(3, "rows 1–2 and 9"), True),
        (SOME, DOWN.format(3, "rows 1–3 and 9"), False),
        (SOME, DOWN.format(3, "row 9"), False),
        (CONV, INPUTS.format("columns 8–15"), True),
        (LOST, "target is the same in every row: the weight counts as zero, the bias alone is left", True),
        (CONV, "target is the same in every row: the weight counts as zero, the bias alone is left", False),
        (NORM, "in at least 3 of 64 columns: target = baseline × a separate factor per channel (0.3 to 2)", True),
        (NORM, "in 3 of 64 columns: target = baseline × a separate factor per channel (0.3 to 2)", False),
        (NORM, "in at least columns 3 and 9: target = baseline × a separate factor per channel (0.3 to 2)", False),
        (SHARD, INPUTS.format("columns 40–47"), True),
        (SHARD, INPUTS.format("columns 8–15"), False),
        (GATE, EXPERT.format(3), True),
        (GATE, EXPERT.format(2), False),
        (GATE, DOWN.format(3, "rows 8–15"), False),
        (LAST, DOWN.format(3, "rows 8–15"), True),
        (LAST, DOWN.format(3, "rows 7–15"), False),
        (BLOCK, EXPERT.format(3), False),
        (ROWS, "in columns 8–15 of positions from 1 on: target = −baseline", True),
        (COPIED, "target holds baseline's columns 32–39 in columns 8–15 (removes 100 % of the error)", True),
        (COPIED, "target holds baseline's columns 32–39 in columns 16–23", False),
        (COPIED, "target holds baseline's columns 33–40 in columns 8–15", False),
        (COPIED, "in columns 8–15: target holds baseline's columns 32–35 in columns 8–11", True),
        (HEADS, "in every 32th column from 4 on: target = −baseline", True),
        (HEADS, "in every 32th column from 5 on: target = −baseline", False),
        (ADDED, SHIFTED.format(" in columns 8–15 of its input", "+ 0.01"), True),
        (ADDED, SHIFTED.format(" in columns 8–15 of its input", "− 0.01"), False),
        (ADDED, SHIFTED.format(" in columns 0–7 of its input", "+ 0.01"), False),
        (ADDED, SHIFTED.format("", "+ 0.01"), False),
        (ADDED, "target = baseline + a separate offset per token (0.1 to 0.2)", False),
        (CLIPPED, INPUTS.format("columns 1–4"), True),
        (CLIPPED, INPUTS.format("columns 1–12"), False),
        (ROWS, "target = −baseline (removes 100 % of the error)", False),
        (ROWS, "in 8 of 64 columns: target = −baseline (removes 100 % of the error)", True),
        (ROWS, "in 16 of 64 columns: target = −baseline (removes 100 % of the error)", False),
        (TOKENS, "in 3 of 20 rows: target = −baseline (removes 100 % of the error)", True),
        (TOKENS, "target = −baseline (removes 100 % of the error)", False),
        (BLOCK, "target has the weight of layers.1.input_layernorm, another norm", False),
    ],
)
def test_weight_cause_is_right_only_for_the_part_that_differs(one: Any, text: str, expected: bool) -> None:
    assert causes.is_right(one, text) is expected
