"""NaN logits of a model served with CUDA graphs are counted for every kind of sampling, and their pages are dropped.

Skipped without a CUDA device; the summary reports the number of skipped tests.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama

from tapscope.engine import LLM, SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7], list(range(40, 75))]
SAMPLED: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "seed": 3},
    {"allowed_token_ids": (7, 9)},
    {"min_new_tokens": 2, "repetition_penalty": 1.1},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1)


@pytest.mark.parametrize("cuda_graphs", ["off", "decode", "all"])
def test_requests_with_nan_are_counted_and_no_others(path: Path, cuda_graphs: str) -> None:
    with LLM(path, device="cuda", cuda_graphs=cuda_graphs, check_invariants=True) as llm:
        weight = llm.model.model.norm.weight.data
        healthy = weight.clone()
        for settings in SAMPLED:
            params = SamplingParams(max_new_tokens=6, ignore_eos=True, **settings)
            before = llm.engine.state()["corrupted_requests"]
            expected = [each.token_ids for each in llm.generate(PROMPTS, params)]
            assert llm.engine.state()["corrupted_requests"] == before, settings
            weight.fill_(float("nan"))
            found = llm.generate(PROMPTS, params)
            assert [(len(each.token_ids), each.finish_reason) for each in found] == [(6, "length")] * 2
            assert llm.engine.state()["corrupted_requests"] == before + 2, settings
            weight.copy_(healthy)
            assert [each.token_ids for each in llm.generate(PROMPTS, params)] == expected, settings


@pytest.mark.parametrize("settings", SAMPLED)
def test_nan_that_begins_while_decoding_is_found_and_pages_are_dropped(path: Path, settings: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, **settings)
    with LLM(path, device="cuda", cuda_graphs="decode", page_size=4, check_invariants=True) as llm:
        expected = [each.token_ids for each in llm.generate(PROMPTS, params)]
        llm.engine.scheduler.flush()
        for prompt in PROMPTS:
            llm.submit(prompt, params)
        for _ in range(8):
            llm.step()
        assert llm.engine.state()["corrupted_requests"] == 0
        weight = next(each for name, each in llm.model.named_parameters() if ".layers.0." in name)
        healthy = weight.data.clone()
        torch.cuda.synchronize()
        weight.data.fill_(float("nan"))
        while llm.has_work:
            llm.step()
        assert llm.engine.state()["corrupted_requests"] == 2
        weight.data.copy_(healthy)
        again = llm.generate(PROMPTS, params)
        assert [(each.token_ids, each.cached_tokens) for each in again] == [(tokens, 0) for tokens in expected]
