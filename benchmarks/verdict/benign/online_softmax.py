"""Attention in blocks of keys, as flash attention does."""

from unittest import mock

import torch

from benchmarks.verdict.families import modeling

FAMILY = ["llama", "olmo2"]
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    module = modeling(model.config.model_type)

    def attention(layer, query, key, value, mask, scaling, dropout=0.0, **kwargs):
        key, value = (module.repeat_kv(each, layer.num_key_value_groups) for each in (key, value))
        most = torch.full((*query.shape[:3], 1), -1e30, device=query.device)
        total, summed = torch.zeros_like(most), torch.zeros_like(query, dtype=torch.float32)
        for start in range(0, key.shape[2], 4):
            part = slice(start, start + 4)
            scores = (query @ key[:, :, part].transpose(2, 3)).float() * scaling
            scores = scores if mask is None else scores + mask[..., part].float()
            highest = torch.maximum(most, scores.amax(-1, keepdim=True))
            weights, shrunk = (scores - highest).exp(), (most - highest).exp()
            total = total * shrunk + weights.sum(-1, keepdim=True)
            summed = summed * shrunk + (weights.to(value.dtype) @ value[:, :, part]).float()
            most = highest
        return (summed / total.clamp(min=1e-30)).to(query.dtype).transpose(1, 2).contiguous(), None

    return mock.patch.object(module, "eager_attention_forward", attention)
