"""LLM: requests of any length arrive at any time, and each gets the result that it would get alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, make_llama
from engine_helpers import reference_tokens
from engine_observers import Memory

from tapscope.core.errors import ConfigError, UsageError
from tapscope.engine import LLM, EngineConfig, SamplingParams

PROMPTS = [[5, 6, 7], list(range(40, 75)), [300], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1)


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, page_size=4, observer=Memory) as made:
        yield made


def test_generate_ragged_prompts_independently(path: Path, llm: LLM) -> None:
    together = llm.generate(PROMPTS, max_new_tokens=24, ignore_eos=True)
    for generation, prompt in zip(together, PROMPTS, strict=True):
        assert list(generation.token_ids) == reference_tokens(path, prompt, 24)
        assert generation.prompt_ids == tuple(prompt)
        assert generation.finish_reason == "length"
    assert [generation.request for generation in together] == ["0", "1", "2", "3"]


def test_generate_admits_requests_into_the_running_batch(path: Path, llm: LLM) -> None:
    done = {}
    for prompt in PROMPTS:
        llm.submit(prompt, max_new_tokens=12, ignore_eos=True)
        for _ in range(3):
            done |= {g.request: g for g in llm.step()}
    while llm.has_work:
        done |= {g.request: g for g in llm.step()}
    for i, prompt in enumerate(PROMPTS):
        assert list(done[str(i)].token_ids) == reference_tokens(path, prompt, 12)
    phases = [info.phase for info in llm.observer.steps]
    assert phases[:4] == ["prefill", "decode", "decode", "mixed"]


def test_generate_with_a_small_cache_gives_the_same_tokens(path: Path) -> None:
    # 12 pages hold the longest request, and no other with it.
    with LLM(path, page_size=4, num_pages=12, observer=Memory) as llm:
        generations = llm.generate(PROMPTS, max_new_tokens=10, ignore_eos=True)
        assert len(llm.observer.steps[0].rows) < len(PROMPTS)
        assert llm.engine.scheduler.stats.num_preemptions > 0
        used = [metrics["kv_pages_used"] for metrics in llm.observer.metrics]
        assert max(used) <= 12
        assert llm.engine.scheduler.kv_cache_manager.num_available == 12
    for generation, prompt in zip(generations, PROMPTS, strict=True):
        assert list(generation.token_ids) == reference_tokens(path, prompt, 10)


def test_generate_without_new_tokens_caches_the_prompt(path: Path, llm: LLM) -> None:
    longest = [5, *range(20, 275)]  # the maximum number of positions
    params = [
        SamplingParams(max_new_tokens=n, ignore_eos=True, prompt_logprobs=0 if n == 0 else None) for n in (0, 6, 0)
    ]
    found = llm.generate([PROMPTS[1], PROMPTS[3], longest], params)
    assert [len(generation.token_ids) for generation in found] == [0, 6, 0]
    assert list(found[1].token_ids) == reference_tokens(path, PROMPTS[3], 6)
    assert [generation.finish_reason for generation in found] == ["length"] * 3
    assert (found[0].text, len(found[0].prompt_logprobs or ()), found[0].logprobs) == ("", 35, None)
    assert llm.engine.state()["decode_tokens"] == 6
    again = llm.generate([PROMPTS[1]], max_new_tokens=5, ignore_eos=True)[0]
    assert (again.cached_tokens, list(again.token_ids)) == (32, reference_tokens(path, PROMPTS[1], 5))


def test_max_num_seqs_limits_the_batch(path: Path) -> None:
    with LLM(path, max_num_seqs=2, observer=Memory) as llm:
        llm.generate(PROMPTS, max_new_tokens=3, ignore_eos=True)
        assert max(len(info.rows) for info in llm.observer.steps) == 2


def test_forced_token_ids_precede_sampled_tokens(path: Path, llm: LLM) -> None:
    forced = [17, 18, 19, 20]
    (generation,) = llm.generate([[5, 6, 7]], max_new_tokens=10, forced_token_ids=[forced], ignore_eos=True)
    assert list(generation.token_ids) == forced + reference_tokens(path, [5, 6, 7, *forced], 6)


def test_generate_stops_at_end_tokens_unless_ignore_eos(path: Path, llm: LLM) -> None:
    (stopped,) = llm.generate([[5, 6, 7]], max_new_tokens=10, forced_token_ids=[[20, 1, 21]])
    assert (stopped.token_ids, stopped.finish_reason) == ((20, 1), "stop")
    (ignored,) = llm.generate([[5, 6, 7]], max_new_tokens=3, forced_token_ids=[[20, 1, 21]], ignore_eos=True)
    assert (ignored.token_ids, ignored.finish_reason) == ((20, 1, 21), "length")


def test_generation_config_overrides_end_tokens(path: Path, tmp_path: Path) -> None:
    other = make_llama(tmp_path / "model", seed=1)
    (other / "generation_config.json").write_text('{"eos_token_id": [33, 34]}')
    with LLM(other) as llm:
        (generation,) = llm.generate([[5, 6]], max_new_tokens=5, forced_token_ids=[[20, 1, 34, 35]])
    assert generation.token_ids == (20, 1, 34)


def test_generate_tokenizes_strings_and_skips_special_tokens(llm: LLM) -> None:
    (generation,) = llm.generate(
        ["import json"], max_new_tokens=4, forced_token_ids=[[*llm.tokenizer.encode("def x"), 1]]
    )
    assert list(generation.prompt_ids) == llm.tokenizer.encode("import json")
    assert generation.text.startswith("def x")
    assert "</s>" not in generation.text


def test_generate_without_tokenizer_needs_token_ids(path: Path, tmp_path: Path) -> None:
    bare = make_llama(tmp_path / "model")
    (bare / "tokenizer.json").unlink()
    with LLM(bare) as llm:
        assert llm.generate([[5]], max_new_tokens=2)[0].text is None
        with pytest.raises(UsageError, match=r"no tokenizer\.json; pass prompts as token ids"):
            llm.generate(["text"])


def test_abort_returns_the_output_so_far(path: Path, llm: LLM) -> None:
    for i, prompt in enumerate(PROMPTS):
        llm.submit(prompt, max_new_tokens=8, request_id=f"r{i}", ignore_eos=True)
    llm.step()
    llm.step()
    dropped = llm.abort("r1")
    assert dropped.finish_reason == "abort"
    assert list(dropped.token_ids) == reference_tokens(path, PROMPTS[1], 2)
    assert llm.abort("r1") is None
    done = {}
    while llm.has_work:
        done |= {g.request: g for g in llm.step()}
    assert set(done) == {"r0", "r2", "r3"}
    assert list(done["r3"].token_ids) == reference_tokens(path, PROMPTS[3], 8)
    assert llm.engine.scheduler.kv_cache_manager.num_used == 0


def test_logits_setting_does_not_change_tokens(path: Path) -> None:
    results = []
    for logits in ("last", "all"):
        with LLM(path, logits=logits) as llm:
            results.append(llm.generate(PROMPTS, max_new_tokens=6, ignore_eos=True))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": "text"}, "pass a list of prompts"),
        ({"prompts": [[]]}, "no prompt tokens"),
        ({"prompts": [[5, 512]]}, "expected 0 to 511"),
        ({"prompts": [[5, True]]}, "invalid token id True in the prompt"),
        ({"prompts": [[5]], "forced_token_ids": [[-1]]}, "invalid token id -1 in forced_token_ids"),
        ({"prompts": 5}, "prompts is int"),
        ({"prompts": [None]}, "a prompt is NoneType"),
        ({"prompts": [[5]], "params": {"n": 2}}, "params is dict"),
        ({"prompts": [[5]], "params": [{"n": 2}]}, "params is dict"),
        ({"prompts": [[5]], "max_new_tokens": -1}, "max_new_tokens=-1: must be an integer ≥ 0"),
        ({"prompts": [[5]], "max_new_tokens": 256}, r"needs 257 positions .* the limit is 256 "),
        ({"prompts": [[5], [6]], "request_ids": ["a"]}, "request_ids has 1 entries for 2 prompts"),
        ({"prompts": [[5], [6]], "request_ids": ["a", "a"]}, "'a' is in use by a live request"),
        ({"prompts": [[5]], "request_ids": [""]}, "expected a string of at least one character"),
    ],
)
def test_submit_rejects_invalid_requests(llm: LLM, arguments: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.generate(**arguments)
    assert not llm.has_work
    assert llm.generate([[5]], max_new_tokens=1)


def test_submit_rejects_requests_larger_than_the_cache(path: Path) -> None:
    with LLM(path, page_size=4, num_pages=3) as llm:
        with pytest.raises(UsageError, match=r"needs 4 pages of 4 tokens .prompt 5, 10 new. but the cache has 3"):
            llm.generate([[5] * 5], max_new_tokens=10)
        # 4 + 9 - 1 positions are computed; the last generated token is not fed back.
        assert len(llm.generate([[5] * 4], max_new_tokens=9, ignore_eos=True)[0].token_ids) == 9


def test_closed_llm_raises_usage_error(path: Path) -> None:
    llm = LLM(path, observer=Memory)
    memory = llm.observer
    llm.close()
    llm.close()
    assert memory.closed == 1
    with pytest.raises(UsageError, match="closed"):
        llm.submit([5])


def test_llm_two_engines_in_one_process(path: Path, tmp_path: Path) -> None:
    other = make_llama(tmp_path / "model", seed=2)
    with LLM(path) as first, LLM(other) as second:
        first.submit([5, 6], max_new_tokens=4, ignore_eos=True)
        second.submit([5, 6], max_new_tokens=4, ignore_eos=True)
        results = []
        for llm in (first, second):
            while llm.has_work:
                results += llm.step()
    assert list(results[0].token_ids) == reference_tokens(path, [5, 6], 4)
    assert list(results[1].token_ids) == reference_tokens(other, [5, 6], 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float64"}, "dtype='float64': must be one of auto, float32, bfloat16, float16"),
        ({"tp": 0}, "tp=0: must be an integer ≥ 1"),
        ({"page_size": True}, "page_size=True"),
        ({"num_pages": 0}, "num_pages=0"),
        ({"logits": "some"}, "must be one of last, all"),
        ({"seed": -1}, "seed=-1"),
        ({"rank_timeout_s": 0}, "rank_timeout_s=0"),
        ({"pages": 4}, "unknown engine setting 'pages'; valid settings: dtype, device, tp"),
        ({"max_model_len": 1}, "max_model_len=1: must be an integer ≥ 2"),
        ({"max_model_len": 257}, "max_model_len=257: the model has 256 positions .*; use at most 256"),
        ({"kv_cache_memory_bytes": 1}, "must hold at least one page"),
    ],
)
def test_engine_config_errors_name_field_value_and_rule(path: Path, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(path, **settings)


@pytest.mark.parametrize("name", ["quantization_param_path", "profile_dir"])
def test_engine_config_accepts_path_for_file_and_directory_settings(name: str) -> None:
    assert getattr(EngineConfig.build(Path("model"), {name: Path("a/b")}), name) == "a/b"


def test_llm_accepts_an_engine_config(path: Path) -> None:
    config = EngineConfig(model=str(path), page_size=8)
    with LLM(config) as llm:
        assert llm.config is config
    with pytest.raises(ConfigError, match="page_size given with an EngineConfig"):
        LLM(config, page_size=4)


def test_llm_rejects_more_ranks_than_heads(path: Path) -> None:
    with pytest.raises(UsageError, match="tp=5 is more than the model's 4 heads; use at most 4"):
        LLM(path, tp=5)


def test_num_pages_defaults_to_kv_cache_memory_bytes(path: Path) -> None:
    # One page: keys and values, 3 layers, 16 positions, 2 heads of 16, 4 bytes.
    with LLM(path, kv_cache_memory_bytes=5 * 2 * 3 * 16 * 2 * 16 * 4) as llm:
        assert llm.engine.scheduler.config.num_pages == 5
    with LLM(path, max_num_seqs=2) as llm:
        assert llm.engine.scheduler.config.num_pages == 2 * 256 // 16


def test_max_model_len_limits_requests_and_sizes_the_cache(path: Path) -> None:
    with LLM(path, page_size=4, max_num_seqs=2, max_model_len=40) as llm:
        assert llm.engine.scheduler.config.num_pages == 2 * 40 // 4
        with pytest.raises(UsageError, match=r"needs 41 positions .* but the limit is 40 .max_model_len"):
            llm.generate([PROMPTS[1]], max_new_tokens=6)
        (found,) = llm.generate([PROMPTS[1]], max_new_tokens=5, ignore_eos=True)
        llm.engine.update_weights(path)  # more positions than the limit, but otherwise the same model
        assert llm.generate([PROMPTS[1]], max_new_tokens=5, ignore_eos=True)[0].token_ids == found.token_ids
    assert list(found.token_ids) == reference_tokens(path, PROMPTS[1], 5)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_max_model_len_below_a_sliding_window_leaves_one_cache_group(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path / "model", family, seed=1)
    with LLM(path) as llm:
        assert len(llm.engine.runner.cache_config.groups) == 2
        expected = [found.token_ids for found in llm.generate([[5, 6, 7]], max_new_tokens=4, ignore_eos=True)]
    with LLM(path, max_model_len=7) as llm:
        assert len(llm.engine.runner.cache_config.groups) == 1
        assert [found.token_ids for found in llm.generate([[5, 6, 7]], max_new_tokens=4, ignore_eos=True)] == expected


def test_hook_errors_fail_the_call_only(path: Path, llm: LLM) -> None:
    def explode(*_: object) -> None:
        raise ValueError("from a user's hook")

    handle = llm.model.model.norm.register_forward_hook(explode)
    with pytest.raises(ValueError, match="user's hook"):
        llm.generate([[5, 6]])
    handle.remove()
    assert len(llm.observer.steps) == len(llm.observer.metrics) == 1
    assert list(llm.generate([[5, 6]], max_new_tokens=3, ignore_eos=True)[0].token_ids) == reference_tokens(
        path, [5, 6], 3
    )


def test_generate_restores_grad_mode_and_threads(path: Path) -> None:
    threads = torch.get_num_threads()
    with LLM(path) as llm:
        llm.generate([[5]], max_new_tokens=1)
        assert torch.is_grad_enabled()
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_llm_of_an_inference_mode_outlives_it(path: Path, load_format: str) -> None:
    """Weights and KV cache are ordinary tensors: threads fill them, and steps outside inference mode write to them."""
    with LLM(path, load_format=load_format) as llm:
        expected = llm.generate([[5, 6, 7]], max_new_tokens=4)[0].token_ids
    with torch.inference_mode():
        made = LLM(path, load_format=load_format)
        assert made.generate([[5, 6, 7]], max_new_tokens=4)[0].token_ids == expected
    with made as llm:
        assert llm.generate([[5, 6, 7]], max_new_tokens=4)[0].token_ids == expected
        llm.engine.update_weights(path)
        expected_update = reference_tokens(path, [5, 6, 7], 4)
        assert list(llm.generate([[5, 6, 7]], max_new_tokens=4)[0].token_ids) == expected_update
