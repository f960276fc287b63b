"""Multi-head latent attention (MLA), arXiv:2405.04434 section 2.1: the cache stores one latent per position.

A latent is [kv_lora_rank + rope] wide: the compressed KV, which ``kv_b_proj`` projects to every head's key and value,
and the rotated part of the key, which all heads share. Latents are replicated on every rank. Attention has two forms:

* *expanded*: ``kv_b_proj`` projects the latents of all positions to keys and values; fewest operations for many rows.
* *absorbed*: ``kv_b_proj`` is applied to the query and, after attention over the latents, to the output (appendix C,
  "absorbed" matrices); a decode row then reads only latents.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from tapscope.engine.hf_config.mla_config import MlaConfig
from tapscope.engine.kv_cache.step_cache import MAX_ELEMENTS, Segment, StepCache
from tapscope.engine.layers.fused import linear
from tapscope.engine.layers.indexer import Chosen
from tapscope.engine.layers.paged_attention import AttentionSpec, attend, attend_segment, attend_slots


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention of one layer in one step; queries are [tokens, heads, nope + rope], already rotated."""

    layer: int
    mla: MlaConfig
    scale: float
    weight: Tensor
    """``kv_b_proj`` of this rank's heads, [heads * (nope + value), rank]."""

    def absorbed(self, query: Tensor, cache: StepCache) -> Tensor:
        """Attend to the cached latents with all rows -> [tokens, heads, value]."""
        return self.from_latent(attend(self.to_latent(query), self.layer, cache, self._latent_spec))

    def expanded(self, query: Tensor, kv: Tensor, cache: StepCache) -> Tensor:
        """Attend to expanded keys and values with all rows -> [tokens, heads, value].

        ``kv`` [tokens, heads * (nope + value)] is the projection of the step's rows.
        """
        return torch.cat([self._expanded_one(query, kv, cache, segment) for segment in cache.segments])

    def mixed(self, query: Tensor, kv: Tensor, cache: StepCache) -> Tensor:
        """Attend in the absorbed form for requests with one row, and in the expanded form for the others."""
        outputs = [
            self._expanded_one(query, kv, cache, s) if s.count > 1 else self._absorbed_one(query, cache, s)
            for s in cache.segments
        ]
        return torch.cat(outputs)

    def sparse(self, query: Tensor, kv: Tensor | None, cache: StepCache, chosen: Chosen) -> Tensor:
        """Attend with each request's rows to its ``chosen`` positions; as :meth:`mixed` if these are all positions."""
        outputs, segments = [], cache.segments
        if (singles := chosen.singles) is not None:
            count, segments = len(singles.counts), segments[len(singles.counts) :]
            slots = singles.slots, singles.counts
            mixtures = attend_slots(self.to_latent(query[:count]), self.layer, cache, *slots, self._latent_spec)
            outputs.append(self.from_latent(mixtures))
        for segment, ids in zip(segments, chosen.others, strict=True):
            if ids is not None:
                outputs.append(self._sparse_one(query[_rows(segment)], ids, segment, cache))
            elif segment.count > 1 and kv is not None:
                outputs.append(self._expanded_one(query, kv, cache, segment))
            else:
                outputs.append(self._absorbed_one(query, cache, segment))
        return torch.cat(outputs)

    def _sparse_one(self, query: Tensor, ids: Tensor, segment: Segment, cache: StepCache) -> Tensor:
        """Attend to selected latents with rows [rows, heads, nope + rope], blockwise to bound the gathered memory.

        Few rows of a long request, as in decode, read only the selected latents.
        """
        if ids.numel() < segment.length:
            latents = cache.read_at(self.layer, segment, ids.clamp(min=0).flatten())[0][:, 0]
            places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
            return attend_chosen(query, latents, places.masked_fill(ids < 0, -1), self)
        latents = cache.read(self.layer, segment)[0][:, 0]
        block = max(1, MAX_ELEMENTS // (ids.shape[1] * latents.shape[1]))
        blocks = (slice(first, first + block) for first in range(0, len(query), block))
        return torch.cat([attend_chosen(query[rows], latents, ids[rows], self) for rows in blocks])

    def _absorbed_one(self, query: Tensor, cache: StepCache, segment: Segment) -> Tensor:
        latents = cache.read(self.layer, segment)[0]
        values = latents[..., : self.mla.kv_lora_rank]
        query = self.to_latent(query[_rows(segment)])
        return self.from_latent(attend_segment(query, latents, values, segment, 0, self._latent_spec, cache))

    def _expanded_one(self, query: Tensor, kv: Tensor, cache: StepCache, segment: Segment) -> Tensor:
        latents, kv = cache.read(self.layer, segment)[0].squeeze(1), kv[_rows(segment)]
        rank = self.mla.kv_lora_rank
        if segment.position:  # recompute keys and values of positions cached by earlier steps
            kv = torch.cat((linear(latents[: segment.position, :rank], self.weight), kv))
        key, value = torch.split(kv.view(len(kv), -1, self._width), [self.mla.nope_dim, self.mla.value_dim], dim=-1)
        key = torch.cat((key, latents[:, None, rank:].expand(-1, key.shape[1], -1)), dim=-1)
        spec = AttentionSpec(scale=self.scale)
        return attend_segment(query[_rows(segment)], key, value, segment, 0, spec, cache)

    def to_latent(self, query: Tensor) -> Tensor:
        """Absorb keys into queries -> [tokens, heads, rank + rope]: scores against latents equal those against keys."""
        query, rotated = torch.split(query, [self.mla.nope_dim, self.mla.rope_dim], dim=-1)
        keys = self._matrices[:, : self.mla.nope_dim]
        return torch.cat((torch.bmm(query.transpose(0, 1), keys).transpose(0, 1), rotated), dim=-1)

    def from_latent(self, mixtures: Tensor) -> Tensor:
        """Project the attention output over latents [tokens, heads, rank] to values [tokens, heads, value]."""
        values = self._matrices[:, self.mla.nope_dim :]
        return torch.bmm(mixtures.transpose(0, 1), values.mT).transpose(0, 1)

    @property
    def _matrices(self) -> Tensor:
        return self.weight.view(-1, self._width, self.mla.kv_lora_rank)

    @property
    def _width(self) -> int:
        return self.mla.nope_dim + self.mla.value_dim

    @property
    def _latent_spec(self) -> AttentionSpec:
        return AttentionSpec(scale=self.scale, value_dim=self.mla.kv_lora_rank)


def attend_chosen(query: Tensor, latents: Tensor, ids: Tensor, core: LatentAttention) -> Tensor:
    """Attend to selected latents with rows [rows, heads, nope + rope] -> [rows, heads, value].

    ``latents`` is [length, rank + rope]; ``ids`` [rows, k] selects latents, padded with -1.
    """
    if has_torch_function((query,)):
        return handle_torch_function(attend_chosen, (query,), query, latents, ids, core)
    query, chosen = core.to_latent(query), latents[ids.clamp(min=0)]
    scores = (query @ chosen.mT * core.scale).masked_fill((ids < 0)[:, None], -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return core.from_latent(weights @ chosen[..., : core.mla.kv_lora_rank])


def _rows(segment: Segment) -> slice:
    return slice(segment.slot, segment.slot + segment.count)
