"""Attention: causal attention of packed rows against a paged KV cache, with torch's SDPA, one request at a time."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tapscope.engine.cache import Segment, StepCache


class Attention(nn.Module):
    """Writes the step's keys and values into the cache and attends to all of each request's positions."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        heads = "t num_heads[tp] d"
        self.tap_dims = {"in[query]": heads, "in[key]": heads, "in[value]": heads, "out": "t h[tp]"}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, past_key_values: StepCache) -> Tensor:
        """[tokens, heads, d] with [tokens, kv_heads, d] twice -> [tokens, heads * d], in the query's dtype."""
        past_key_values.write(self.layer, key, value)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for segment in past_key_values.segments:
            rows = slice(segment.slot, segment.slot + segment.count)
            keys, values = past_key_values.read(self.layer, segment)
            output[rows] = attend(query[rows], keys, values, segment)
        return output.flatten(1)


def attend(query: Tensor, keys: Tensor, values: Tensor, segment: Segment) -> Tensor:
    """One request: [count, heads, d] against [length, kv_heads, d] twice -> [count, heads, d]; arXiv:1706.03762.

    A single query folds its group of heads into the row axis, [1, kv_heads, group, d]: on a CPU that is several
    times faster than `enable_gqa`. Row i of the query stands at position ``segment.position + i``.
    """
    count, num_heads, dim = query.shape
    k, v = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    if count == 1:
        folded = query.view(1, k.shape[1], num_heads // k.shape[1], dim)
        return scaled_dot_product_attention(folded, k, v).view(1, num_heads, dim)
    q = query.transpose(0, 1).unsqueeze(0)
    mask = None
    if segment.position:  # SDPA's own causal mask starts at the top left; here the diagonal ends bottom right
        mask = torch.ones(count, segment.length, dtype=torch.bool, device=query.device).tril(segment.position)
    grouped = num_heads != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return out[0].transpose(0, 1)
