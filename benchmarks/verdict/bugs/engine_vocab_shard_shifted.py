"""Rank 1 looks up tokens one row too low in its embedding shard."""

PATCHES = "engine"
EXPECT = "model.embed_tokens"
VISIBILITY = "strong"
CAUSE = r"(row|token) .*(earlier|later|off by|next|before|shift|lower)|shift"
BOTH = {"tp": 2}
BASELINE = [{}, {"framework": "transformers", "tp": 1}]


def patch(model):
    if model.tp.rank == 1:
        table = model.model.embed_tokens.weight
        table.copy_(table.roll(1, dims=0))
