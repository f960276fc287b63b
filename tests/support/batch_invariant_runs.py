"""Prompts of odd lengths, and the exact bits of an engine's outputs for them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama
from torch import Tensor

from tapscope.engine import LLM, SamplingParams

PROMPTS = [[5 + i, *range(20 + i, 23 + 9 * i)] for i in range(8)]


NEW = 6


def bits(
    path: Path, groups: list[list[int]], history: list[int] | None = None, num_new: int = NEW, **settings: Any
) -> dict[int, tuple[tuple[int, ...], Tensor]]:
    """Return tokens and logits [tokens, vocab] of each prompt, generated in ``groups`` of prompt numbers."""
    result = {}
    params = SamplingParams(max_new_tokens=num_new, full_logprobs=True, ignore_eos=True)
    with LLM(path, batch_invariant=True, **settings) as llm:
        if history:
            llm.generate([history], max_new_tokens=1)
        for group in groups:
            generations = llm.generate([PROMPTS[i] for i in group], params)
            assert not history or generations[0].cached_tokens >= 36
            for i, generation in zip(group, generations, strict=True):
                result[i] = (generation.token_ids, torch.tensor([item.full for item in generation.logprobs]))
    return result


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "model"
    return make_llama(folder, seed=1, dtype=request.param, intermediate_size=90, attention_bias=True)
