"""AdapterRegistry: the LoRA adapters that requests may name. Rank 0 only."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tapscope.core.errors import UsageError
from tapscope.engine.requests.request import Request


@dataclass(slots=True)
class Adapter:
    """One loaded adapter."""

    number: int
    """Its id: 1 and up, never used again."""
    name: str
    folder: str
    num_live: int = 0
    """Live requests that use it."""
    is_unloaded: bool = False
    """Whether new requests can no longer name it."""

    def plain(self) -> dict[str, Any]:
        """Facts for a status page."""
        return {"name": self.name, "path": self.folder, "num_live": self.num_live}


class AdapterRegistry:
    """Loaded adapters by name. One that is unloaded while requests use it is dropped with the last of them."""

    def __init__(self, *, is_enabled: bool) -> None:
        """``is_enabled``: whether the engine serves adapters."""
        self._is_enabled = is_enabled
        self._by_name: dict[str, Adapter] = {}
        self._by_number: dict[int, Adapter] = {}
        self._unused: list[int] = []
        self._num_made = 0

    def __iter__(self) -> Iterator[Adapter]:
        """Adapters that requests may name, in the order of loading."""
        return iter(self._by_name.values())

    def require_new(self, name: str) -> None:
        """Raise UsageError unless an adapter of this name can be loaded."""
        self._require_enabled(f"adapter {name!r} cannot be loaded")
        if not isinstance(name, str) or not name:
            raise UsageError(f"invalid adapter name {name!r}: expected a string of at least one character")
        if name in self._by_name:
            raise UsageError(f"adapter {name!r} is loaded already; unload it first, or choose another name")

    def next_number(self) -> int:
        """An id for :meth:`add`."""
        self._num_made += 1
        return self._num_made

    def add(self, number: int, name: str, folder: str) -> None:
        """Register a loaded adapter."""
        self._by_name[name] = self._by_number[number] = Adapter(number, name, folder)

    def remove(self, name: str) -> Adapter:
        """Unregister the adapter, which live requests may still use. Raises UsageError for an unknown name."""
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
        """Bind a request that passed :meth:`check` to the adapter that it names."""
        if request.adapter:
            adapter = self._by_name[request.adapter]
            adapter.num_live += 1
            request.adapter_id = adapter.number

    def release(self, request: Request) -> None:
        """The request has ended."""
        if request.adapter_id:
            adapter = self._by_number[request.adapter_id]
            adapter.num_live -= 1
            self._note_if_unused(adapter)

    def take_unused(self) -> list[int]:
        """Ids of the adapters that nothing uses any more, once."""
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
