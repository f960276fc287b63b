"""Memo: what the open step has met already."""

import itertools
from typing import NamedTuple

from tapscope.kernels.native.summary import digest_of

_SMALL = 16 * 1024


class Known(NamedTuple):
    """Bytes that this step has met."""

    digest: bytes
    nbytes: int
    payload: int | None
    """Number of the payload that holds them; None when only their statistics were kept."""


class Memo:
    """What the open step has met already, so that equal bytes are stored once and the same tensor is read fast.

    Only a hash of the bytes says that they are the same, never an address: what lies at an address seen before is hashed
    again, which is half of the work, and only then taken for the same.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._places: dict[tuple[int, int, str], tuple[bytes, bytes]] = {}
        self._payloads: dict[tuple[bytes, int], int] = {}
        self.generation = 0
        """Payloads are shared within one."""

    def forget(self) -> None:
        """A new step: memory is used again for other values."""
        self.generation += 1
        self._places.clear()
        self._payloads.clear()

    def recall(self, address: int, nbytes: int, dtype: str) -> tuple[bytes, bytes] | None:
        """(digest, text) of the bytes there, if they were seen there in this step and are still the same."""
        if nbytes < _SMALL:
            return None  # reading it again is no dearer than asking
        seen = self._places.get((address, nbytes, dtype))
        return seen if seen is not None and digest_of(address, nbytes) == seen[0] else None

    def note(self, address: int, nbytes: int, dtype: str, digest: bytes, text: bytes) -> None:
        """These bytes lie there now."""
        if nbytes >= _SMALL:
            self._places[address, nbytes, dtype] = digest, text

    def payload(self, digest: bytes, nbytes: int) -> int | None:
        """Number of the payload that holds these bytes."""
        return self._payloads.get((digest, nbytes))

    def number(self) -> int:
        """For a new payload."""
        return next(self._numbers)

    def sent(self, known: Known) -> None:
        """Its payload is on its way: equal bytes need not be sent again in this step."""
        if known.payload is not None:
            self._payloads[known.digest, known.nbytes] = known.payload
