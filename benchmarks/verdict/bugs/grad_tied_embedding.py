"""Tied word embeddings get their gradient only from the LM head."""

import torch

from benchmarks.verdict.tools import around

FAMILY = "llama-tied"
EXPECT = ["model.embed_tokens", "lm_head"]
VISIBILITY = "strong"
CAUSE = r"no gradient|zero|head alone|left out|embedding"
BOTH = {"train": True, "schedule": "whole"}


def patch(model):
    embedding = model.model.embed_tokens

    def call(forward, ids):
        return torch.nn.functional.embedding(ids, embedding.weight.detach()).requires_grad_()

    around(embedding, call)
