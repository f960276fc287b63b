"""LoRA adapters match PEFT in any batch, and rows without an adapter match the base model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_llama
from engine_helpers import ThreadRanks
from engine_observers import Memory
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_adapters import ATTENTION, EVERY, linear_names, make_adapter, peft_logits, peft_model
from moe_checkpoints import make_moe

from tapscope.engine import LLM, SamplingParams
from tapscope.engine.execution.lora_adapters import LoraAdapters

PROMPTS = [[5, 6, 7], list(range(40, 75)), [5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2], [300], [5, 6, 7, 8]]
NAMES = ["", "small", "large", "small", "", "large"]
NUM_NEW = 6
FAMILIES = (("llama", 1), ("llama", 2), ("phi3", 2), ("gemma3", 1), ("starcoder2", 2), ("falcon_h1", 1), ("lfm2", 2))
"""Family and ranks."""


def _adapters(folder: Path, model: Path, alpha: float = 5) -> dict[str, Path]:
    """Write two adapters of different rank and scaling: one for some layers, one for all."""
    names = linear_names(model)
    some = [name for name in ("q_proj", "q_a_proj", "qkv_proj", "down_proj", "c_fc", "w1") if name in names]
    return {
        "small": make_adapter(folder / "small", model, some, seed=1, alpha_pattern={some[0]: 9}),
        "large": make_adapter(folder / "large", model, names, seed=2, r=9, lora_alpha=alpha, use_rslora=True),
    }


def _check(path: Path, tp: int, tmp_path: Path, alpha: float = 5, bound: float = 1e-5, **engine: Any) -> None:
    """Check that the logits of a mixed batch equal PEFT's at every position within ``bound``."""
    adapters = _adapters(tmp_path, path, alpha)
    numbers = {name: number for number, name in enumerate(adapters, 1)} | {"": 0}
    ranks = ThreadRanks(path, tmp_path / "store", tp, page_size=4, enable_lora=True, **engine)
    for name, folder in adapters.items():
        for runner in ranks.runners:
            runner.adapters.load(numbers[name], folder)
    requests = ranks.generate(PROMPTS, NUM_NEW, [numbers[name] for name in NAMES])
    expected = peft_model(path, adapters)
    for request, name in zip(requests, NAMES, strict=True):
        logits = peft_logits(expected, name, request.tokens[:-1])
        for runner in ranks.runners:
            actual = runner.observer.logits_of(request.id)
            assert (actual - logits).abs().max() <= bound, (request.id, name)
    changed = peft_logits(expected, "small", PROMPTS[0]) - peft_logits(expected, "large", PROMPTS[0])
    assert changed.abs().max() > 0.01  # the adapters have an effect
    ranks.close()


@pytest.mark.parametrize(("family", "tp"), FAMILIES)
def test_lora_logits_of_a_mixed_batch_equal_peft(tmp_path: Path, family: str, tp: int) -> None:
    _check(make_checkpoint(tmp_path / "model", family, seed=3), tp, tmp_path)


def test_lora_logits_of_zamba2_equal_peft(tmp_path: Path) -> None:
    """Layers that share a block's weights have separate adapters."""
    # In float32, PEFT's logits deviate from its float64 logits by 2e-4 with alpha 5 and by up to 1.1e-5 with alpha 1.
    _check(make_checkpoint(tmp_path / "model", "zamba2", seed=3), 1, tmp_path, alpha=1, bound=2e-5)


@pytest.mark.parametrize(("family", "tp"), [("qwen2_moe", 2), ("deepseek_v3", 1), ("kimi_linear", 2)])
def test_lora_logits_of_models_with_experts_equal_peft(tmp_path: Path, family: str, tp: int) -> None:
    _check(make_moe(tmp_path / "model", family, seed=3), tp, tmp_path)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1, num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapters(path: Path) -> dict[str, Path]:
    return {
        "a": make_adapter(path.parent / "a", path, ATTENTION, seed=1),
        "b": make_adapter(path.parent / "b", path, EVERY, seed=2, r=8),
        "c": make_adapter(path.parent / "c", path, ["down_proj"], seed=3, r=2),
    }


PARAMS = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True, full_logprobs=True)


