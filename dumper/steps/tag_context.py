"""Tag context: tags attached to everything that is recorded while they are set, per thread or asyncio task."""

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeVar

from tapscope.core.errors import ConfigError
from tapscope.dumper.job.compiled_regions import is_compiling
from tapscope.dumper.steps.tag_naming import json_tags

Tags = Mapping[str, Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])
NO_TAGS: Tags = MappingProxyType({})
TAGS: ContextVar[Tags] = ContextVar("tapscope_tags", default=NO_TAGS)
_outer: ContextVar[tuple[Tags, ...]] = ContextVar("tapscope_outer_tags", default=())

current = TAGS.get
"""Returns the tags of the current thread or task; the mapping is never modified in place."""


def set_ctx(**tags: Any) -> None:
    """Set tags in the current thread or task, until they are changed; None removes a tag."""
    if is_compiling():
        return
    TAGS.set(merged(TAGS.get(), tags))


def merged(tags: Tags, more: Tags) -> Tags:
    """Return ``tags`` overridden by ``more``, as JSON types; a value of None removes the tag."""
    return json_tags({**tags, **more}) or NO_TAGS


class ctx:
    """Context manager and decorator that sets tags and restores the previous tags afterwards.

    In a decorated coroutine or generator, the tags apply while its own code runs, not while its consumer runs.

    ::

        with ctx(layer_id=3):
            ...

        @ctx(lambda self: {"layer_id": self.layer_id})    # called with the first argument of each call
        def forward(self, x): ...

        @ctx(stage="prefill")
        def run(batch): ...

    Raises ConfigError if both a function and static tags are given, or neither. If the function fails in a call, the
    decorated function runs without tags.
    """

    def __init__(self, extract: Callable[[Any], Tags] | None = None, **static: Any) -> None:
        if (extract is None) == (not static):
            raise ConfigError("ctx: give either a function that makes tags of the first argument, or NAME=VALUE tags")
        if extract is not None and not callable(extract):
            raise ConfigError(f"ctx: {extract!r} is not a function; write ctx(layer_id=3) or ctx(lambda self: {{...}})")
        self._extract = extract
        self._static = static

    def __call__(self, function: _Function) -> _Function:
        """Decorate a function, coroutine function or (async) generator function."""

        @functools.wraps(function)
        def tagged(*args: Any, **kwargs: Any) -> Any:
            _enter(self._of(args))
            try:
                return function(*args, **kwargs)
            finally:
                _leave()

        @functools.wraps(function)
        async def tagged_later(*args: Any, **kwargs: Any) -> Any:
            _enter(self._of(args))
            try:
                return await function(*args, **kwargs)
            finally:
                _leave()

        @functools.wraps(function)
        def tagged_items(*args: Any, **kwargs: Any) -> Any:
            return _driven(function(*args, **kwargs), self._of(args))

        @functools.wraps(function)
        def tagged_items_later(*args: Any, **kwargs: Any) -> Any:
            return _driven_later(function(*args, **kwargs), self._of(args))

        kinds: list[tuple[Callable[[Any], bool], Any]] = [
            (inspect.iscoroutinefunction, tagged_later),
            (inspect.isgeneratorfunction, tagged_items),
            (inspect.isasyncgenfunction, tagged_items_later),
        ]
        wrapped: Any = next((wrapper for is_kind, wrapper in kinds if is_kind(function)), tagged)
        return wrapped  # type: ignore[no-any-return]

    def __enter__(self) -> Tags:
        if self._extract is not None:
            raise ConfigError("ctx: a function needs the argument of a call; use it as a decorator, or give tags")
        return _enter(self._static)

    def __exit__(self, *exc: object) -> None:
        _leave()

    def _of(self, args: tuple[Any, ...]) -> Tags:
        if self._extract is None or is_compiling():
            return self._static
        try:
            return dict(self._extract(args[0]))
        except Exception:  # noqa: BLE001 - it runs in the model's forward
            return NO_TAGS


def _driven(items: Generator[Any, Any, Any], tags: Tags) -> Generator[Any, Any, Any]:
    """Drive ``items`` with ``tags`` set while the generator runs, but not while its consumer runs."""
    resume: Callable[[], Any] = lambda: next(items)  # noqa: E731
    while True:
        _enter(tags)
        try:
            item = resume()
        except StopIteration as end:
            return end.value
        finally:
            _leave()
        try:
            sent = yield item
            resume = functools.partial(items.send, sent)
        except GeneratorExit:
            items.close()
            raise
        except BaseException as error:  # noqa: BLE001 - thrown in by the consumer
            resume = functools.partial(items.throw, error)


async def _driven_later(items: AsyncGenerator[Any, Any], tags: Tags) -> AsyncGenerator[Any, Any]:
    """Drive an async generator as :func:`_driven` does; the tags also apply while ``items`` awaits."""
    resume: Callable[[], Any] = lambda: anext(items)  # noqa: E731
    while True:
        _enter(tags)
        try:
            item = await resume()
        except StopAsyncIteration:
            return
        finally:
            _leave()
        try:
            sent = yield item
            resume = functools.partial(items.asend, sent)
        except GeneratorExit:
            await items.aclose()
            raise
        except BaseException as error:  # noqa: BLE001 - thrown in by the consumer
            resume = functools.partial(items.athrow, error)


def _enter(tags: Tags) -> Tags:
    if is_compiling():
        return NO_TAGS
    before = TAGS.get()
    _outer.set((*_outer.get(), before))
    inside = merged(before, tags)
    TAGS.set(inside)
    return inside


def _leave() -> None:
    if is_compiling():
        return
    outer = _outer.get()
    TAGS.set(outer[-1] if outer else NO_TAGS)
    _outer.set(outer[:-1])
