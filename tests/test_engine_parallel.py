"""Any number of ranks computes the model: whatever does not divide, heads held by several ranks, other launchers."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_llama
from engine_helpers import check_parity
from hypothesis import given
from hypothesis import strategies as st
from moe_checkpoints import make_moe

from tapscope.cli import main
from tapscope.engine.parallel import TensorParallel, span
from tapscope.engine.splits import HeadSplit

PROMPTS = [[5, 6, 7], list(range(40, 75)), [9, 8, 7, 6, 5, 4, 3, 2, 11, 12, 13]]
ODD = {"vocab_size": 523, "intermediate_size": 93, "num_attention_heads": 8, "num_key_value_heads": 2}


@given(st.integers(0, 200), st.integers(1, 17))
def test_spans_cover_everything_once_and_differ_by_one_at_most(total: int, size: int) -> None:
    spans = [span(total, rank, size) for rank in range(size)]
    assert spans[0][0] == 0
    assert spans[-1][1] == total
    assert all(left[1] == right[0] for left, right in pairwise(spans))
    lengths = [end - start for start, end in spans]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[0] == max(lengths)  # rank 0 has the fewest pages, which is what the scheduler counts


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_every_query_head_is_on_one_rank_together_with_its_key_head(kv_heads: int, group: int, data: Any) -> None:
    size = data.draw(st.integers(1, kv_heads * group))
    queries: list[int] = []
    for rank in range(size):
        share = HeadSplit.of(kv_heads * group, kv_heads, TensorParallel(rank, size))
        held = list(range(share.keys.start, share.keys.end))[slice(*share.used)]
        mine = list(range(share.queries.start, share.queries.end))
        assert len(mine) % len(held) == 0
        assert [head // group for head in mine] == [head for head in held for _ in range(len(mine) // len(held))]
        queries += mine
    assert queries == list(range(kv_heads * group))


@pytest.mark.parametrize(("tp", "more"), [(3, {"attention_bias": True, "mlp_bias": True}), (4, {}), (5, {})])
def test_any_number_of_ranks_computes_what_transformers_does(tmp_path: Path, tp: int, more: dict[str, Any]) -> None:
    check_parity(make_llama(tmp_path / "model", seed=tp, **ODD | more), tp, PROMPTS, 8)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_norms_by_head_and_windows_at_three_ranks(tmp_path: Path, family: str) -> None:
    check_parity(make_checkpoint(tmp_path / "model", family), 3, PROMPTS, 6)


def test_latent_attention_and_experts_at_three_ranks(tmp_path: Path) -> None:
    check_parity(make_moe(tmp_path / "model", "deepseek_v3"), 3, PROMPTS, 6)


def test_a_dump_with_heads_held_twice_agrees_with_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_llama(tmp_path / "model", num_hidden_layers=1, **ODD)
    base, target = str(tmp_path / "base"), str(tmp_path / "target")
    assert main(["dump", str(model), "-o", base, "--backend", "hf", "--prompt", "def", "--max-new", "2"]) == 0
    assert main(["dump", str(model), "-o", target, "--tp", "4", "--tokens-from", base]) == 0
    capsys.readouterr()
    assert main(["diff", base, target]) == 0
    said = capsys.readouterr().out
    assert " 0 differs" in said
    assert "not compared" not in said
