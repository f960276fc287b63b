"""AdapterRegistry: loaded LoRA adapters, which requests select by name. Rank 0 only."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tapscope.core.errors import UsageError
from tapscope.engine.requests.request import Request


@dataclass(slots=True)
class Adapter:
    """One loaded adapter."""

    number: int
    """Id of the adapter, from 1; ids are never reused."""
    name: str
    folder: str
    num_live: int = 0
    """Number of live requests that use the adapter."""
    is_unloaded: bool = False
    """Whether the adapter is unloaded for new requests."""

    def plain(self) -> dict[str, Any]:
        """Return name, path and number of live requests as JSON values, for a status page."""
        return {"name": self.name, "path": self.folder, "num_live": self.num_live}


class AdapterRegistry:
    """Loaded adapters by name. An unloaded adapter stays until the last live request that uses it has ended."""

    def __init__(self, *, is_enabled: bool) -> None:
        """``is_enabled``: whether the engine supports adapters."""
        self._is_enabled = is_enabled
        self._by_name: dict[str, Adapter] = {}
        self._by_number: dict[int, Adapter] = {}
        self._unused: list[int] = []
        self._num_made = 0

    def __iter__(self) -> Iterator[Adapter]:
        """Iterate over the adapters that requests can select, in loading order."""
        return iter(self._by_name.values())

    def require_new(self, name: str) -> None:
        """Raise UsageError unless adapters are enabled and ``name`` is valid and not taken."""
        self._require_enabled(f"adapter {name!r} cannot be loaded")
        if not isinstance(name, str) or not name:
            raise UsageError(f"invalid adapter name {name!r}: expected a string of at least one character")
        if name in self._by_name:
            raise UsageError(f"adapter {name!r} is loaded already; unload it first, or choose another name")

    def next_number(self) -> int:
        """Return a new adapter id for :meth:`add`."""
        self._num_made += 1
        return self._num_made

    def add(self, number: int, name: str, folder: str) -> None:
        """Register a loaded adapter."""
        self._by_name[name] = self._by_number[number] = Adapter(number, name, folder)

    def remove(self, name: str) -> Adapter:
        """Unregister an adapter, which live requests may keep using. Raises UsageError for an unknown name."""
        adapter = self._find(name, f"adapter {name!r} cannot be unloaded")
        del self._by_name[name]
        adapter.is_unloaded = True
        self._note_if_unused(adapter)
        return adapter

    def check(self, request: Request) -> None:
        """Raise UsageError if the request names an adapter that is not loaded."""
        if request.adapter:
            self._find(request.adapter, f"request {request.id!r} asks for adapter {request.adapter!r}")

    def acquire(self, request: Request) -> None:
        """Bind a request that passed :meth:`check` to its adapter and set its ``adapter_id``."""
        if request.adapter:
            adapter = self._by_name[request.adapter]
            adapter.num_live += 1
            request.adapter_id = adapter.number

    def release(self, request: Request) -> None:
        """Release the adapter of a request that has ended."""
        if request.adapter_id:
            adapter = self._by_number[request.adapter_id]
            adapter.num_live -= 1
            self._note_if_unused(adapter)

    def take_unused(self) -> list[int]:
        """Return the ids of unloaded adapters without live requests; each id is returned once."""
        unused, self._unused = self._unused, []
        return unused

    def _note_if_unused(self, adapter: Adapter) -> None:
        if adapter.is_unloaded and not adapter.num_live:
            del self._by_number[adapter.number]
            self._unused.append(adapter.number)

    def _find(self, name: str, what: str) -> Adapter:
        self._require_enabled(what)
        if not isinstance(name, str) or name not in self._by_name:
            raise UsageError(f"{what}: it is not loaded; loaded: {', '.join(self._by_name) or 'none'}")
        return self._by_name[name]

    def _require_enabled(self, what: str) -> None:
        if not self._is_enabled:
            raise UsageError(f"{what}: this engine serves no adapters; start it with lora_paths or enable_lora")
