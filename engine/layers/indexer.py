"""Indexer of DeepSeek sparse attention (DSA), arXiv:2512.02556 section 2, which selects the keys that a row attends to.

The score of a key is the sum over index heads of weight * relu(query . key), in float32. A row attends to the ``top_k``
keys with the highest scores up to its own position. Index keys have a cache entry of their own, separate from the
latents.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.cache_layout import IndexKeys
from tapscope.engine.kv_cache.step_cache import MAX_ELEMENTS, Segment, StepCache
from tapscope.engine.layers.fused import kernels, may_run_on
from tapscope.engine.layers.linear import ReplicatedLinear
from tapscope.engine.layers.norm import LayerNorm
from tapscope.engine.layers.paged_attention import why_not_paged
from tapscope.engine.layers.probe import ANGLE_INPUTS, WHOLE, TapProbe, is_watched
from tapscope.engine.layers.rope import rotate, rotate_to_halves

_NORM_EPS = 1e-6  # as in transformers, independent of rms_norm_eps


class SingleChoices(NamedTuple):
    """Keys selected for requests with one row, by :mod:`tapscope.kernels.triton.indexer`."""

    ids: Tensor
    """Positions [requests, top_k] int64, ascending, padded with -1."""
    slots: Tensor
    """Slots of the positions [requests, top_k] int32, with page axes flattened; undefined past ``counts``."""
    counts: Tensor
    """Number of selected keys [requests] int32."""


class Chosen(NamedTuple):
    """Keys that the rows of a step attend to."""

    singles: SingleChoices | None
    """Keys of the leading requests with one row; None if ``others`` covers these requests too."""
    others: list[Tensor | None]
    """Positions [rows, top_k] for each other request, ascending, padded with -1; None means all earlier positions."""

    @property
    def is_all(self) -> bool:
        """Whether every row attends to all earlier positions."""
        return self.singles is None and all(chosen is None for chosen in self.others)


def index_scores(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Score keys [features, length] for queries [rows, heads, features] and weights [rows, heads] -> [rows, length]."""
    if has_torch_function((query,)):
        return handle_torch_function(index_scores, (query,), query, keys, weights)
    return (torch.relu(query @ keys) * weights.unsqueeze(-1)).sum(1)


