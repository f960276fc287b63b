"""PeerMemory: device memory of each rank, mapped into the other ranks through CUDA IPC.

All ranks are on one machine with GPUs that can read each other's memory. PyTorch's symmetric memory would also work,
but requires a process group registered with torch.distributed; this module needs only a few driver calls.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed
from torch import Tensor

distributed: Any = torch.distributed
_LAZY_ENABLE_PEER_ACCESS = 1
_OK, _FAILED = b"+", b"-"


class PeerMemoryError(Exception):
    """A rank cannot share its memory or map a peer's; the message names the rank and the reason."""


class _Handle(ctypes.Structure):
    """ctypes equivalent of CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class PeerMemory:
    """``nbytes`` of zero-initialized device memory per rank, mapped into all ranks.

    The memory is freed with the object; peers may use it until they are closed.
    """

    def __init__(self, store: Any, rank: int, size: int, nbytes: int, device: torch.device) -> None:
        """Allocate and map the memory; collective over all ranks, which exchange handles through ``store``.

        Raises PeerMemoryError on all ranks if any rank cannot allocate, or map all peers' memory.
        """
        self._own = 0
        self._mapped: dict[int, int] = {}
        self._store, self._rank, self._size = distributed.PrefixStore("peer-memory/", store), rank, size
        with torch.cuda.device(device):
            handles = self._exchange("handle", lambda: self._allocate(nbytes))
            try:
                self._exchange("mapped", lambda: self._map(handles))
            except PeerMemoryError:
                self.close()
                raise
        addresses = [self._mapped.get(peer, self._own) for peer in range(size)]
        self.addresses: Tensor = torch.tensor(addresses, dtype=torch.int64, device=device)
        """[ranks] int64: address of each rank's memory in this process."""

    def _exchange(self, what: str, attempt: Callable[[], bytes]) -> list[bytes]:
        """Run ``attempt`` and return the results of all ranks; raise PeerMemoryError if it failed on any rank."""
        try:
            answer = _OK + attempt()
        except PeerMemoryError as error:
            answer = _FAILED + str(error).encode()
        self._store.set(f"{what}/{self._rank}", answer)
        answers = [self._store.get(f"{what}/{peer}") for peer in range(self._size)]
        for peer, answer in enumerate(answers):
            if answer.startswith(_FAILED):
                raise PeerMemoryError(f"rank {peer}: {answer[1:].decode()}")
        return [answer[1:] for answer in answers]

    def _allocate(self, nbytes: int) -> bytes:
        """Allocate this rank's memory and return its IPC handle."""
        address, handle = ctypes.c_uint64(), _Handle()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self._own = address.value
        _call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
        torch.cuda.synchronize()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def _map(self, handles: list[bytes]) -> bytes:
        for peer, content in enumerate(handles):
            if peer != self._rank:
                address = ctypes.c_uint64()
                handle = _Handle.from_buffer_copy(content)
                _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS))
                self._mapped[peer] = address.value
        return b""

    def close(self) -> None:
        """Unmap the peers' memory, which no kernel may be using. Idempotent."""
        while self._mapped:
            _, address = self._mapped.popitem()
            _driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))

    def __del__(self) -> None:
        own, self._own = self._own, 0
        if own:
            _driver().cuMemFree_v2(ctypes.c_uint64(own))


@cache
def _driver() -> Any:
    """Load the CUDA driver library. Raises PeerMemoryError if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PeerMemoryError(f"no CUDA driver: {error}") from None


def _call(name: str, *arguments: Any) -> None:
    """Call a CUDA driver function. Raises PeerMemoryError if it fails."""
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        reason = text.value.decode() if text.value else f"error {code}"
        raise PeerMemoryError(f"{name}: {reason}")
