"""MemoryBudget: what the memory of one GPU is used for, measured before the KV cache takes the rest."""

import logging
from dataclasses import dataclass

from tapscope.core.errors import ConfigError

_log = logging.getLogger(__name__)
_SHARE_LEFT_FREE = 0.05
"""Of a GPU's memory: for an observer, fragments between tensors, and what the measured step does not contain."""


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Bytes of a draft model or head on one rank."""

    fixed: int
    """Weights, buffers and CUDA graphs."""
    page: int
    """A page of its KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes of one GPU."""

    total: int
    free: int
    """Before the KV cache and CUDA graphs exist, once a step was computed."""
    step: int
    """Of the largest step, while it runs."""
    graphs: int
    """Of all CUDA graphs, also those that are captured later."""
    draft: int = 0
    """Of a draft model or head: weights, buffers and CUDA graphs."""
    cache_share: float = 1.0
    """Part of the memory of KV caches that the target's takes; a draft's has as many pages."""

    @property
    def for_cache(self) -> int:
        """What the KV cache may take; negative where nothing is left."""
        left = self.free - self.step - self.graphs - self.draft - int(_SHARE_LEFT_FREE * self.total)
        return int(self.cache_share * left)

    def limit(self, asked: int, for_cache: int) -> int:
        """Bytes of a KV cache of at most ``asked``, where the rank with the least memory has ``for_cache``.

        Logs the budget, and whether it is the limit. Raises ConfigError if it leaves nothing.
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