def test_lora_rows_without_adapter_have_the_bits_of_an_engine_without_adapters(
    path: Path, adapters: dict[str, Path]
) -> None:
    with LLM(path, observer=Memory, logits="all") as plain:
        plain.generate(PROMPTS, PARAMS)
        expected = {str(i): plain.observer.logits_of(str(i)) for i in range(len(PROMPTS))}
    names = ["", "a", "b", "", "", "c"]
    with LLM(path, observer=Memory, logits="all", lora_paths=adapters) as llm:
        llm.generate(PROMPTS, PARAMS, adapter=names)
        for i, name in enumerate(names):
            assert torch.equal(llm.observer.logits_of(str(i)), expected[str(i)]) == (not name)


def test_lora_loaded_and_unused_adapters_change_no_bit(path: Path, adapters: dict[str, Path]) -> None:
    results = []
    for options in ({}, {"lora_paths": adapters}):
        with LLM(path, **options) as llm:
            results.append([generation.logprobs for generation in llm.generate(PROMPTS, PARAMS)])
    assert results[0] == results[1]


Result = tuple[tuple[int, ...], Any]


@pytest.fixture(scope="module")
def alone(path: Path, adapters: dict[str, Path]) -> dict[tuple[int, str], Result]:
    """Results of each prompt with each adapter, each in its own engine."""
    with LLM(path, batch_invariant=True, lora_paths=adapters, prefix_cache=False) as llm:
        return {
            (which, name): (one.token_ids, one.logprobs)
            for name in ("", *adapters)
            for which in range(len(PROMPTS))
            for one in llm.generate([PROMPTS[which]], PARAMS, adapter=name)
        }


@pytest.fixture(scope="module")
def cramped(path: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    """An engine with few pages, rows and slots: prompts are chunked, requests preempted, and adapters swapped."""
    options: dict[str, Any] = {"page_size": 4, "num_pages": 24, "max_num_batched_tokens": 13, "max_loras_per_batch": 2}
    with LLM(path, batch_invariant=True, check_invariants=True, lora_paths=adapters, **options) as llm:
        yield llm


@settings(max_examples=15)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, len(PROMPTS) - 1), st.sampled_from(["", "a", "b", "c"])),
        min_size=1,
        max_size=9,
    )
)
def test_lora_results_depend_on_no_other_request(
    cramped: LLM, alone: dict[tuple[int, str], Result], arrivals: list[tuple[int, int, str]]
) -> None:
    """Under any arrival order: with chunks, prefix hits, preemption and adapters that move between slots."""
    wanted, found = {}, {}
    for steps, which, name in arrivals:
        wanted[cramped.submit(PROMPTS[which], PARAMS, adapter=name)] = alone[which, name]
        for _ in range(steps):
            found |= {one.request: (one.token_ids, one.logprobs) for one in cramped.step()}
    while cramped.has_work:
        found |= {one.request: (one.token_ids, one.logprobs) for one in cramped.step()}
    assert found == wanted
    assert len(cramped.engine.scheduler.adapter_slots.held) <= 2


def test_lora_prefixes_are_shared_by_requests_of_one_adapter(path: Path, adapters: dict[str, Path]) -> None:
    prompt = list(range(100, 133))
    with LLM(path, lora_paths=adapters) as llm:
        names = ["", "a", "a", "b", ""]
        hits = [llm.generate([prompt], max_new_tokens=1, adapter=name)[0].cached_tokens for name in names]
        assert hits == [0, 0, 32, 0, 32]
        llm.unload_adapter("a")
        llm.load_adapter("a", adapters["c"])  # another adapter under the same name
        assert llm.generate([prompt], max_new_tokens=1, adapter="a")[0].cached_tokens == 0


def test_lora_base_requests_pass_those_that_wait_for_a_slot(path: Path, adapters: dict[str, Path]) -> None:
    with LLM(path, lora_paths=adapters, max_loras_per_batch=1) as llm:
        for name, adapter in (("first", "a"), ("waits", "b"), ("same", "a"), ("base", "")):
            llm.submit(PROMPTS[0], max_new_tokens=4, request_id=name, adapter=adapter, ignore_eos=True)
        order = []
        while llm.has_work:
            order += [generation.request for generation in llm.step()]
        assert order == ["first", "base", "waits", "same"]  # "same" would keep its slot and starve "waits"


