"""The engine on a CUDA device matches transformers on a CPU, and a forward never synchronizes with the device.

Skipped without a CUDA device and counted in the summary.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batch_invariant_runs import PROMPTS as ODD_LENGTHS
from batch_invariant_runs import bits
from checkpoints import FAMILIES, make_checkpoint, make_llama
from engine_helpers import reference, reference_logits
from gpu_helpers import never_waiting
from moe_checkpoints import FAMILIES as MOE_FAMILIES
from moe_checkpoints import make_moe
from packaging.version import Version
from quantized_checkpoints import CASES, logits_of
from quantized_checkpoints import PROMPT as QUANTIZED_PROMPT
from quantized_checkpoints import make as make_quantized

from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM, Generation, SamplingParams
from tapscope.engine.requests.request import Request
from tapscope.engine.sampling.gumbel import hashes
from tapscope.engine.sampling.sampler import Sampler
from tapscope.sources import open_run

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7], list(range(40, 75)), [300], list(range(100, 119))]
NEW = 12
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True, full_logprobs=True)


OLDER = Version(transformers.__version__) < Version("5.23")
"""Whether transformers may have bugs fixed by 5.23.

Up to 5.17 (5.18 to 5.22 are untested), it ignores gpt-oss's swiglu_limit and MiniMax-M2's rotary_dim, and its Mamba-2
normalizes over all groups together.
"""


def make(path: Path, family: str, **settings: Any) -> Path:
    if OLDER and family in ("bamba", "gemma3n", "gpt_oss", "mamba2", "minimax_m2"):
        pytest.skip(f"transformers {transformers.__version__} computes {family} otherwise; 5.23 does not")
    return (make_checkpoint if family in FAMILIES else make_moe)(path, family, **settings)


def check_against_transformers(path: Path, prompts: Sequence[Sequence[int]], generations: list[Generation]) -> None:
    """Check that every token is the most likely one of transformers, in fp32 on a CPU, and logprobs to 1e-4."""
    for prompt, generation in zip(prompts, generations, strict=True):
        logits = reference_logits(path, [*prompt, *generation.token_ids][:-1])[len(prompt) - 1 :]
        assert list(generation.token_ids) == logits.argmax(-1).tolist()
        logprobs = torch.tensor([item.full for item in generation.logprobs])
        torch.testing.assert_close(logprobs, logits.log_softmax(-1), rtol=0, atol=1e-4)


@contextmanager
def forwards_never_wait(llm: LLM) -> Iterator[list[int]]:
    """Fail if the host waits for the device during a model call; yield the row count of each step."""
    rows: list[int] = []
    with ExitStack() as stack:

        def begin(_module: Any, args: Any) -> None:
            rows.append(len(args[0]))
            stack.enter_context(never_waiting())

        handles = [
            llm.model.register_forward_pre_hook(begin),
            llm.model.register_forward_hook(lambda *_: stack.close(), always_call=True),
        ]
        yield rows
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("family", [*FAMILIES, *MOE_FAMILIES])
def test_engine_matches_transformers_whole_and_in_chunks(tmp_path: Path, family: str) -> None:
    path = make(tmp_path / "model", family, seed=1)
    for settings in ({}, {"page_size": 4, "max_num_batched_tokens": 7}):
        with LLM(path, device="cuda", check_invariants=True, **settings) as llm:
            check_against_transformers(path, PROMPTS, llm.generate(PROMPTS, PARAMS))
    reference.cache_clear()


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen3",
        "mistral",
        "gemma2",
        "mixtral",
        "qwen3_moe",
        "deepseek_v3",
        "deepseek_v32",
        "glm_moe_dsa",
        "llama4",
        "zamba2",
        "lfm2",
        "falcon_h1",
        "jamba",
        "mamba2",
    ],
)
def test_forward_never_synchronizes(tmp_path: Path, family: str) -> None:
    make_any = make_checkpoint if family in FAMILIES else make_moe  # without a comparison with transformers
    path = make_any(tmp_path / "model", family, seed=1, dtype="bfloat16")
    with LLM(path, device="cuda", page_size=4, max_num_batched_tokens=20, prefix_cache=False) as llm:
        assert llm.engine.runner.has_graphs
        calm = llm.generate(PROMPTS, PARAMS)
        with forwards_never_wait(llm) as rows:
            watched = llm.generate(PROMPTS, PARAMS)
    assert len(rows) >= NEW
    assert [g.token_ids for g in watched] == [g.token_ids for g in calm]


SAMPLED: dict[str, Any] = {
    "temperature": {"temperature": 0.8},
    "filters": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_new_tokens": 3},
    "masks": {
        "temperature": 1.0,
        "logit_bias": {7: 2.0},
        "bad_words_ids": [[5, 6]],
        "allowed_token_ids": (*range(400),),
    },
}


def test_sampling_never_synchronizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "model", "qwen3", seed=1, dtype="bfloat16")
    params = [SamplingParams(max_new_tokens=NEW, seed=3, ignore_eos=True, **each) for each in SAMPLED.values()]
    draw, calls = Sampler.draw, 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        with never_waiting():
            return draw(*args, **kwargs)

    with LLM(path, device="cuda", page_size=4) as llm:
        calm = llm.generate(PROMPTS, params)
        monkeypatch.setattr(Sampler, "draw", watched)
        assert [g.token_ids for g in llm.generate(PROMPTS, params)] == [g.token_ids for g in calm]
    assert calls >= NEW


def test_sampling_compiles_nothing_after_the_start(tmp_path: Path) -> None:
    """Temperature, filters, penalties, masks and grammars, with odd and even numbers of requests."""
    from tapscope.kernels.triton import launch, sampling, thresholds

    launchers = [x for m in (sampling, thresholds) for x in vars(m).values() if isinstance(x, launch.Launcher)]
    path = make(tmp_path / "model", "qwen3", seed=1, dtype="bfloat16")
    cases = [*SAMPLED.values(), {"temperature": 1.0, "top_k": 5}, {"temperature": 0.5, "top_p": 0.5}, {"min_p": 0.1}]
    cases += [{"temperature": 1.0, "regex": "[a-z]+"}, {"temperature": 1.0, "top_p": 0.9, "regex": "[a-z]+"}]
    with LLM(path, device="cuda") as llm:
        before = [len(launcher._known) for launcher in launchers]
        assert len(before) >= 8
        assert all(before)
        for case in cases:
            for prompts in (PROMPTS[:2], PROMPTS[:3]):
                llm.generate(prompts, SamplingParams(max_new_tokens=3, seed=3, ignore_eos=True, **case))
        assert [len(launcher._known) for launcher in launchers] == before


def test_prefix_hits_and_preemption_keep_the_tokens(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", seed=1)
    first, *others = prompts = [[*range(40, 75), *more] for more in ([], [9], [80, 81, 82])]
    with LLM(path, device="cuda", page_size=4, check_invariants=True) as llm:
        check_against_transformers(path, [first], llm.generate([first], PARAMS))
        hits = llm.generate(others, PARAMS)
        assert all(hit.cached_tokens >= 32 for hit in hits)
        check_against_transformers(path, others, hits)
    with LLM(path, device="cuda", page_size=4, num_pages=20, prefix_cache=False, check_invariants=True) as llm:
        check_against_transformers(path, prompts, llm.generate(prompts, PARAMS))
        assert llm.engine.state()["num_preemptions"] > 0
        assert llm.engine.scheduler.kv_cache_manager.num_available == 20


def test_grammar_constrains_the_output(tmp_path: Path) -> None:
    # More logits than tokens in the tokenizer, like the padded vocabularies of real models.
    path = make_llama(tmp_path / "model", seed=1, vocab_size=544)
    kind = {"enum": ["a", "béta"]}
    schema = json.dumps({"type": "object", "properties": {"n": kind}, "required": ["n"], "additionalProperties": False})
    kinds: list[dict[str, Any]] = [{"json_schema": schema}, {"regex": r"[0-9]{3}-[a-f]{2}"}, {}]
    params = [SamplingParams(max_new_tokens=220, temperature=1.0, seed=3, **one) for one in kinds]
    with LLM(path, device="cuda") as llm:
        generations = llm.generate([[5, 6]] * 3, params)
    assert [g.finish_reason for g in generations[:2]] == ["stop", "stop"]
    assert json.loads(generations[0].text)["n"] in kind["enum"]
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", generations[1].text)


def test_sampler_draws_the_same_tokens_as_on_the_cpu(tmp_path: Path) -> None:
    vocab, devices = 4000, (torch.device("cpu"), torch.device("cuda"))
    seeds, positions = [0, 7, (1 << 64) - 1], [0, 5, 1 << 20]
    assert torch.equal(*(hashes(seeds, positions, vocab, device).cpu() for device in devices))
    logits = torch.randn(300, vocab, generator=torch.Generator().manual_seed(0)) * 3
    more: list[dict[str, Any]] = [{}, {"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.05}, {"repetition_penalty": 1.3}]
    drawn = []
    for device in devices:
        sampler, requests = Sampler(vocab, (1,), 0, device), []
        for row in range(len(logits)):
            params = SamplingParams(temperature=0.5 + row / 300, seed=row, **more[row % len(more)])
            requests.append(Request(id=str(row), prompt_ids=tuple(range(row, row + 9)), params=params))
            sampler.add_request(requests[-1])
        drawn.append(sampler.draw(logits.to(device), requests)[0].tolist())
    assert drawn[0] == drawn[1]
    path = make_llama(tmp_path / "model", seed=1)
    params = [SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(4)]
    tokens = []
    for device in devices:
        with LLM(path, device=device.type) as llm:
            tokens.append([g.token_ids for g in llm.generate(PROMPTS, params)])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), ("llama", "bfloat16"), *((f, "bfloat16") for f in ("gemma2", "qwen3_moe", "deepseek_v3"))],
)
def test_batch_invariant_bits_do_not_depend_on_the_batch(tmp_path: Path, family: str, dtype: str) -> None:
    path = make(tmp_path / "model", family, seed=1, dtype=dtype)
    numbers = range(len(ODD_LENGTHS))
    alone = bits(path, [[i] for i in numbers], device="cuda")
    others = {
        "one batch": bits(path, [list(numbers)], device="cuda"),
        "batches": bits(path, [[7, 0], [3, 6, 1], [5, 2, 4]], device="cuda"),
        "chunks": bits(path, [list(numbers)], max_num_batched_tokens=7, page_size=4, device="cuda"),
        "no graphs": bits(path, [list(numbers)], cuda_graphs="off", device="cuda"),
    }
    if family == "llama":
        others["prefix hits"] = bits(path, [[7], [7, 6]], history=ODD_LENGTHS[7][:40], page_size=4, device="cuda")
    for name, results in others.items():
        for i, (tokens, logprobs) in results.items():
            assert tokens == alone[i][0], f"{name}: other tokens of prompt {i}"
            assert torch.equal(logprobs, alone[i][1]), f"{name}: other bits of prompt {i}"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_batch_invariant_graphs_have_the_bits_of_a_whole_prefill(tmp_path: Path, family: str) -> None:
    """The model is wide enough for torch to choose its reductions by the number of rows."""
    sizes = {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
    path = make(tmp_path / "model", family, seed=1, dtype="bfloat16", head_dim=128, num_hidden_layers=2, **sizes)
    prompts = [[5 + i % 90, *range(20, 23 + 5 * i)] for i in range(40)]
    params = SamplingParams(max_new_tokens=12, logprobs=0, ignore_eos=True, temperature=1.0, seed=3)
    with LLM(path, device="cuda", batch_invariant=True, max_num_seqs=40) as llm:
        assert llm.engine.runner.has_graphs
        for prompt, generation in zip(prompts, llm.generate(prompts, params), strict=True):
            tokens = [*prompt, *generation.token_ids]
            scored = llm.generate([tokens], SamplingParams(max_new_tokens=0, prompt_logprobs=0))[0]
            assert scored.prompt_logprobs is not None
            assert generation.logprobs is not None
            expected = [each.logprob for each in scored.prompt_logprobs[len(prompt) :] if each is not None]
            assert [each.logprob for each in generation.logprobs] == expected


@pytest.mark.parametrize("kind", CASES)
def test_quantized_checkpoint_matches_its_dequantized_weights(tmp_path: Path, kind: str) -> None:
    quantized, dequantized = make_quantized(tmp_path, kind)
    expected = reference_logits(dequantized, QUANTIZED_PROMPT)
    torch.testing.assert_close(logits_of(quantized, device="cuda").cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "bfloat16"])
def test_kv_cache_dtype_matches_the_cpu(tmp_path: Path, kind: str) -> None:
    path = make_llama(tmp_path / "model", seed=1)
    logprobs = []
    for device in ("cpu", "cuda"):
        with LLM(path, device=device, kv_cache_dtype=kind, page_size=4) as llm:
            forced = [[9, 8, 7, 6]] * len(PROMPTS)
            generations = llm.generate(PROMPTS, replace(PARAMS, max_new_tokens=4), forced_token_ids=forced)
            logprobs.append(torch.tensor([[item.full for item in g.logprobs] for g in generations]))
    # A value between two FP8 codes may round to either; the mean hardly changes.
    assert (logprobs[1] - logprobs[0]).abs().mean() < 1e-3
    with LLM(path, device="cuda", page_size=4) as llm:
        generations = llm.generate(PROMPTS, replace(PARAMS, max_new_tokens=4), forced_token_ids=forced)
        exact = torch.tensor([[item.full for item in g.logprobs] for g in generations])
    assert (logprobs[1] - exact).abs().mean() > 10 * (logprobs[1] - logprobs[0]).abs().mean()


def test_embeddings_match_the_cpu(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", seed=1)
    found = []
    for device in ("cpu", "cuda"):
        with LLM(path, device=device, max_num_batched_tokens=16) as llm:
            for i, (prompt, pooling) in enumerate((p, how) for p in PROMPTS for how in ("last", "mean")):
                params = SamplingParams(max_new_tokens=1)
                llm.engine.submit(Request(id=str(i), prompt_ids=tuple(prompt), params=params, pooling=pooling))
            outputs = [output for _ in range(20) for output in llm.engine.step()]
            found.append({o.request: torch.tensor(o.embedding) for o in outputs if o.embedding is not None})
    assert len(found[0]) == 2 * len(PROMPTS)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("keep", ["stats", "full"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_capture_changes_no_bit_and_does_not_synchronize(tmp_path: Path, family: str, keep: str) -> None:
    path = make(tmp_path / "model", family, seed=1, dtype="bfloat16")
    with LLM(path, device="cuda", page_size=4, logits="all", prefix_cache=False) as llm:
        plain = llm.generate(PROMPTS, PARAMS)
    observer = partial(make_observer, out=str(tmp_path / "run"), config=DumperConfig(keep=keep))
    with LLM(path, device="cuda", page_size=4, logits="all", prefix_cache=False, observer=observer) as llm:
        llm.generate(PROMPTS, PARAMS)  # allocates pinned memory
        with forwards_never_wait(llm) as rows:
            captured = llm.generate(PROMPTS, PARAMS)
    assert [g.token_ids for g in captured] == [g.token_ids for g in plain]
    assert [g.logprobs for g in captured] == [g.logprobs for g in plain]
    run = open_run(tmp_path / "run")
    assert run.ledger().complete, run.ledger().sentences()
    assert len(run.steps) == 2 * len(rows)
    sites = {record.key.site for record in run.records}
    assert {"model.layers.2.self_attn.o_proj:out", ":out[logits]"} <= sites
    assert all((record.entry is not None) == (keep == "full") for record in run.records if record.stats is not None)
