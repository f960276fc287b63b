"""Memo: what the open step has met already."""

import itertools

from tapscope.kernels.native.summary import digest_of

SMALL = 16 * 1024
"""Reading so few bytes again is no dearer than asking whether they were seen."""


class DedupCache:
    """What the open step has met already, so that equal bytes are stored once and the same tensor is read fast.

    Only a hash of the bytes says that they are the same, never an address: what lies at an address seen before is
    hashed again, which is a part of the work, and only then taken for the same.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._by_address: dict[tuple[int, int, str], tuple[bytes, bytes]] = {}
        self.payloads: dict[tuple[bytes, int], int] = {}
        """(digest, bytes) -> number of the payload that holds them, always this one dict."""
        self.generation = 0
        """Payloads are shared within one."""

    def clear(self) -> None:
        """A new step: memory is used again for other values."""
        self.generation += 1
        self._by_address.clear()
        self.payloads.clear()

    def find(self, address: int, nbytes: int, dtype: str) -> tuple[bytes, bytes] | None:
        """(text, digest) of at least SMALL bytes, if they were seen there in this step and are still the same."""
        seen = self._by_address.get((address, nbytes, dtype))
        return seen if seen is not None and digest_of(address, nbytes) == seen[1] else None

    def remember(self, address: int, nbytes: int, dtype: str, text: bytes, digest: bytes) -> None:
        """These bytes lie there now."""
        self._by_address[address, nbytes, dtype] = text, digest

    def payload_number(self, digest: bytes, nbytes: int) -> int | None:
        """Number of the payload that holds these bytes."""
        return self.payloads.get((digest, nbytes))

    def next_number(self) -> int:
        """For a new payload."""
        return next(self._numbers)

    def add_payload(self, digest: bytes, nbytes: int, payload: int) -> None:
        """The payload is on its way: equal bytes need not be sent again in this step."""
        self.payloads[digest, nbytes] = payload
