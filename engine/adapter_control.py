"""AdapterControl: LoRA adapters that requests may name, loaded and unloaded on all ranks of a running engine."""

from collections.abc import Iterator
from pathlib import Path

from tapscope.core.errors import CheckpointError
from tapscope.core.wire import Message
from tapscope.engine.execution.rank_group import RankGroup
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.requests.adapters import Adapter, AdapterRegistry
from tapscope.engine.requests.request import Request
from tapscope.engine.scheduling.scheduler import Scheduler


class AdapterControl:
    """An adapter leaves the ranks with the last request that uses it, and may be unloaded for new ones before."""

    def __init__(self, config: EngineConfig, ranks: RankGroup, scheduler: Scheduler) -> None:
        self._ranks, self._scheduler = ranks, scheduler
        self._registry = AdapterRegistry(is_enabled=config.has_lora)

    def __iter__(self) -> Iterator[Adapter]:
        """Adapters that requests may name, in the order of loading."""
        return iter(self._registry)

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter in PEFT's format on every rank, for requests that name it.

        Raises UsageError for a name that is taken and in an engine without adapters, CheckpointError for an adapter
        that is missing, malformed, of too large a rank, or of modules that cannot be adapted.
        """
        self._ranks.require_usable()
        self._registry.require_new(name)
        number, path = self._registry.next_number(), str(folder.absolute())
        try:
            self._change(number, path)
        except CheckpointError as error:
            self._drop(number)  # of the ranks that could load it
            raise CheckpointError(f"adapter {name!r}: {error}") from None
        self._registry.add(number, name, path)

    def unload(self, name: str) -> int:
        """Unload an adapter: new requests can no longer name it, and live ones that use it finish with it.

        Returns the number of these. Raises UsageError when no adapter of this name is loaded.
        """
        self._ranks.require_usable()
        num_live = self._registry.remove(name).num_live
        self._drop_unused()
        return num_live

    def check(self, request: Request) -> None:
        """Raise UsageError if the request names an adapter that is not loaded."""
        self._registry.check(request)

    def acquire(self, request: Request) -> None:
        """Bind a request that passed :meth:`check` to the adapter that it names."""
        self._registry.acquire(request)

    def release(self, request: Request) -> None:
        """The request has ended."""
        self._registry.release(request)
        self._drop_unused()

    def _drop_unused(self) -> None:
        for number in self._registry.take_unused():
            self._drop(number)

    def _drop(self, number: int) -> None:
        self._scheduler.adapter_slots.drop(number)
        self._change(number, None)

    def _change(self, number: int, folder: str | None) -> None:
        self._ranks.run_command(Message("adapter", {"number": number, "folder": folder}), CheckpointError)
