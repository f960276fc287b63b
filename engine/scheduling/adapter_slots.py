"""AdapterSlots: the LoRA adapters resident on the device, in least-recently-used order."""

from collections import OrderedDict
from collections.abc import Iterable


class AdapterSlots:
    """Assignment of LoRA adapters to a fixed number of device slots.

    An adapter used by a running request is pinned to its slot. Unpinned adapters are evicted on demand, least recently
    used first.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[int, int] = OrderedDict()
        """Adapter id -> slot, least recently used first."""
        self._loads: list[tuple[int, int]] = []
        self._in_use: frozenset[int] = frozenset()
        self._num_slots = num_slots

    @property
    def held(self) -> dict[int, int]:
        """Resident adapters: adapter id -> slot."""
        return dict(self._slots)

    def use(self, adapters: Iterable[int]) -> None:
        """Pin the given adapters, those of the running requests, to their slots. Id 0 (no adapter) is ignored."""
        self._in_use = frozenset(adapters) - {0}

    def fits(self, adapter: int) -> bool:
        """Return whether a request with ``adapter`` can run together with the running requests."""
        return adapter in self._in_use or len(self._in_use) < self._num_slots

    def slot_of(self, adapter: int) -> int:
        """Return the slot of ``adapter``, or -1 if ``adapter`` is 0 (none).

        An adapter without a slot gets one, evicting the least recently used unpinned adapter if no slot is free. Its
        weights are loaded before the next step, see :meth:`take_loads`.
        """
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
        """Return the pending (slot, adapter) loads, to be executed before the next step, and clear them."""
        loads, self._loads = self._loads, []
        return tuple(loads)

    def drop(self, adapter: int) -> None:
        """Free the slot of an adapter that no live request uses anymore."""
        if (slot := self._slots.pop(adapter, None)) is not None:
            self._free.append(slot)

    def reset(self) -> None:
        """Queue a load of every resident adapter again, because a planned step may not have been launched."""
        self._loads = [(slot, adapter) for adapter, slot in self._slots.items()]
