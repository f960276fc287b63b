"""The rows of rank 1's embedding shard are shifted by one."""

PATCHES = "megatron"
EXPECT = "model.embed_tokens"
VISIBILITY = "strong"
CAUSE = r"(row|token) .*(earlier|later|off by|next|before|shift|lower)|shift"
BASELINE = {"framework": "transformers"}
TARGET = [{"tp": 2}, {"tp": 2, "sequence_parallel": True}]


def patch(model):
    import torch

    if torch.distributed.get_rank() == 1:
        weight = model.embedding.word_embeddings.weight
        weight.data.copy_(weight.data.roll(1, 0))
