"""MemoryBudget: use of one GPU's memory, measured before the KV cache takes the rest."""

import logging
from dataclasses import dataclass

from tapscope.core.errors import ConfigError

_log = logging.getLogger(__name__)
_SHARE_LEFT_FREE = 0.05
"""Share of a GPU's memory left free: for an observer, fragmentation, and allocations missing from the measured step."""


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Bytes of a draft model or head on one rank."""

    fixed: int
    """Weights, buffers and CUDA graphs."""
    page: int
    """One page of the draft's KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory budget of one GPU, in bytes."""

    total: int
    free: int
    """Free before the KV cache and CUDA graphs exist, after a first step."""
    step: int
    """Peak memory of the largest step."""
    graphs: int
    """All CUDA graphs, including those captured later."""
    draft: int = 0
    """Draft model or head: weights, buffers and CUDA graphs."""
    cache_share: float = 1.0
    """The target's share of the memory of KV caches; the draft's cache has as many pages."""

    @property
    def for_cache(self) -> int:
        """Bytes available to the KV cache; negative if the memory does not suffice."""
        left = self.free - self.step - self.graphs - self.draft - int(_SHARE_LEFT_FREE * self.total)
        return int(self.cache_share * left)

    def limit(self, asked: int, for_cache: int) -> int:
        """Return the KV cache size in bytes: ``asked``, but at most ``for_cache``.

        ``for_cache``: bytes available on the rank with the least memory. Logs the budget, and a warning if it limits
        the size. Raises ConfigError if no memory is left.
        """
        used, left = self.total - self.free, int(_SHARE_LEFT_FREE * self.total)
        parts = {"weights and libraries": used, "the largest step": self.step, "CUDA graphs": self.graphs}
        parts |= {"the draft": self.draft} if self.draft else {}
        parts |= {"left free": left, "at most for the KV cache": for_cache}
        listed = ", ".join(f"{size / 2**30:.2f} GiB {what}" for what, size in parts.items())
        _log.info("GPU memory of %.2f GiB: %s", self.total / 2**30, listed)
        if for_cache <= 0:
            raise ConfigError(
                f"no memory is left for the KV cache; of {self.total / 2**30:.2f} GiB: {listed}; lower "
                "max_num_batched_tokens or max_num_seqs, or use more ranks (tp)"
            )
        if asked > for_cache:
            _log.warning(
                "kv_cache_memory_bytes=%d is more than the GPU has left; the KV cache takes %d bytes",
                asked, for_cache,
            )  # fmt: skip
        return min(asked, for_cache)