class Indexer(nn.Module):
    """transformers' DeepseekV32Indexer and GlmMoeDsaIndexer, replicated; ``tap[topk_indices]`` is a site."""

    tap_ports = ("in",)

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.index is not None, "an indexer needs ModelConfig.index"
        assert config.mla is not None, "an indexer needs ModelConfig.mla"
        assert config.mla.q_lora_rank is not None, "it reads the queries' latent"
        self.layer, self.index, index = layer, config.index, config.index
        self.entry = IndexKeys(layer)
        """Address of the index keys in the cache."""
        self.rope_dim = config.mla.rope_dim
        self.wq_b = ReplicatedLinear(config.mla.q_lora_rank, index.num_heads * index.head_dim, False, dtype)
        self.wk = ReplicatedLinear(config.hidden_size, index.head_dim, False, dtype)
        self.k_norm = LayerNorm(index.head_dim, _NORM_EPS, dtype)
        self.weights_proj = ReplicatedLinear(config.hidden_size, index.num_heads, False, torch.float32)
        self.is_batch_invariant = False
        """Whether a row's selection depends only on its own keys: equal scores are resolved to the first positions, and
        keys are selected even if all fit into ``top_k``."""
        self.topk_indices = TapProbe("topk_indices", "t k # tp:replicated")
        self.tap_dims = {"in[hidden_states]": WHOLE, "in[q_resid]": WHOLE} | ANGLE_INPUTS

    def keys(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Compute index keys [tokens, index features] of [tokens, hidden]; cache them before :meth:`forward` runs."""
        return self._rotated(self.k_norm(self.wk(hidden_states)).unsqueeze(1), position_embeddings).squeeze(1)

    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: StepCache,
    ) -> Chosen:
        """Select the keys for each request's rows; ``q_resid`` [tokens, q_lora_rank] is the normalized query latent."""
        index = self.index
        query = self.wq_b(q_resid).view(len(q_resid), index.num_heads, index.head_dim)
        query, weights = self._rotated(query, position_embeddings), self.weights_proj(hidden_states.float())
        weights = weights * (index.num_heads * index.head_dim) ** -0.5
        singles = self._choose_singles(query, weights, past_key_values)
        others: list[Tensor | None] = []
        segments = past_key_values.segments[0 if singles is None else past_key_values.num_single :]
        for segment in segments:
            rows = slice(segment.slot, segment.slot + segment.count)
            is_all = segment.length <= index.top_k and not self.is_batch_invariant
            others.append(None if is_all else self._choose(query[rows], weights[rows], segment, past_key_values))
        if is_watched(self.topk_indices):
            ids = [self._ids(*each, past_key_values) for each in zip(others, segments, strict=True)]
            self.topk_indices(torch.cat(ids if singles is None else [singles.ids, *ids]))
        return Chosen(singles, others)

    def _choose_singles(self, query: Tensor, weights: Tensor, cache: StepCache) -> SingleChoices | None:
        """Select keys of the one-row requests in a kernel; None if no kernel applies or ``top_k`` covers all keys."""
        pools, count = cache.pools(self.entry), cache.num_single
        if self.is_batch_invariant or cache.longest_single <= self.index.top_k or not may_run_on(query.device):
            return None
        if pools is None or why_not_paged(cache.cache) is not None:
            return None
        fused = kernels(query.device)
        assert fused is not None, "a cache whose pages kernels can read"
        table, lengths = cache.page_table_of(self.entry)[:count], cache.lengths[:count]
        keys = pools[0]
        scores = fused.indexer.index_scores(query[:count].to(keys.dtype), keys, weights[:count], table, lengths)
        return SingleChoices(*fused.indexer.choose_keys(scores, table, lengths, keys.shape[1], self.index.top_k))

    def _choose(self, query: Tensor, weights: Tensor, segment: Segment, cache: StepCache) -> Tensor:
        """Select positions [rows, top_k] of one request for queries [rows, heads, features], weights [rows, heads]."""
        query, keys = query.float(), cache.read(self.entry, segment)[0][:, 0].float().T
        block, selected = max(1, MAX_ELEMENTS // (query.shape[1] * keys.shape[1])), []
        for first in range(0, len(query), block):
            rows = slice(first, first + block)
            scores = index_scores(query[rows], keys, weights[rows])
            own = segment.position + first + torch.arange(len(scores), device=keys.device).unsqueeze(1)
            scores = scores.masked_fill(torch.arange(keys.shape[1], device=keys.device) > own, -torch.inf)
            if self.is_batch_invariant:
                missing = max(0, self.index.top_k - scores.shape[1])
                scores = functional.pad(scores, (0, missing), value=-torch.inf)
                best, ids = (part[:, : self.index.top_k] for part in scores.sort(dim=-1, descending=True, stable=True))
            else:
                best, ids = scores.topk(self.index.top_k, dim=-1, sorted=False)
            last = torch.iinfo(ids.dtype).max
            ids = ids.masked_fill(best == -torch.inf, last).sort(-1).values
            selected.append(ids.masked_fill(ids == last, -1))
        return torch.cat(selected)

    def _ids(self, chosen: Tensor | None, segment: Segment, cache: StepCache) -> Tensor:
        """Return ``chosen`` with "all positions" made explicit; lengths are read on the device, as in a CUDA graph."""
        if chosen is not None:
            return chosen
        device = self.weights_proj.weight.device
        first = cache.lengths[segment.index] - segment.count
        own = first + torch.arange(segment.count, device=device).unsqueeze(1)
        ids = torch.arange(self.index.top_k, device=device).expand(segment.count, -1)
        return ids.masked_fill(ids > own, -1)

    def _rotated(self, states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Return [tokens, heads, index features] with the first ``rope_dim`` features rotated."""
        first, rest = states[..., : self.rope_dim], states[..., self.rope_dim :]
        rotation = rotate_to_halves if self.index.is_interleaved else rotate
        return torch.cat((rotation(first, *position_embeddings), rest), dim=-1)
