"""AdapterControl: load and unload LoRA adapters on all ranks of a running engine."""

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
    """Loaded adapters of an engine. An unloaded adapter stays on the ranks until the last request that uses it ends."""

    def __init__(self, config: EngineConfig, ranks: RankGroup, scheduler: Scheduler) -> None:
        self._ranks, self._scheduler = ranks, scheduler
        self._registry = AdapterRegistry(is_enabled=config.has_lora)

    def __iter__(self) -> Iterator[Adapter]:
        """Iterate over the adapters that requests can select, in loading order."""
        return iter(self._registry)

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter in PEFT's format on every rank, under the name that requests select.

        Raises UsageError if ``name`` is taken or the engine does not support adapters. Raises CheckpointError if the
        adapter is missing or malformed, its LoRA rank is too large, or it targets unsupported modules.
        """
        self._ranks.require_usable()
        self._registry.require_new(name)
        number, path = self._registry.next_number(), str(folder.absolute())
        try:
            self._change(number, path)
        except CheckpointError as error:
            self._drop(number)  # on the ranks that have loaded the adapter
            raise CheckpointError(f"adapter {name!r}: {error}") from None
        self._registry.add(number, name, path)

    def unload(self, name: str) -> int:
        """Unload an adapter for new requests; return the number of live requests, which finish with the adapter.

        Raises UsageError if no adapter of this name is loaded.
        """
        self._ranks.require_usable()
        num_live = self._registry.remove(name).num_live
        self._drop_unused()
        return num_live

    def check(self, request: Request) -> None:
        """Raise UsageError if the request names an adapter that is not loaded."""
        self._registry.check(request)

    def acquire(self, request: Request) -> None:
        """Bind a request that passed :meth:`check` to its adapter and set its ``adapter_id``."""
        self._registry.acquire(request)

    def release(self, request: Request) -> None:
        """Release the adapter of a request that has ended."""
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
