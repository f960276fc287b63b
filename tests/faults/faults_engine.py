"""Faults of the engine's schedule: anything at any step, with few pages, and nothing may leak or change a token."""

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

from checkpoints import make_llama
from fault_list import fault

_SHARED = list(range(40, 75))
_PROMPTS = [[5, 6, 7], _SHARED, [300], [*_SHARED[:20], 9, 8], [*_SHARED, 11, 12, 13], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12]]
_NUM_NEW = 24


@functools.cache
def _model() -> tuple[Path, tuple[tuple[int, ...], ...]]:
    """A tiny model, and what it says to each prompt alone."""
    from tapscope.engine import LLM

    path = make_llama(Path(tempfile.mkdtemp(prefix="soak-engine-")) / "model", seed=1)
    with LLM(path, prefix_cache=False) as llm:
        alone = [llm.generate([prompt], max_new_tokens=_NUM_NEW, ignore_eos=True)[0] for prompt in _PROMPTS]
    return path, tuple(generation.token_ids for generation in alone)


@fault("the engine: events in any order", short=0, long=8)
def any_order(place: Path, dice: random.Random) -> None:
    """2,500 events (600 where a step has one row; 16,200 in the long form) with few pages.

    Requests of any priority, steps, aborts, flushes, forgotten computations.
    """
    from tapscope.engine import LLM

    path, expected = _model()
    page_size = dice.choice([1, 3, 4, 16])
    num_pages = -(-dice.randint(70, 160) // page_size)
    rows = dice.choice([1, 5, 16, 64])
    num_events = 2500 if rows > 1 else 600
    with LLM(
        path,
        page_size=page_size,
        num_pages=num_pages,
        max_num_batched_tokens=rows,
        max_num_seqs=6,
        check_invariants=True,
    ) as llm:
        scheduler = llm.engine.scheduler
        asked: dict[str, tuple[int, int]] = {}
        ended: dict[str, tuple[int, ...]] = {}
        for _ in range(num_events):
            event = dice.random()
            live = [request.id for request in scheduler.live()]
            if event < 0.12 and len(live) < 20:
                which, count = dice.randrange(len(_PROMPTS)), dice.randint(1, _NUM_NEW)
                priority = dice.randint(-2, 2)
                name = llm.submit(_PROMPTS[which], max_new_tokens=count, ignore_eos=True, priority=priority)
                asked[name] = (which, count)
            elif event < 0.15 and live:
                dropped = llm.abort(dice.choice(live))
                assert dropped is not None
                assert dropped.request not in ended
                ended[dropped.request] = dropped.token_ids
            elif event < 0.16:
                dice.choice([scheduler.flush, scheduler.recompute])()
            else:
                ended |= _step(llm, ended)
            scheduler.check()
        while llm.has_work:
            ended |= _step(llm, ended)
        assert ended.keys() == asked.keys()
        for name, tokens in ended.items():
            which, _ = asked[name]
            assert tokens == expected[which][: len(tokens)], f"{name}: {tokens}"
        assert scheduler.kv_cache_manager.num_used == 0
        scheduler.flush()
        assert scheduler.kv_cache_manager.pages.num_free == num_pages


def _step(llm: Any, ended: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    done = {generation.request: generation for generation in llm.step()}
    assert not done.keys() & ended.keys(), "a request ended twice"
    assert all(g.finish_reason == "length" for g in done.values())
    return {name: generation.token_ids for name, generation in done.items()}
