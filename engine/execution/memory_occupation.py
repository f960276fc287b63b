"""MemoryOccupation: temporarily returns the memory of one rank's weights and KV cache to the system.

Storages are resized in place, so that every view of a storage stays valid.
"""

import ctypes
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tapscope.core.gc_control import trim_heap
from tapscope.engine.kv_cache.kv_cache import KVCache

TAGS = ("weights", "kv_cache")
"""Releasable parts, by their names in SGLang."""


class MemoryOccupation:
    """Temporary release of memory: weights move to a file, or from a GPU to host memory; the KV cache is lost."""

    def __init__(self, model: nn.Module, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._sizes: dict[str, list[tuple[Any, int]]] = {}
        self._copies: list[Tensor] = []
        self._file: Any = None

    @property
    def released(self) -> tuple[str, ...]:
        """Tags of the released parts."""
        return tuple(self._sizes)

    def release(self, tags: Sequence[str]) -> int:
        """Release the memory of the parts in ``tags``; return the bytes freed. Raises OSError without disk space."""
        count = 0
        for tag in tags:
            if tag in self._sizes:
                continue
            storages = self._storages(tag)
            if tag == "weights":
                self._save(storages)
            self._sizes[tag] = [(storage, storage.nbytes()) for storage in storages]
            count += sum(size for _, size in self._sizes[tag])
            for storage in storages:
                storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        trim_heap()
        return count

    def resume(self, tags: Sequence[str]) -> None:
        """Reallocate the memory of released parts: weights with their values, the KV cache with zeros.

        Raises RuntimeError if memory does not suffice; the part then stays released.
        """
        for tag in tags:
            for storage, size in self._sizes.get(tag, []):
                storage.resize_(size)
            sizes = self._sizes.pop(tag, [])
            if tag == "weights":
                self._restore([storage for storage, _ in sizes])
            else:
                for storage, _ in sizes:
                    _bytes(storage).zero_()

    def close(self) -> None:
        """Remove the saved copy of the weights."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _storages(self, tag: str) -> list[Any]:
        tensors: Iterable[Tensor] = self._cache.tensors()
        if tag == "weights":
            tensors = (*self._model.parameters(), *self._model.buffers())
        storages = (tensor.untyped_storage() for tensor in tensors if tensor.numel())
        # A storage that NumPy views is not resizable; tensors may share a storage.
        return list({each.data_ptr(): each for each in storages if each.resizable()}.values())

    def _save(self, storages: Sequence[Any]) -> None:
        if storages[0].device.type == "cuda":
            self._copies = [_bytes(storage).cpu() for storage in storages]
            return
        self._file = tempfile.TemporaryFile(prefix="tapscope-weights-")  # noqa: SIM115  (open until resumed)
        try:
            for storage in storages:
                self._file.write(_buffer(storage))
            self._file.seek(0)
        except OSError:
            self.close()
            raise

    def _restore(self, storages: Sequence[Any]) -> None:
        copies, self._copies = self._copies, []
        for storage, copy in zip(storages, copies, strict=False):
            _bytes(storage).copy_(copy)
        if self._file is not None:
            with self._file as file:
                for storage in storages:
                    file.readinto(_buffer(storage))
            self._file = None


def _bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _buffer(storage: Any) -> memoryview:
    """Return the bytes of a storage on the host; Tensor.numpy() would make the storage non-resizable."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))
