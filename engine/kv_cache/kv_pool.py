"""KVPool: device memory of the keys, or of the values, of all layers of the KV cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tapscope.engine.kv_cache.kv_format import KVFormat


class KVPool:
    """Pages of every layer, [layers, pages, page_size, kv_heads, dim], zero-initialized.

    Pages are stored in one dtype, and read and written in another (:class:`KVFormat`). FP8 values are gathered as
    bytes, which torch supports on every device, and decoded by a lookup table per layer. On a CPU this is three times
    as fast as conversion.
    """

    def __init__(self, shape: Sequence[int], kv_format: KVFormat, device: torch.device | str) -> None:
        self.kv_format = kv_format
        self.tensor = torch.zeros(*shape, dtype=kv_format.stored, device=device)
        self.layers = tuple(self.tensor)
        """Stored pages of each layer, [pages, page_size, kv_heads, dim]."""
        self._is_plain, self._page_size, self._shape = kv_format.is_plain, shape[2], tuple(shape[3:])
        bits = self.tensor.view(torch.uint8) if kv_format.is_fp8 else self.tensor
        self._by_page = [_cut(layer, 1) for layer in bits]
        self._by_position = [_cut(layer, self._page_size) for layer in bits]
        self._gathered, self._indices, self._decoded = _Workspace(), _Workspace(), _Workspace()
        self._scales, self._tables = [1.0] * len(bits), [torch.empty(0)] * len(bits)
        if kv_format.is_fp8:
            self._tables = [kv_format.table(1.0, self.tensor.device)] * len(bits)

    @property
    def is_scaled(self) -> bool:
        """Whether any layer has a scale other than 1."""
        return any(scale != 1.0 for scale in self._scales)

    def scale(self, layer: int) -> float:
        """Return the scale of ``layer``: the decoded value of a stored 1."""
        return self._scales[layer]

    def set_scale(self, layer: int, scale: float) -> None:
        """Set the scale of ``layer`` for FP8 values; values stored before become invalid."""
        if self.kv_format.is_fp8 and scale != self._scales[layer]:
            self._scales[layer] = scale
            self._tables[layer] = self.kv_format.table(scale, self.tensor.device)

    def pages(self, layer: int, numbers: Tensor) -> Tensor:
        """Gather whole pages, [pages * page_size, kv_heads, dim]; valid until the next gather."""
        return self._read(self._by_page, layer, numbers, len(numbers) * self._page_size)

    def positions(self, layer: int, slots: Tensor) -> Tensor:
        """Gather the values at ``slots`` [n], [n, kv_heads, dim]; valid until the next gather."""
        return self._read(self._by_position, layer, slots, len(slots))

    def write(self, layer: int, slots: Tensor, values: Tensor) -> None:
        """Store ``values`` [n, kv_heads, dim] at ``slots`` [n]."""
        if not values.shape[-1]:  # MLA caches no values
            return
        encoded = self.kv_format.encode(values.flatten(1), self._scales[layer])
        rows = self._by_position[layer]
        rows.index_copy_(0, slots, encoded.view(torch.uint8) if self.kv_format.is_fp8 else encoded)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the values of every layer from slots ``sources`` [n] to ``targets`` [n]; the two may overlap."""
        if not self.tensor.shape[-1]:
            return
        for rows in self._by_position:
            rows.index_copy_(0, targets, rows.index_select(0, sources))

    def _read(self, layers: list[Tensor], layer: int, index: Tensor, count: int) -> Tensor:
        values = self._gathered.select(layers[layer], index)
        if not self._is_plain:
            values = self._decode(values, layer)
        return values.view(count, *self._shape)

    def _decode(self, stored: Tensor, layer: int) -> Tensor:
        if not self.kv_format.is_fp8:
            return self._decoded.converted(stored, self.kv_format.computed)
        return self._decoded.select(self._tables[layer], self._indices.converted(stored.view(-1), torch.int32))


def _cut(pages: Tensor, parts: int) -> Tensor:
    """View [pages, page_size, kv_heads, dim] as [pages * parts, rest]."""
    return pages.view(len(pages) * parts, pages[0].numel() // parts)


class _Workspace:
    """Reused result buffer on a CPU, where page faults of fresh memory cost more than the copy."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def select(self, rows: Tensor, index: Tensor) -> Tensor:
        """Return ``rows[index]`` of a tensor [n] or [n, width]."""
        width = rows.shape[1] if rows.ndim == 2 else 1
        if rows.device.type != "cpu" or width == 0:  # MLA caches no values
            return rows.index_select(0, index)
        room = self._reserve(len(index) * width, rows.dtype)
        return torch.index_select(rows, 0, index, out=room.view(len(index), width) if rows.ndim == 2 else room)

    def converted(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert ``values`` of any shape to ``dtype``; on a CPU into a buffer that the next call overwrites."""
        if values.device.type != "cpu":
            return values.to(dtype)
        return self._reserve(values.numel(), dtype).view(values.shape).copy_(values)

    def _reserve(self, size: int, dtype: torch.dtype) -> Tensor:
        if self._buffer.numel() < size or self._buffer.dtype != dtype:
            self._buffer = torch.empty(1 << max(0, size - 1).bit_length(), dtype=dtype)
        return self._buffer[:size]
