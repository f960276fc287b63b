"""AdapterSlots: which LoRA adapters are on the device, in the order of their last use."""

from collections import OrderedDict
from collections.abc import Iterable


class AdapterSlots:
    """A fixed number of slots. An adapter of a running request keeps its slot; others give theirs up when it is needed,
    the least recently used first.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[int, int] = OrderedDict()
        """Adapter id -> slot, the least recently used first."""
        self._loads: list[tuple[int, int]] = []
        self._in_use: frozenset[int] = frozenset()
        self._num_slots = num_slots

    @property
    def held(self) -> dict[int, int]:
        """Adapter id -> slot."""
        return dict(self._slots)

    def use(self, adapters: Iterable[int]) -> None:
        """Set the adapters of the running requests (0: none), which keep their slots."""
        self._in_use = frozenset(adapters) - {0}

    def fits(self, adapter: int) -> bool:
        """Whether a request with this adapter can run together with the running ones."""
        return adapter in self._in_use or len(self._in_use) < self._num_slots

    def slot_of(self, adapter: int) -> int:
        """The slot of an adapter in use, where it is placed before the next step; -1 for none (0)."""
        if not adapter:
            return -1
        if adapter not in self._slots:
            if not self._free:
                unused = next(other for other in self._slots if other not in self._in_use)
                self._free.append(self._slots.pop(unused))
            self._slots[adapter] = self._free.pop()
            self._loads.append((self._slots[adapter], adapter))
        self._slots.move_to_end(adapter)
        return self._slots[adapter]

    def take_loads(self) -> tuple[tuple[int, int], ...]:
        """(slot, adapter) of each adapter to place before the next step, once."""
        loads, self._loads = self._loads, []
        return tuple(loads)

    def drop(self, adapter: int) -> None:
        """Free the slot of an adapter that no live request uses any more."""
        if (slot := self._slots.pop(adapter, None)) is not None:
            self._free.append(slot)

    def reset(self) -> None:
        """Place every adapter again, because a planned step may not have been launched."""
        self._loads = [(slot, adapter) for adapter, slot in self._slots.items()]
