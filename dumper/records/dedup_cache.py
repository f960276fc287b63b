"""DedupCache: deduplicate tensors and payloads within a step."""

import itertools

from tapscope.kernels.native.summary import digest_of

MIN_LOOKUP_BYTES = 16 * 1024
"""Minimum size in bytes for a lookup by address; reading fewer bytes again costs no more than the lookup."""


class DedupCache:
    """Tensors and payloads of the open step: equal bytes are stored once, statistics of known tensors are reused.

    Equality is established by the hash, never by the address: bytes at a known address are hashed again, which is
    necessary anyway, and their statistics are reused only if the hash is equal.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._by_address: dict[tuple[int, int, str], tuple[bytes, bytes]] = {}
        self.payloads: dict[tuple[bytes, int], int] = {}
        """(digest, size in bytes) -> number of the payload. Never replaced, because the native writer references it."""
        self.generation = 0
        """Number of the scope within which payloads are shared."""

    def clear(self) -> None:
        """Start a new generation for a new step, in which memory is reused for other values."""
        self.generation += 1
        self._by_address.clear()
        self.payloads.clear()

    def find(self, address: int, nbytes: int, dtype: str) -> tuple[bytes, bytes] | None:
        """Return (statistics, digest) of the tensor at ``address`` if it was seen in this step and is unchanged.

        Only useful for at least :data:`MIN_LOOKUP_BYTES`.
        """
        seen = self._by_address.get((address, nbytes, dtype))
        return seen if seen is not None and digest_of(address, nbytes) == seen[1] else None

    def remember(self, address: int, nbytes: int, dtype: str, text: bytes, digest: bytes) -> None:
        """Remember the statistics and digest of the tensor at ``address``."""
        self._by_address[address, nbytes, dtype] = text, digest

    def payload_number(self, digest: bytes, nbytes: int) -> int | None:
        """Return the number of the payload with these bytes in this step, or None."""
        return self.payloads.get((digest, nbytes))

    def next_number(self) -> int:
        """Return the number for a new payload."""
        return next(self._numbers)

    def add_payload(self, digest: bytes, nbytes: int, payload: int) -> None:
        """Register a queued payload, so that equal bytes are not sent again in this step."""
        self.payloads[digest, nbytes] = payload
