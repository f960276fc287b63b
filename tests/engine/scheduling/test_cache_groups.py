"""Cache groups: windowed layers have their own page pool, free pages behind the window, and leak none."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from engine_helpers import reference_tokens
from fake_engine import VOCAB, FakeRank, continuation
from soak_cases import EXAMPLES

from tapscope.core.errors import UsageError
from tapscope.engine import LLM
from tapscope.engine.execution.kv_cache_config import size_groups
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.layer_group import LayerGroup, layer_groups
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.request import Request
from tapscope.engine.scheduling.kv_cache_manager import KVCacheManager
from tapscope.engine.scheduling.scheduler import Scheduler
from tapscope.engine.scheduling.scheduler_config import SchedulerConfig


def _request(tokens: list[int]) -> Request:
    return Request(id="r", prompt_ids=tuple(tokens))


def _compute(manager: KVCacheManager, request: Request, rows: int) -> None:
    """Compute all tokens of ``request``, ``rows`` at a time."""
    while request.num_computed < len(request.tokens):
        end = min(request.num_computed + rows, len(request.tokens))
        manager.allocate(request, end)
        request.mark_computed(request.num_computed, end - request.num_computed)
        manager.cache_full_pages(request)
        manager.check([request])


def test_cache_groups_free_pages_behind_the_window_of_their_own_layers() -> None:
    manager = KVCacheManager(64, 4, prefix_cache=False, windowed=[(8, 10)])
    request = _request(list(range(200)))
    _compute(manager, request, 4)
    assert manager.groups[0].num_used == 50
    assert manager.groups[1].num_used <= manager.groups[1].max_pages(200) == 5
    manager.release(request)
    manager.check([])
    assert manager.num_used == 0


def test_match_prefix_ends_at_the_deepest_page_of_every_group() -> None:
    manager = KVCacheManager(64, 4, windowed=[(30, 6)])
    tokens = list(range(40))
    _compute(manager, first := _request(tokens), 4)
    manager.release(first)
    windowed = manager.groups[1]
    windowed.pages.free_pages(windowed.tree.evict(1))  # evict the LRU page: position 0, outside every later window
    manager.match_prefix(again := _request([*tokens, 99]))
    assert again.num_computed == 40
    manager.check([again])
    manager.release(again)
    node = windowed.tree.root  # evict the page of positions 32 to 35: a hit ends before it or beyond its window
    for start in range(0, 36, 4):
        node = node.children[tuple(tokens[start : start + 4])]
    number, node.page = node.page, -1
    windowed.tree.num_pages -= 1
    windowed.tree.num_evictable -= 1
    windowed.pages.free_pages([number])
    manager.match_prefix(again := _request([*tokens, 99]))
    assert again.num_computed == 32
    manager.check([again])


def test_flush_empties_every_group() -> None:
    manager = KVCacheManager(20, 2, windowed=[(20, 3)])
    _compute(manager, request := _request(list(range(12))), 12)
    manager.release(request)
    assert manager.num_cached > 0
    manager.flush()
    assert [group.pages.num_free for group in manager.groups] == [20, 20]


NUM_EVENTS = 1_000 * EXAMPLES


@pytest.mark.hypothesis  # marked so that `make soak` runs it
@pytest.mark.parametrize(
    ("windowed", "num_states"),
    [(((14, 5),), 0), (((9, 3), (14, 7)), 0), ((), 12), (((14, 5),), 11)],
    ids=["two groups", "three groups", "states", "two groups and states"],
)
def test_random_events_leak_nothing(windowed: tuple[tuple[int, int], ...], num_states: int) -> None:
    dice = random.Random(7)
    config = SchedulerConfig(
        num_pages=30,
        page_size=3,
        max_num_seqs=5,
        max_tokens=9,
        windowed_pools=windowed,
        num_state_slots=num_states,
        state_interval=6,
        check_invariants=True,
    )
    scheduler, rank = Scheduler(config), FakeRank(3, None, [window for _, window in windowed])
    requests: dict[str, Request] = {}
    bases = [[dice.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    for event in range(NUM_EVENTS):
        chance = dice.random()
        if chance < 0.15 and len(requests) < 12:
            prompt = (*dice.choice(bases)[: dice.randrange(40)], dice.randrange(VOCAB))
            params = SamplingParams(max_new_tokens=dice.randint(1, 20))
            request = Request(id=str(event), prompt_ids=prompt, params=params, priority=dice.randint(-1, 1))
            scheduler.validate(request)
            scheduler.add(request)
            requests[request.id] = request
        elif chance < 0.17 and requests:
            assert scheduler.abort(name := dice.choice(sorted(requests))) is requests.pop(name)
        elif chance < 0.175 and requests:
            scheduler.mark_nan(requests[dice.choice(sorted(requests))])
        elif chance < 0.18:
            dice.choice([scheduler.flush, scheduler.recompute])()
        elif scheduler.has_work:
            plan = scheduler.plan()
            sampled = rank.execute(plan, requests)
            if chance < 0.2:
                continue  # the step failed and is planned again
            for request in scheduler.commit(sampled):
                del requests[request.id]
                assert list(request.generated) == continuation(request.prompt_ids, request.max_new_tokens)
        scheduler.check()
    for name in list(requests):
        scheduler.abort(name)
    scheduler.flush()
    assert scheduler.stats.num_preemptions > 0
    assert scheduler.stats.cached_tokens > 0
    for group in scheduler.kv_cache_manager.groups:
        assert group.pages.num_free == group.pages.num_pages
    assert scheduler.kv_cache_manager.num_free_states == num_states


GEMMA = {"num_hidden_layers": 6, "sliding_window": 8, "sliding_window_pattern": 6, "max_position_embeddings": 256}


def test_windowed_pool_is_small_and_tokens_equal_transformers(tmp_path: Path) -> None:
    """Five of six layers have a window of 8 out of 256 positions; pages behind a long request's window are freed."""
    path = make_checkpoint(tmp_path / "model", "gemma3", seed=4, **GEMMA)
    prompt = [(7 * i + i // 5) % 500 for i in range(120)]
    with LLM(path, page_size=4, max_num_seqs=4, max_num_batched_tokens=8, check_invariants=True) as llm:
        (generation,) = llm.generate([prompt], max_new_tokens=100, ignore_eos=True)
        assert list(generation.token_ids) == reference_tokens(path, prompt, 100)
        full, windowed = llm.engine.state()["kv_groups"]
        assert (full["window"], windowed["window"]) == (None, 8)
        assert windowed["pages_total"] == 4 * (8 // 4 + 2) + 8 // 4
        uniform = full["bytes_total"] * 6
        assert full["bytes_total"] + windowed["bytes_total"] < 0.3 * uniform
        (again,) = llm.generate([prompt], max_new_tokens=20, ignore_eos=True)
        assert again.token_ids == generation.token_ids[:20]
        assert llm.engine.scheduler.kv_cache_manager.num_used == 0


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_windowed_pools_take_a_fifth_of_uniform_layers(tmp_path: Path, max_num_seqs: int) -> None:
    """Five of six layers have a window of 1k; the model has 32k positions."""
    groups = LayerGroup((5,), None), LayerGroup((0, 1, 2, 3, 4), 1024)
    config = EngineConfig(model=str(tmp_path), max_num_seqs=max_num_seqs, kv_cache_memory_bytes=1 << 40)
    full, windowed = size_groups(config, groups, (1024, 5 * 1024), 32768, 512)
    assert full == max_num_seqs * 32768 // 16
    assert full + 5 * windowed <= 0.22 * 6 * full
    limited = replace(config, kv_cache_memory_bytes=(budget := 32 << 20))
    full, windowed = size_groups(limited, groups, (1024, 5 * 1024), 32768, 512)
    assert 0.98 * budget <= 16 * 1024 * (full + 5 * windowed) <= budget


def test_swa_full_tokens_ratio_sizes_the_windowed_pool(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "gemma3", seed=4, **GEMMA)
    with LLM(path, page_size=4, num_pages=100, swa_full_tokens_ratio=0.25) as llm:
        assert [group["pages_total"] for group in llm.engine.state()["kv_groups"]] == [100, 25]
    with LLM(path, page_size=4, num_pages=100, swa_full_tokens_ratio=0.01) as llm:  # at least the window of one request
        assert [group["pages_total"] for group in llm.engine.state()["kv_groups"]] == [100, 4]


def test_a_request_beyond_a_windowed_pool_is_refused() -> None:
    scheduler = Scheduler(
        SchedulerConfig(num_pages=30, page_size=4, max_num_seqs=2, windowed_pools=((3, 10),), prefix_cache=False)
    )
    with pytest.raises(UsageError, match="needs 5 pages of 4 tokens for layers with a window of 10"):
        scheduler.validate(_request(list(range(60))))


def test_layer_groups_are_ordered_by_window(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "mixed", "gemma3", num_hidden_layers=3)
    groups = layer_groups(ModelConfig.read(path))
    assert [(group.layers, group.window) for group in groups] == [((1,), None), ((0, 2), 8)]
    path = make_checkpoint(tmp_path / "wide", "gemma3", sliding_window=256)  # at least as wide as the model's positions
    assert [group.window for group in layer_groups(ModelConfig.read(path))] == [None]
