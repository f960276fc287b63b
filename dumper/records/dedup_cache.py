"""DedupCache: tensors and payloads seen in the open step."""

import itertools

from tapscope.kernels.native.summary import digest_of

MIN_LOOKUP_BYTES = 16 * 1024
"""Reading so few bytes again costs no more than looking them up."""


class DedupCache:
    """Tensors and payloads of the open step: equal bytes are stored once, and a tensor seen before is read quickly.

    Only a hash shows that bytes are the same, never an address: bytes at an address seen before are hashed again, which
    is part of the work anyway, and reused only if the hash is equal.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._by_address: dict[tuple[int, int, str], tuple[bytes, bytes]] = {}
        self.payloads: dict[tuple[bytes, int], int] = {}
        """(digest, bytes) -> number of the payload that holds them. Always the same dict: the native writer holds
        it."""
        self.generation = 0
        """Payloads are shared within one generation."""

    def clear(self) -> None:
        """A new step: memory is reused for other values."""
        self.generation += 1
        self._by_address.clear()
        self.payloads.clear()

    def find(self, address: int, nbytes: int, dtype: str) -> tuple[bytes, bytes] | None:
        """(statistics, digest) of at least MIN_LOOKUP_BYTES, if they were seen there in this step and are unchanged."""
        seen = self._by_address.get((address, nbytes, dtype))
        return seen if seen is not None and digest_of(address, nbytes) == seen[1] else None

    def remember(self, address: int, nbytes: int, dtype: str, text: bytes, digest: bytes) -> None:
        """Remember the bytes at this address."""
        self._by_address[address, nbytes, dtype] = text, digest

    def payload_number(self, digest: bytes, nbytes: int) -> int | None:
        """Number of the payload that holds these bytes."""
        return self.payloads.get((digest, nbytes))

    def next_number(self) -> int:
        """The number of a new payload."""
        return next(self._numbers)

    def add_payload(self, digest: bytes, nbytes: int, payload: int) -> None:
        """The payload was queued: equal bytes need not be sent again in this step."""
        self.payloads[digest, nbytes] = payload
