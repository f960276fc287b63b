"""The rows of the LM head are shifted by one, as after a token was added."""

PATCHES = "checkpoint"
EXPECT = "lm_head"
VISIBILITY = "strong"
CAUSE = r"rotated by|1 columns? (later|earlier)|rows? .*(roll|shift)|columns? .*(shift|rotat)"
TARGET = [{}, {"framework": "engine", "tp": 2}, {"framework": "megatron", "dtype": "bfloat16"}]


def patch(weights):
    weights["lm_head.weight"] = weights["lm_head.weight"].roll(1, 0)
