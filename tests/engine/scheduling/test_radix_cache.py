"""The prefix cache against a naive model: a dict of prefixes and a list in LRU order."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.core.errors import InvariantError
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.request import Request
from tapscope.engine.scheduling.kv_cache_manager import KVCacheManager
from tapscope.engine.scheduling.radix_cache import RadixCache, RadixNode


def _hold(tree: RadixCache, path: list[tuple[int, ...]], pages: list[int]) -> RadixNode:
    """Take a reference to every page of ``path``, inserting the pages missing from ``tree``."""
    node = tree.root
    for key in path:
        child = node.children.get(key)
        if child is None:
            child = tree.insert(node, key, pages.pop())
        else:
            tree.hold(child)
        node = child
    return node


def _with_ancestors(node: RadixNode) -> list[RadixNode]:
    """Return ``node`` and its ancestors, without the root."""
    return [] if node.parent is None else [node, *_with_ancestors(node.parent)]


paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=25)


@settings(max_examples=100)
@given(paths=paths, held=st.integers(0, 4), evict=st.integers(0, 20))
def test_radix_cache_evicts_least_recently_used(paths: list[list[int]], held: int, evict: int) -> None:
    tree, pages = RadixCache(), list(range(200))
    last_used: dict[tuple[int, ...], int] = {}
    nodes: list[tuple[tuple[int, ...], RadixNode]] = []
    for path in paths:
        nodes.append((tuple(path), _hold(tree, [(step,) for step in path], pages)))
        tree.check()
    for i, (path, node) in enumerate(nodes[held:]):
        tree.release(_with_ancestors(node))
        tree.check()
        last_used |= {path[:end]: i for end in range(1, len(path) + 1)}
    kept = {path[:end] for path, _ in nodes[:held] for end in range(1, len(path) + 1)}
    free = {path: stamp for path, stamp in last_used.items() if path not in kept}
    assert tree.num_evictable == len(free)
    before = {node.page: prefix for prefix, node in _prefixes(tree)}
    gone = [before[page] for page in tree.evict(evict)]
    tree.check()
    assert len(gone) == min(evict, len(free))
    for path in gone:
        leaves = [p for p in free if not any(q != p and q[: len(p)] == p for q in free.keys() | kept)]
        assert free.pop(path) == min([free[leaf] for leaf in leaves if leaf != path] + [last_used[path]])
    assert {prefix for prefix, _ in _prefixes(tree)} == kept | free.keys()


def _prefixes(tree: RadixCache) -> list[tuple[tuple[int, ...], RadixNode]]:
    found: list[tuple[tuple[int, ...], RadixNode]] = []
    stack: list[tuple[tuple[int, ...], RadixNode]] = [((), tree.root)]
    while stack:
        prefix, node = stack.pop()
        for key, child in node.children.items():
            found.append((prefix + key, child))
            stack.append((prefix + key, child))
    return found


@settings(max_examples=100)
@given(paths=paths, held=st.integers(0, 4), dropped=st.integers(0, 2))
def test_radix_cache_drop_hides_a_subtree_and_evicts_it_first(paths: list[list[int]], held: int, dropped: int) -> None:
    tree, pages = RadixCache(), list(range(200))
    nodes = [(path, _hold(tree, [(step,) for step in path], pages)) for path in paths]
    for _, node in nodes[held:]:
        tree.release(_with_ancestors(node))
    below = {node.page for prefix, node in _prefixes(tree) if prefix[0] == dropped}
    in_use = {node.page for _, leaf in nodes[:held] for node in _with_ancestors(leaf)}
    kept = tree.num_evictable - len(below - in_use)
    assert sorted(tree.drop((dropped,))) == sorted(below - in_use)
    assert tree.drop((dropped,)) == []
    tree.check()
    assert tree.num_evictable == kept
    assert dropped not in {prefix[0] for prefix, _ in _prefixes(tree)}
    for path, node in nodes[:held]:
        if path[0] == dropped:  # a holder appends below a dropped prefix
            below.add(pages[-1])
            tree.release([tree.insert(node, (9,), pages.pop())])
        tree.release(_with_ancestors(node))
        tree.check()
    junk = below & {node.page for node in tree.nodes()}
    assert set(tree.evict(len(junk))) == junk
    tree.check()


def test_radix_cache_heap_is_bounded() -> None:
    tree, pages = RadixCache(), [0]
    for _ in range(1000):
        tree.release(_with_ancestors(_hold(tree, [(7,)], pages)))
    assert len(tree._evictable_heap) < 100
    assert tree.evict(5) == [0]


def _request(tokens: list[int], **given: Any) -> Request:
    return Request(id="r", prompt_ids=tuple(tokens), params=SamplingParams(**given))


def _compute(kv_cache_manager: KVCacheManager, request: Request) -> None:
    kv_cache_manager.allocate(request, len(request.tokens))
    request.mark_computed(request.num_computed, len(request.tokens) - request.num_computed)
    kv_cache_manager.cache_full_pages(request)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@given(data=st.data())
@settings(max_examples=25)
def test_match_prefix_leaves_one_token(page_size: int, data: st.DataObject) -> None:
    first = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=40))
    cut = data.draw(st.integers(0, len(first)))
    second = [*first[:cut], *data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))]
    kv_cache_manager = KVCacheManager(100, page_size)
    one, two = _request(first), _request(second)
    _compute(kv_cache_manager, one)
    kv_cache_manager.match_prefix(two)
    common = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    expected = min(common, len(second) - 1) // page_size * page_size
    assert two.num_computed == expected
    assert two.table(0).pages == one.table(0).pages[: expected // page_size]
    kv_cache_manager.check([one, two])
    kv_cache_manager.release(one)
    kv_cache_manager.release(two)
    kv_cache_manager.check([])
    assert kv_cache_manager.num_used == 0


@pytest.mark.parametrize("page_size", [1, 2, 3])
@given(data=st.data())
@settings(max_examples=60)
def test_match_prefix_needs_the_last_window_only(page_size: int, data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 7))
    kv_cache_manager = KVCacheManager(data.draw(st.integers(30, 60)) // page_size, page_size, window=window)
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=25).map(
        lambda tail: [1, 0, 1, 1, 0, 1][: len(tail)] + tail
    )
    for tokens in data.draw(st.lists(prompts, max_size=6)):
        request = _request(tokens)
        kv_cache_manager.match_prefix(request)
        while request.num_computed < len(tokens):  # in chunks, so that pages are freed on the way
            end = min(request.num_computed + page_size, len(tokens))
            kv_cache_manager.allocate(request, end)
            request.mark_computed(request.num_computed, end - request.num_computed)
            kv_cache_manager.cache_full_pages(request)
            assert len(request.table(0).pages) - request.table(0).num_freed_pages <= -(-window // page_size) + 2
            kv_cache_manager.check([request])
        kv_cache_manager.release(request)
        kv_cache_manager.check([])
        kv_cache_manager.pages.free_pages(kv_cache_manager.tree.evict(data.draw(st.integers(0, 2))))
        kv_cache_manager.check([])
    new = _request(data.draw(prompts))
    known = {prefix: node.page >= 0 for prefix, node in _prefixes(kv_cache_manager.tree)}
    expected = 0
    for end in range(page_size, len(new.tokens), page_size):
        seen = range(max(0, end - window + 1) // page_size * page_size + page_size, end + 1, page_size)
        if all(known.get(tuple(new.tokens[:stop])) for stop in (*seen, end)):
            expected = end
    kv_cache_manager.match_prefix(new)
    assert new.num_computed == expected
    kv_cache_manager.check([new])
    kv_cache_manager.release(new)
    assert kv_cache_manager.flush() >= 0
    assert list(kv_cache_manager.tree.nodes()) == []
    kv_cache_manager.check([])


def test_cache_full_pages_shares_duplicates() -> None:
    kv_cache_manager = KVCacheManager(10, 2)
    one, two = _request([1, 2, 3, 4, 5]), _request([1, 2, 3, 4, 6])
    for request in (one, two):  # both computed in the same step, so neither finds the other's pages
        kv_cache_manager.allocate(request, 5)
        request.mark_computed(0, 5)
    two.table(0).num_sent_pages = 3
    kv_cache_manager.cache_full_pages(one)
    kv_cache_manager.cache_full_pages(two)
    assert two.table(0).pages[:2] == one.table(0).pages[:2]
    assert two.table(0).pages[2] != one.table(0).pages[2]
    assert two.table(0).num_sent_pages == 0  # the ranks need the new entries
    kv_cache_manager.check([one, two])
    assert kv_cache_manager.pages.num_used == 4


def test_match_prefix_is_skipped_if_every_row_is_needed() -> None:
    kv_cache_manager = KVCacheManager(10, 2)
    one, two = _request([1, 2, 3, 4, 5]), _request([1, 2, 3, 4, 5], prompt_logprobs=1)
    _compute(kv_cache_manager, one)
    kv_cache_manager.match_prefix(two)
    assert two.num_computed == 0
    _compute(kv_cache_manager, two)
    assert two.table(0).pages[:2] == one.table(0).pages[:2]


def test_a_request_with_nan_neither_takes_nor_adds_pages_that_others_find() -> None:
    kv_cache_manager = KVCacheManager(20, 2)
    bad, good = _request([1, 2, 3, 4, 5]), _request([1, 2, 3, 4, 5])
    _compute(kv_cache_manager, bad)
    bad.has_nan = True
    kv_cache_manager.drop_prefix(bad)
    kv_cache_manager.match_prefix(good)
    assert good.num_computed == 0
    _compute(kv_cache_manager, good)
    kv_cache_manager.release(bad)  # as in a preemption
    kv_cache_manager.match_prefix(bad)
    assert bad.num_computed == 0
    _compute(kv_cache_manager, bad)
    assert bad.table(0).num_shared_pages == 0
    kv_cache_manager.check([good, bad])


def test_flush_evicts_unheld_prefixes() -> None:
    kv_cache_manager = KVCacheManager(10, 2)
    one, two = _request([1, 2, 3, 4, 5]), _request([7, 8, 9, 10])
    _compute(kv_cache_manager, one)
    _compute(kv_cache_manager, two)
    kv_cache_manager.release(two)
    assert kv_cache_manager.flush() == 2
    kv_cache_manager.check([one])
    again = _request([7, 8, 9, 10])
    kv_cache_manager.match_prefix(again)
    assert again.num_computed == 0


def test_radix_cache_check_detects_violations() -> None:
    tree = RadixCache()
    node = tree.insert(tree.root, (1,), 5)
    tree.release([node])
    tree._evictable_heap.clear()
    with pytest.raises(InvariantError, match="page 5 can never be evicted"):
        tree.check()
