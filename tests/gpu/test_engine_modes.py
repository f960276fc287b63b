"""Modes of the engine on a CUDA device: adapters, quantised experts, speculation, and captures of graphs."""

import gc
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import draft_heads
import pytest
import torch
from checkpoints import make_llama
from draft_heads import make_eagle, make_eagle3, make_mtp
from engine_helpers import reference_logits
from lora_adapters import ATTENTION, EVERY, make_adapter, peft_logits, peft_model
from moe_checkpoints import make_moe
from quantized_checkpoints import PROMPT, logits_of
from quantized_checkpoints import make as make_quantised
from safetensors.torch import load_file, save_file

from tapscope.engine import LLM, SamplingParams
from tapscope.engine.execution.cuda_graphs import DecodeGraphs

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7] * 4, list(range(40, 75)), [300], [*range(40, 60), 9, 8]]
NEW = 12
TREE = {"speculative_eagle_topk": 3, "speculative_num_steps": 3, "speculative_num_draft_tokens": 10}
TOLD = SamplingParams(max_new_tokens=NEW, ignore_eos=True, full_logprobs=True)


def test_lora_rows_equal_peft_on_the_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_llama(tmp_path / "model", seed=1, num_hidden_layers=2)
    adapters = {
        "a": make_adapter(tmp_path / "a", path, ATTENTION, seed=1),
        "b": make_adapter(tmp_path / "b", path, EVERY, seed=2, r=8),
    }
    expected = peft_model(path, adapters)
    with LLM(path, device="cuda", page_size=4, check_invariants=True, lora_paths=adapters) as llm:
        mixed = llm.generate(PROMPTS, TOLD, adapter=["", "a", "b", "a"])
        plain = llm.generate(PROMPTS, TOLD)  # with graphs again
    with LLM(path, device="cuda", page_size=4) as llm:
        assert [g.token_ids for g in plain] == [g.token_ids for g in llm.generate(PROMPTS, TOLD)]
    for prompt, name, generation in zip(PROMPTS, ["", "a", "b", "a"], mixed, strict=True):
        logits = peft_logits(expected, name, [*prompt, *generation.token_ids][:-1])[len(prompt) - 1 :]
        told = torch.tensor([item.full for item in generation.logprobs])
        torch.testing.assert_close(told, logits.log_softmax(-1), rtol=0, atol=1e-4)
    assert caplog.text.count("requests have LoRA adapters: steps run eagerly") == 1
    assert mixed[1].token_ids != plain[1].token_ids


@pytest.mark.parametrize("how", ["weight_only", "dequantize"])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "awq"])
def test_quantized_experts_match_their_dequantized_weights(
    tmp_path: Path, kind: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    build: Any = partial(make_moe, family="qwen3_moe", seed=3, num_hidden_layers=2, num_experts=4, mlp_only_layers=[])
    quantised, meant = make_quantised(tmp_path, kind, build)
    with caplog.at_level(logging.WARNING):
        found = logits_of(quantised, device="cuda", quantized_layers=how).cpu()
    torch.testing.assert_close(found, reference_logits(meant, PROMPT), rtol=1e-4, atol=1e-4)
    assert caplog.text.count("CUDA graphs are off") == 1


def tokens_equal_plain(path: Path, speculative: dict[str, Any]) -> Any:
    """What the speculation counted, whose tokens are those of plain decoding, greedy and sampled."""
    params = [SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 0.9)]
    tokens = []
    for settings in ({}, speculative):
        with LLM(path, device="cuda", page_size=4, batch_invariant=True, check_invariants=True, **settings) as llm:
            tokens.append([[g.token_ids for g in llm.generate(PROMPTS, each)] for each in params])
            state = llm.engine.state()
    assert tokens[0] == tokens[1]
    return state["speculation"]


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
def test_speculation_keeps_the_tokens(tmp_path: Path, algorithm: str, caplog: pytest.LogCaptureFixture) -> None:
    path = make_llama(tmp_path / "model", seed=1, num_hidden_layers=2)
    more: dict[str, Any] = {"speculative_algorithm": algorithm}
    if algorithm == "STANDALONE":  # the target with noise in its weights
        draft = shutil.copytree(path, tmp_path / "draft")
        torch.manual_seed(0)
        weights = {name: w + 0.004 * torch.randn_like(w) for name, w in load_file(draft / "model.safetensors").items()}
        save_file(weights, draft / "model.safetensors", {"format": "pt"})
        more |= {"speculative_draft_model_path": draft}
    assert tokens_equal_plain(path, more)["num_accepted_tokens"] > 0
    assert caplog.text.count("CUDA graphs are off") == 1  # in the engine that speculates


@pytest.mark.parametrize("tree", [{}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("head", ["EAGLE", "EAGLE3", "NEXTN"])
def test_draft_heads_keep_the_tokens(tmp_path: Path, head: str, tree: dict[str, Any]) -> None:
    more: dict[str, Any] = {"speculative_algorithm": head, **tree}
    if head == "NEXTN":
        path = make_mtp(tmp_path / "model", "glm4_moe")
    else:
        path = draft_heads.make_llama(tmp_path / "model")
        made = make_eagle(tmp_path / "head") if head == "EAGLE" else make_eagle3(tmp_path / "head", path)
        more |= {"speculative_draft_model_path": made}
    assert tokens_equal_plain(path, more)["num_draft_tokens"] > 0


def test_capture_of_decode_graphs_is_not_broken_by_graphs_in_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of an engine that has ended may be in reference cycles; CUDA forbids to free them during a capture."""
    spare, x = [torch.cuda.CUDAGraph() for _ in range(3)], torch.zeros(4, device="cuda")
    for graph in spare:
        with torch.cuda.graph(graph):
            x += 1
    decode, thresholds = DecodeGraphs._decode, gc.get_threshold()
    del graph

    def decode_with_garbage(self: DecodeGraphs, inputs: Any) -> torch.Tensor:
        if spare and torch.cuda.is_current_stream_capturing():
            cycle: list[object] = [spare.pop()]
            cycle.append(cycle)
            del cycle
            gc.set_threshold(1, 1, 1)
            assert [[] for _ in range(1000)]  # the collector, if it runs, frees the graph now
        return decode(self, inputs)

    monkeypatch.setattr(DecodeGraphs, "_decode", decode_with_garbage)
    try:
        with LLM(make_llama(tmp_path / "model"), device="cuda", max_num_seqs=8) as llm:
            assert llm.generate([[3, 4, 5, 6]], SamplingParams(max_new_tokens=4))[0].token_ids
    finally:
        gc.set_threshold(*thresholds)
    assert not spare
