"""Access: the way that calls take to one LLM's engine: the caller's thread, asyncio's, or DP replicas."""

import weakref
from typing import TYPE_CHECKING

from tapscope.core.errors import UsageError
from tapscope.core.observe import ObserverFactory
from tapscope.engine.engine import Engine
from tapscope.engine.offline.sync_runner import Driver
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tapscope.engine.offline.async_runner import Concurrent
    from tapscope.engine.offline.replica_group import Fleet


class Access:
    """One way at a time; what servers need is imported only where calls overlap."""

    def __init__(self, config: EngineConfig, observer: ObserverFactory | None, tokenizer: Tokenizer | None) -> None:
        """Load; raises what :class:`Engine` does."""
        self._tokenizer = tokenizer
        self._fleet: Fleet | None = None
        if config.dp > 1:
            from tapscope.engine.offline import replica_group

            self._fleet = replica_group.Fleet(config, observer, tokenizer)
            weakref.finalize(self, self._fleet.close)
            self.engine = self._fleet.engine
        else:
            self.engine = Engine(config, observer)
        self._driver = Driver(self.engine, tokenizer)
        self._concurrent: Concurrent | None = None

    @property
    def has_work(self) -> bool:
        """Whether a request is live."""
        return self._driver.has_work if self._fleet is None else self._fleet.concurrent.num_live > 0

    def overlapping(self) -> "Concurrent":
        """For async calls; raises UsageError while others are live."""
        if self._fleet is not None:
            return self._fleet.concurrent
        from tapscope.engine.offline.async_runner import Concurrent

        if self._concurrent is None:
            if self.has_work:
                raise UsageError(
                    "async calls cannot start while submitted requests are live; step() until they are done"
                )
            self._concurrent = Concurrent(self.engine, self._tokenizer)
        return self._concurrent

    def whole(self, what: str) -> "Driver | Fleet":
        """For calls that end with their requests; raises UsageError while one engine has submitted requests."""
        if self._fleet is not None:
            return self._fleet
        driver = self.stepped(what)
        if driver.has_work:
            raise UsageError(f"{what} cannot run while submitted requests are live; step() until they are done")
        return driver

    def stepped(self, what: str) -> Driver:
        """For the caller's own steps; raises UsageError while async calls are live, and for replicas."""
        if self._fleet is not None:
            dp = self.engine.config.dp
            raise UsageError(f"{what} steps one engine, and dp={dp}; use generate, chat, stream, agenerate or astream")
        if self._concurrent is not None:
            if self._concurrent.num_live:
                raise UsageError(f"{what} cannot run while async calls are live; await them first")
            self._concurrent.close()
            self._concurrent = None
        return self._driver

    def close(self) -> None:
        """What is live fails; safe to call twice."""
        if self._fleet is not None:
            self._fleet.close()
        if self._concurrent is not None:
            self._concurrent.close()
        self.engine.close()
