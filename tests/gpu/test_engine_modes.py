"""Engine modes on a CUDA device: adapters, quantized experts, and graph capture."""

import gc
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_invariant_runs import PROMPTS as ODD_LENGTHS
from batch_invariant_runs import bits
from checkpoints import make_llama
from engine_helpers import reference_logits
from lora_adapters import ATTENTION, EVERY, make_adapter, peft_logits, peft_model
from moe_checkpoints import make_moe
from quantized_checkpoints import CASES, PROMPT, blocks, logits_of, make_mxfp4
from quantized_checkpoints import make as make_quantized

from tapscope.engine import LLM, SamplingParams
from tapscope.engine.execution.decode_graphs import DecodeGraphs

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7] * 4, list(range(40, 75)), [300], [*range(40, 60), 9, 8]]
NEW = 12
SMALL_MOE: Any = partial(make_moe, family="qwen3_moe", seed=3, num_hidden_layers=2, num_experts=4, mlp_only_layers=[])
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True, full_logprobs=True)


def test_lora_rows_equal_peft_on_the_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_llama(tmp_path / "model", seed=1, num_hidden_layers=2)
    adapters = {
        "a": make_adapter(tmp_path / "a", path, ATTENTION, seed=1),
        "b": make_adapter(tmp_path / "b", path, EVERY, seed=2, r=8),
    }
    expected = peft_model(path, adapters)
    with LLM(path, device="cuda", page_size=4, check_invariants=True, lora_paths=adapters) as llm:
        mixed = llm.generate(PROMPTS, PARAMS, adapter=["", "a", "b", "a"])
        plain = llm.generate(PROMPTS, PARAMS)  # in graphs again
    with LLM(path, device="cuda", page_size=4) as llm:
        assert [g.token_ids for g in plain] == [g.token_ids for g in llm.generate(PROMPTS, PARAMS)]
    for prompt, name, generation in zip(PROMPTS, ["", "a", "b", "a"], mixed, strict=True):
        logits = peft_logits(expected, name, [*prompt, *generation.token_ids][:-1])[len(prompt) - 1 :]
        logprobs = torch.tensor([item.full for item in generation.logprobs])
        torch.testing.assert_close(logprobs, logits.log_softmax(-1).float(), rtol=0, atol=1e-4)
    assert caplog.text.count("requests have LoRA adapters: steps run eagerly") == 1
    assert mixed[1].token_ids != plain[1].token_ids


@pytest.mark.parametrize("how", ["weight_only", "dequantize"])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "awq"])
def test_quantized_experts_match_their_dequantized_weights(
    tmp_path: Path, kind: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, dequantized = make_quantized(tmp_path, kind, SMALL_MOE)
    with caplog.at_level(logging.WARNING):
        found = logits_of(quantized, device="cuda", quantized_layers=how).cpu()
    torch.testing.assert_close(found, reference_logits(dequantized, PROMPT), rtol=1e-4, atol=1e-4)
    assert caplog.text.count("CUDA graphs are off") == (kind == "fp8" and how == "weight_only")  # blocks of 24


@pytest.mark.parametrize("kind", ["int8", "int4", "gptq", "awq", "mxfp4"])
def test_graphs_with_quantized_experts_make_the_tokens_of_eager_steps(tmp_path: Path, kind: str) -> None:
    if kind == "mxfp4":
        path, _ = make_mxfp4(tmp_path)
    else:
        path, _ = make_quantized(tmp_path, kind, SMALL_MOE)
    params, prompts = SamplingParams(max_new_tokens=12, ignore_eos=True), [PROMPT, PROMPT[:3], [7]]
    tokens = []
    for graphs in ("decode", "off"):
        with LLM(path, device="cuda", page_size=4, max_num_seqs=8, prefix_cache=False, cuda_graphs=graphs) as llm:
            assert llm.engine.runner.has_graphs == (graphs == "decode")
            tokens.append([generation.token_ids for generation in llm.generate(prompts, params)])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("kind", ["fp8 blocks", "int8 experts"])
def test_batch_invariant_bits_of_quantized_checkpoints_do_not_depend_on_the_batch(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 with quantized inputs, in blocks that Triton kernels multiply by default; and int8 experts."""
    if kind == "fp8 blocks":
        config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
        monkeypatch.setitem(CASES, kind, (partial(blocks, size=128), config))
        sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
        path, _ = make_quantized(tmp_path, kind, partial(make_llama, seed=5, num_hidden_layers=2, **sizes))
    else:
        path, _ = make_quantized(tmp_path, "int8", SMALL_MOE)
    numbers, settings = list(range(len(ODD_LENGTHS))), {"device": "cuda", "dtype": "bfloat16"}
    alone = bits(path, [[i] for i in numbers], **settings)
    others = {
        "one batch": bits(path, [numbers], **settings),
        "chunks": bits(path, [numbers], max_num_batched_tokens=7, page_size=4, **settings),
        "no graphs": bits(path, [[7, 0], [3, 6, 1], [5, 2, 4]], cuda_graphs="off", **settings),
        "prefix hits": bits(path, [[7], [7, 6]], history=ODD_LENGTHS[7][:40], page_size=4, **settings),
    }
    for name, results in others.items():
        for i, (tokens, logprobs) in results.items():
            assert tokens == alone[i][0], f"{name}: other tokens of prompt {i}"
            assert torch.equal(logprobs, alone[i][1]), f"{name}: other bits of prompt {i}"


def test_capture_of_decode_graphs_is_not_broken_by_graphs_in_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of a closed engine may be in reference cycles; CUDA forbids freeing them during a capture."""
    spare, x = [torch.cuda.CUDAGraph() for _ in range(3)], torch.zeros(4, device="cuda")
    for graph in spare:
        with torch.cuda.graph(graph):
            x += 1
    decode, thresholds = DecodeGraphs._decode, gc.get_threshold()
    del graph

    def decode_with_garbage(self: DecodeGraphs, *args: Any) -> torch.Tensor:
        if spare and torch.cuda.is_current_stream_capturing():
            cycle: list[object] = [spare.pop()]
            cycle.append(cycle)
            del cycle
            gc.set_threshold(1, 1, 1)
            assert [[] for _ in range(1000)]  # the garbage collector, if it runs, frees the graph now
        return decode(self, *args)

    monkeypatch.setattr(DecodeGraphs, "_decode", decode_with_garbage)
    try:
        with LLM(make_llama(tmp_path / "model"), device="cuda", max_num_seqs=8) as llm:
            assert llm.generate([[3, 4, 5, 6]], SamplingParams(max_new_tokens=4))[0].token_ids
    finally:
        gc.set_threshold(*thresholds)
    assert not spare


def test_graphs_of_a_closed_engine_may_be_collected_while_the_user_captures(tmp_path: Path) -> None:
    with LLM(make_llama(tmp_path / "model"), device="cuda", max_num_seqs=8) as llm:
        llm.generate([[3, 4, 5, 6]], SamplingParams(max_new_tokens=4))
    cycle: list[object] = [llm]
    cycle.append(cycle)
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        del llm, cycle
        gc.collect()
        x += 1
    graph.replay()
    assert x.tolist() == [1.0] * 4