def test_lora_least_recently_used_adapter_gives_up_its_slot(
    path: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[tuple[int, int]] = []
    begin = LoraAdapters.begin
    monkeypatch.setattr(LoraAdapters, "begin", lambda self, plan: (loads.extend(plan.adapter_loads), begin(self, plan)))
    with LLM(path, lora_paths=adapters, max_loras_per_batch=2) as llm:
        for name in ("a", "b", "a", "c", "a", "b"):
            llm.generate([PROMPTS[0]], max_new_tokens=1, adapter=name)
    assert [number for _, number in loads] == [1, 2, 3, 2]


def test_lora_unloading_lets_live_requests_finish(path: Path, adapters: dict[str, Path]) -> None:
    with LLM(path, lora_paths=adapters) as llm:
        expected = llm.generate([PROMPTS[1]], max_new_tokens=NUM_NEW, adapter="a")[0].token_ids
        for name in ("a", "b"):
            llm.submit(PROMPTS[1], max_new_tokens=NUM_NEW, request_id=name, adapter=name)
        llm.step()
        assert llm.unload_adapter("a") == 1
        with pytest.raises(Exception, match=r"asks for adapter 'a': it is not loaded; loaded: b, c"):
            llm.submit(PROMPTS[0], adapter="a")
        llm.load_adapter("a", adapters["b"])
        llm.submit(PROMPTS[1], max_new_tokens=NUM_NEW, request_id="new a", adapter="a")
        done = {}
        while llm.has_work:
            done |= {one.request: one.token_ids for one in llm.step()}
        assert done["a"] == expected
        assert done["new a"] == done["b"] != expected
        loaded = llm.engine.runner.adapters._loaded
        assert sorted(loaded) == [2, 3, 4]  # the first "a" has been unloaded


def test_lora_weights_of_the_model_can_be_replaced(path: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    other = make_llama(tmp_path / "other", seed=7, num_hidden_layers=2)
    with LLM(other, lora_paths=adapters) as llm:
        expected = llm.generate([PROMPTS[1]], max_new_tokens=NUM_NEW, adapter="b")[0].token_ids
    with LLM(path, lora_paths=adapters) as llm:
        assert llm.generate([PROMPTS[1]], max_new_tokens=NUM_NEW, adapter="b")[0].token_ids != expected
        llm.engine.update_weights(other)
        assert llm.generate([PROMPTS[1]], max_new_tokens=NUM_NEW, adapter="b")[0].token_ids == expected


def test_lora_speculation_keeps_the_ids(
    path: Path, adapters: dict[str, Path], alone: dict[tuple[int, str], Result]
) -> None:
    names = ["a", "b", "", "c", "b", "a"]
    params = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
    with LLM(path, batch_invariant=True, speculative_algorithm="NGRAM", lora_paths=adapters) as llm:
        found = llm.generate(PROMPTS, params, adapter=names)
    assert [one.token_ids for one in found] == [alone[i, name][0] for i, name in enumerate(names)]


def test_lora_layers_of_a_quantized_model(path: Path, adapters: dict[str, Path]) -> None:
    """The adapter's output is added to that of the 8-bit layers.

    Rows without an adapter keep their bits. The others change as much as with the unquantized model, up to the
    quantization error.
    """
    logits = {}
    for quantization in (None, "fp8"):
        for names in (["", ""], ["b", ""]):
            options: dict[str, Any] = {"lora_paths": adapters} if "b" in names else {}
            with LLM(path, observer=Memory, logits="all", quantization=quantization, **options) as llm:
                llm.generate(PROMPTS[1:3], PARAMS, **({"adapter": names} if options else {}))
                logits[quantization, names[0]] = [llm.observer.logits_of(str(i))[: len(PROMPTS[1])] for i in range(2)]
    assert torch.equal(logits["fp8", ""][1], logits["fp8", "b"][1])
    moved = [logits[q, "b"][0] - logits[q, ""][0] for q in (None, "fp8")]
    assert moved[0].norm() > 0.1 * logits[None, ""][0].norm()
    assert (moved[1] - moved[0]).norm() < 0.3 * moved[0].norm()
