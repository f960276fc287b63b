"""Tag context: tags are restored, never leak, and are separate per thread and task."""

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapscope.core.errors import ConfigError
from tapscope.dumper.steps.tag_context import ctx, current, set_ctx

_TAGS = st.dictionaries(st.sampled_from(["a", "b", "layer_id"]), st.none() | st.integers(), min_size=1)


@given(st.lists(_TAGS, max_size=6), st.booleans())
def test_ctx_blocks_overlay_each_other_and_give_back_what_was_there(stack: list[dict[str, Any]], fails: bool) -> None:
    before = dict(current())

    def enter(rest: list[dict[str, Any]], expected: dict[str, Any]) -> None:
        assert dict(current()) == expected
        if not rest:
            set_ctx(inside=1)  # tags set inside a block end with the block
            if fails and stack:
                raise KeyError("the model")
            return
        merged = {name: value for name, value in {**expected, **rest[0]}.items() if value is not None}
        try:
            with ctx(**rest[0]):
                enter(rest[1:], merged)
        finally:
            assert dict(current()) == expected

    if stack:
        try:
            enter(stack, before)
        except KeyError:
            assert fails
    assert dict(current()) == before


def test_ctx_decorator_asks_the_first_argument_and_restores_after_an_exception() -> None:
    class Layer:
        def __init__(self, layer_id: int, inner: "Layer | None" = None) -> None:
            self.layer_id, self.inner = layer_id, inner

        @ctx(lambda self: {"layer_id": self.layer_id})
        def forward(self, seen: list[Any]) -> None:
            seen.append(current().get("layer_id"))
            if self.inner is not None:
                with pytest.raises(ValueError, match="inner"):
                    self.inner.forward(seen)
                seen.append(current().get("layer_id"))
                return
            raise ValueError("inner")

    seen: list[Any] = []
    Layer(3, Layer(7)).forward(seen)
    assert seen == [3, 7, 3]
    assert "layer_id" not in current()


def test_ctx_decorator_with_static_tags_and_one_that_fails() -> None:
    @ctx(stage="prefill")
    def run() -> Any:
        return current()["stage"]

    @ctx(lambda batch: {"size": batch.missing})
    def odd(batch: object) -> str:
        return "ran"

    assert (run(), odd(object()), run.__name__) == ("prefill", "ran", "run")
    assert "stage" not in current()


def test_ctx_threads_and_tasks_do_not_mix() -> None:
    seen: dict[str, Any] = {}

    def work() -> None:
        seen["thread"] = dict(current())
        set_ctx(a="thread")

    async def task(name: str) -> None:
        with ctx(task=name):
            for _ in range(3):
                await asyncio.sleep(0)
                assert current()["task"] == name

    @ctx(kind="coroutine")
    async def decorated() -> Any:
        await asyncio.sleep(0)
        return current()["kind"]

    async def main() -> Any:
        await asyncio.gather(task("x"), task("y"))
        return await decorated()

    with ctx(a="main"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert asyncio.run(main()) == "coroutine"
        assert current() == {"a": "main"}
    assert seen["thread"] == {}


def test_ctx_none_takes_a_tag_away() -> None:
    with ctx(a=1, b=2):
        set_ctx(a=None)
        assert current() == {"b": 2}
        with ctx(b=None):
            assert current() == {}


def test_ctx_generator_has_its_tags_while_it_runs_and_passes_on_all_that_is_sent() -> None:
    seen: list[Any] = []

    @ctx(lambda first: {"a": first})
    def items(first: int) -> Any:
        for number in range(3):
            try:
                seen.append((dict(current()), (yield number)))
            except KeyError as error:
                seen.append((dict(current()), repr(error)))
        return "end"

    found = items(7)
    with ctx(b=1):
        assert next(found) == 0
        assert dict(current()) == {"b": 1}
        assert found.send("x") == 1
        assert found.throw(KeyError("k")) == 2
        with pytest.raises(StopIteration) as stopped:
            next(found)
    assert stopped.value.value == "end"
    assert dict(current()) == {}
    assert seen == [({"a": 7, "b": 1}, "x"), ({"a": 7, "b": 1}, "KeyError('k')"), ({"a": 7, "b": 1}, None)]
    stale = items(8)
    next(stale)
    stale.close()
    assert dict(current()) == {}


def test_ctx_async_generator_has_its_tags_while_it_runs() -> None:
    seen: list[Any] = []

    @ctx(a=1)
    async def items() -> Any:
        for number in range(2):
            await asyncio.sleep(0)
            seen.append(dict(current()))
            yield number

    async def work() -> None:
        async for number in items():
            seen.append((number, dict(current())))

    asyncio.run(work())
    assert seen == [{"a": 1}, (0, {}), {"a": 1}, (1, {})]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ctx(),
        lambda: ctx(lambda x: {}, a=1),
        lambda: ctx("layer_id"),  # type: ignore[arg-type]
        lambda: ctx(lambda x: {}).__enter__(),
    ],
)
def test_ctx_what_ctx_cannot_mean_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"^ctx: "):
        make()
