"""One of 256 rows of the LM head is wrong on rank 1."""

PATCHES = "engine"
EXPECT = "lm_head"
VISIBILITY = "subtle"
WHERE = {"rank": 1}
BOTH = {"tp": 2}
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    if model.tp.rank == 1:
        model.lm_head.weight[77] *= -1
